// Numeric types of tensor elements, defined without the headers of the CUDA toolkit. 16-bit types
// are loaded and stored as bits; arithmetic uses the type `Accumulator`.
#pragma once

struct float16 {
    unsigned short bits;
};

struct bfloat16 {
    unsigned short bits;
};

template <typename T>
struct AccumulatorOf {
    using type = float;
};
template <>
struct AccumulatorOf<double> {
    using type = double;
};
template <typename T>
using Accumulator = typename AccumulatorOf<T>::type;

__device__ inline float widen(float value) { return value; }
__device__ inline double widen(double value) { return value; }
__device__ inline float widen(bfloat16 value) {
    return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}
__device__ inline float widen(float16 value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
}

__device__ inline void narrow(float value, float& narrowed) { narrowed = value; }
__device__ inline void narrow(double value, double& narrowed) { narrowed = value; }
__device__ inline void narrow(float value, float16& narrowed) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrowed.bits) : "f"(value));
}
__device__ inline void narrow(float value, bfloat16& narrowed) {
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrowed.bits) : "f"(value));
#else
    // Round to nearest even, as the instruction above does.
    const unsigned bits = __float_as_uint(value);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const unsigned rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    narrowed.bits = is_nan ? 0x7fffu : static_cast<unsigned short>(rounded >> 16);
#endif
}

// N neighbouring values that one instruction loads or stores.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
    T values[N];
};
