// Matrix products of 16-bit values in shared memory, computed by a warpgroup (four warps). Only
// GPUs of compute capability 9.0 have these instructions.
#pragma once
#include "numeric.cuh"

constexpr int WARPGROUP = 128;

// Position of a matrix in shared memory. The matrix consists of blocks of 8 rows x 8 values. A
// block is 128 neighbouring bytes, row by row. Distances are in bytes, and multiples of 16.
struct SharedMatrix {
    unsigned long long bits;

    // `along_row` and `along_column` are the distances between neighbouring blocks along a row and
    // along a column. A row has two blocks.
    __device__ SharedMatrix(const void* values, unsigned along_row, unsigned along_column)
        : bits(static_cast<unsigned long long>(along_column >> 4) << 32 |
               static_cast<unsigned long long>(along_row >> 4) << 16 |
               static_cast<unsigned>(__cvta_generic_to_shared(values)) >> 4) {}

    // Move the matrix by a number of bytes, a multiple of 16.
    __device__ void move(int bytes) { bits += bytes / 16; }
};

#define SUMS_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SUMS_32                                                                                  \
    SUMS_4(0), SUMS_4(4), SUMS_4(8), SUMS_4(12), SUMS_4(16), SUMS_4(20), SUMS_4(24), SUMS_4(28)

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define WARPGROUP_MULTIPLY(type)                                                                 \
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %34, 0;\n"                              \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " "                 \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "       \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, "   \
                 "%31}, %32, %33, keep, 1, 1, 0, 0;\n}"                                          \
                 : SUMS_32                                                                       \
                 : "l"(a.bits), "l"(b.bits), "r"(static_cast<int>(keep)))

// Queue the product of 64x16 values `a` and the transpose of 64x16 values `b`. The product is added
// to the 64x64 sums, or replaces them if `keep` is false. The thread with index t in the warpgroup
// holds, in sums[4 * j + 2 * i + k], the sum of row 16 * (t / 32) + t % 32 / 4 + 8 * i and column
// 8 * j + 2 * (t % 4) + k.
__device__ inline void queue_product(float (&sums)[32], SharedMatrix a, SharedMatrix b, bool keep,
                                     float16) {
    WARPGROUP_MULTIPLY("f16");
}

__device__ inline void queue_product(float (&sums)[32], SharedMatrix a, SharedMatrix b, bool keep,
                                     bfloat16) {
    WARPGROUP_MULTIPLY("bf16");
}

// Call this before the first product, and after the thread changed its sums.
__device__ inline void start_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Close the group of products that were queued since the previous call of this function.
__device__ inline void end_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait for all products. Call this for each array of sums before reading it.
__device__ inline void wait_for_sums(float (&sums)[32]) {
    // The sums are operands, so that the compiler does not read them earlier.
    asm volatile("wgmma.wait_group.sync.aligned 0;" : SUMS_32 : : "memory");
}

// Make the thread's stores to shared memory visible to products. A barrier must follow.
__device__ inline void publish_to_products() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Wait for all threads of a warpgroup. Different warpgroups of a block use different barriers, 1 to
// 15.
__device__ inline void synchronise_warpgroup(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(WARPGROUP) : "memory");
}
#endif
