// Compress run lengths to COCO RLE strings, one block per mask.
// Specification: compress_runs/operation.py.
//
// A block first counts the characters of its mask, and reserves a range of that length in `text`,
// which all masks share. A thread then encodes one run at a time. A prefix sum over the block gives
// the position of the run's characters.
//
// Compile-time constants: THREADS.
#include "warp.cuh"

constexpr int WARPS = THREADS / WARP;
constexpr int GROUP_BITS = 5;
static_assert(THREADS % WARP == 0, "threads are used by the warp");

// Number of groups of GROUP_BITS bits that hold a number and its sign.
__device__ int groups_of(int value) {
    const int bits = WARP - __clz(value ^ (value >> 31));
    return (bits + GROUP_BITS) / GROUP_BITS;
}

// Number that COCO RLE stores for a run: the length of the run or, from the fourth run on, its
// difference from the length of the run two before.
__device__ int stored(const int* counts, int run) {
    return counts[run] - (run > 2 ? counts[run - 2] : 0);
}

extern "C" __global__ void __launch_bounds__(THREADS)
compress_runs(const int* __restrict__ counts, const int* __restrict__ num_runs, int runs_capacity,
              int capacity, unsigned char* __restrict__ text, long long* __restrict__ spans) {
    __shared__ long long first;
    const long long mask = blockIdx.x;
    counts += mask * runs_capacity;
    long long* const span = spans + 2 * mask;
    // The last row of `spans`, after those of the masks, counts all reserved characters.
    unsigned long long* const reserved =
        reinterpret_cast<unsigned long long*>(spans + 2 * static_cast<long long>(gridDim.x));
    const int runs = num_runs[mask];
    if (runs > runs_capacity) {
        if (threadIdx.x == 0) span[1] = -1;
        return;
    }

    int own = 0, length = 0;
    for (int run = threadIdx.x; run < runs; run += THREADS) own += groups_of(stored(counts, run));
    sum_before<WARPS>(own, length);
    if (threadIdx.x == 0) {
        first = static_cast<long long>(atomicAdd(reserved, static_cast<unsigned long long>(length)));
        span[0] = first;
        span[1] = length;
    }
    __syncthreads();

    int total = 0;
    for (int start = 0; start < runs; start += THREADS) {
        const int run = start + threadIdx.x;
        int value = 0, groups = 0;
        if (run < runs) {
            value = stored(counts, run);
            groups = groups_of(value);
        }
        long long place = first + sum_before<WARPS>(groups, total);
        for (; groups > 0; --groups, ++place, value >>= GROUP_BITS) {
            const int more = groups > 1 ? 0x20 : 0;
            if (place < capacity) text[place] = (value & 0x1f) + more + 48;
        }
        __syncthreads();
    }
}
