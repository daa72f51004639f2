// Matrix products of 16-bit values on tensor cores. A warp holds the operands in registers.
#pragma once
#include "numeric.cuh"

#if __CUDA_ARCH__ >= 800
// Add the product of 16x16 and 16x8 values to 16x8 sums.
__device__ inline void multiply_add(float (&sums)[4], const unsigned (&a)[4], unsigned b0,
                                    unsigned b1, float16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void multiply_add(float (&sums)[4], const unsigned (&a)[4], unsigned b0,
                                    unsigned b1, bfloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#else
// Operations do not launch kernels with these instructions on older GPUs.
template <typename Value>
__device__ inline void multiply_add(float (&)[4], const unsigned (&)[4], unsigned, unsigned,
                                    Value) {}
#endif

// Return two values as 16-bit numbers, the first in the low half.
#if __CUDA_ARCH__ >= 800
#define NARROW_PAIR(rounding, type)                                                              \
    unsigned bits;                                                                               \
    asm("cvt.rn" rounding "." type ".f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));       \
    return bits;
#else
// Operations do not launch kernels with these instructions on older GPUs.
#define NARROW_PAIR(rounding, type) return 0;
#endif

__device__ inline unsigned narrow_pair(float low, float high, float16) {
    NARROW_PAIR("", "f16x2")
}
__device__ inline unsigned narrow_pair(float low, float high, bfloat16) {
    NARROW_PAIR("", "bf16x2")
}

// Apply a ReLU to two values, and return them as 16-bit numbers, the first in the low half. NaN
// stays NaN, and a negative zero may stay negative.
__device__ inline unsigned relu_pair(float low, float high, float16) {
    NARROW_PAIR(".relu", "f16x2")
}
__device__ inline unsigned relu_pair(float low, float high, bfloat16) {
    NARROW_PAIR(".relu", "bf16x2")
}
#undef NARROW_PAIR
