// Reductions over a warp (32 neighbouring threads of a block), and prefix sums over a block.
#pragma once

constexpr int WARP = 32;
// An enumerator, because the compiler would store a variable in global memory.
enum : unsigned { ALL_LANES = 0xffffffffu };

// Reduce the values of all lanes with `combine`, which must be commutative. Return the result in
// every lane.
template <typename Value, typename Combine>
__device__ Value combined_over_warp(Value value, const Combine& combine) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        value = combine(value, __shfl_xor_sync(ALL_LANES, value, step));
    }
    return value;
}

// Return the exclusive prefix sum of `own` over a block of WARPS warps, plus `total`. Then add the
// sum of all threads to `total`. Call __syncthreads() between two calls of this function.
template <int WARPS>
__device__ int sum_before(int own, int& total) {
    __shared__ int warps[WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int inclusive = own;
    for (int distance = 1; distance < WARP; distance *= 2) {
        const int earlier = __shfl_up_sync(ALL_LANES, inclusive, distance);
        if (lane >= distance) inclusive += earlier;
    }
    if (lane == WARP - 1) warps[warp] = inclusive;
    __syncthreads();

    int before = total + inclusive - own;
    for (int other = 0; other < WARPS; ++other) {
        if (other < warp) before += warps[other];
        total += warps[other];
    }
    return before;
}
