// Compress run lengths to COCO RLE strings, one block per mask. Contract:
// compress_runs/operation.py.
//
// A thread encodes one run at a time. A prefix sum over the block gives the position of the run's
// characters.
//
// Compile-time constants: THREADS.

constexpr int WARP = 32;
constexpr int WARPS = THREADS / WARP;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int GROUP_BITS = 5;
static_assert(THREADS % WARP == 0, "threads are used by the warp");

// Number of groups of GROUP_BITS bits that hold a number and its sign.
__device__ int groups_of(int value) {
    const int bits = WARP - __clz(value ^ (value >> 31));
    return (bits + GROUP_BITS) / GROUP_BITS;
}

// Return the exclusive prefix sum of `own` over the block, plus `total`. Then add the sum of all
// threads to `total`. Call __syncthreads() between two calls of this function.
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

extern "C" __global__ void __launch_bounds__(THREADS)
compress_runs(const int* __restrict__ counts, const int* __restrict__ num_runs, int runs_capacity,
              int capacity, unsigned char* __restrict__ text, int* __restrict__ lengths) {
    const long long mask = blockIdx.x;
    counts += mask * runs_capacity;
    text += mask * capacity;
    const int runs = min(num_runs[mask], runs_capacity);
    int total = 0;
    for (int start = 0; start < runs; start += THREADS) {
        const int run = start + threadIdx.x;
        int value = 0, groups = 0;
        if (run < runs) {
            value = counts[run] - (run > 2 ? counts[run - 2] : 0);
            groups = groups_of(value);
        }
        int place = sum_before(groups, total);
        for (; groups > 0; --groups, ++place, value >>= GROUP_BITS) {
            const int more = groups > 1 ? 0x20 : 0;
            if (place < capacity) text[place] = (value & 0x1f) + more + 48;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) lengths[mask] = total;
}
