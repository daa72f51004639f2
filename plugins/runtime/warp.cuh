// Warps: 32 neighbouring threads of a block.
#pragma once

constexpr int WARP = 32;
// An enumerator, because the compiler would store a variable in global memory.
enum : unsigned { ALL_LANES = 0xffffffffu };

// Return the combination of the values of all lanes, in every lane. `combine` must be commutative.
template <typename Value, typename Combine>
__device__ Value combined_over_warp(Value value, const Combine& combine) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        value = combine(value, __shfl_xor_sync(ALL_LANES, value, step));
    }
    return value;
}
