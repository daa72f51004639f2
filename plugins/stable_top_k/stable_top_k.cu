// Top k of rows, ties broken by the lower index. Contract: stable_top_k/operation.py.
//
// A block reads a chunk of a row, THREADS * ITEMS entries, into registers as integer keys in the
// order of the values. Bit by bit it finds the key of the k-th largest entry, and writes the k
// largest entries in row order, which breaks ties. Bits that all keys share are skipped: 13 of 32 if
// the values were computed in fp16, and all of them in padding. `prune_top_k` ends here; it is
// launched until the remaining entries of a row fit into one block. `sort_top_k` also sorts the k
// entries.
//
// Compile-time constants: VALUE (type), ITEMS, MAX_K (largest number of sorted entries, a power of
// two), THREADS.
#include "numeric.cuh"

constexpr int WARP = 32;
constexpr int KEY_BITS = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr unsigned SIGN = 0x80000000u;
static_assert(THREADS == WARP * WARP, "a warp has a lane for each warp's total");
static_assert(THREADS * ITEMS < 1 << 16, "totals of a chunk are packed in 16 bits");

using Value = VALUE;
using Keys = unsigned[ITEMS];
using Entry = unsigned long long;

// Entries of a row that are left after pruning: the candidates.
struct Row {
    const Value* values;
    // Ascending indices into the values; null: all entries.
    const int* candidates;

    __device__ int index_of(int place) const { return candidates ? candidates[place] : place; }
};

// Integer key of a value: SIGN plus or minus the bits of its magnitude. Zeros of either sign are
// equal. All NaN are equal and the largest. No value has the key 0. Values with the same low bits of
// zero, such as those of 16 bits, have keys with low bits of zero.
__device__ unsigned key_of(Value value) {
    const float wide = widen(value);
    const unsigned bits = __float_as_uint(wide), magnitude = bits & ~SIGN;
    const unsigned key = bits & SIGN ? SIGN - magnitude : SIGN + magnitude;
    return isnan(wide) ? 0xffffffffu : key;
}

// Index of the thread's first entry in a chunk; the others follow at steps of a warp.
__device__ int first_place() {
    const int lane = threadIdx.x % WARP;
    return (threadIdx.x - lane) * ITEMS + lane;
}

__device__ void load_keys(const Row& row, int start, int size, Keys& keys) {
    // Unconditional loads can all be in flight at once.
    int places[ITEMS];
    Value values[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) places[i] = start + min(first_place() + i * WARP, size - 1);
    if (row.candidates) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) places[i] = row.candidates[places[i]];
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) values[i] = row.values[places[i]];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        keys[i] = first_place() + i * WARP < size ? key_of(values[i]) : 0u;
    }
}

__device__ unsigned sum_of_warp(unsigned value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(ALL_LANES, value);
#endif
    for (int step = WARP / 2; step > 0; step /= 2) {
        value += __shfl_xor_sync(ALL_LANES, value, step);
    }
    return value;
}

__device__ unsigned or_of_warp(unsigned value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_or_sync(ALL_LANES, value);
#endif
    for (int step = WARP / 2; step > 0; step /= 2) {
        value |= __shfl_xor_sync(ALL_LANES, value, step);
    }
    return value;
}

// Return a key that exactly `wanted` entries reach or exceed. If ties prevent that, return the key
// of the last wanted entry.
__device__ unsigned key_of_last(const Keys& keys, int wanted) {
    __shared__ unsigned warps_ones[WARP], warps_zeros[WARP];
    // Two buffers, so that a bit's totals are read while the next bit's are written.
    __shared__ unsigned totals[2][WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    // Bits that are one in some key of the block, and bits that are zero in some key.
    unsigned ones = 0, zeros = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        ones |= keys[i];
        zeros |= ~keys[i];
    }
    ones = or_of_warp(ones);
    zeros = or_of_warp(zeros);
    if (lane == 0) {
        warps_ones[warp] = ones;
        warps_zeros[warp] = zeros;
    }
    __syncthreads();
    ones = or_of_warp(warps_ones[lane]);
    zeros = or_of_warp(warps_zeros[lane]);

    unsigned last = ~zeros;
    int buffer = 0;
    for (unsigned differing = ones & zeros; differing != 0; buffer ^= 1) {
        const unsigned bit = SIGN >> __clz(differing), trial = last | bit;
        differing ^= bit;
        unsigned reached = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) reached += keys[i] >= trial;
        reached = sum_of_warp(reached);
        if (lane == 0) totals[buffer][warp] = reached;
        __syncthreads();
        const int count = sum_of_warp(totals[buffer][lane]);
        if (count >= wanted) last = trial;
        if (count == wanted) break;
    }
    return last;
}

// Call store(slot, key, place) for the wanted entries of the block, in row order.
template <typename Store>
__device__ void place_largest(const Keys& keys, int wanted, const Store& store) {
    // Number of entries above the last key in the high half, and equal to it in the low half.
    __shared__ unsigned totals[WARP];
    const unsigned last = key_of_last(keys, wanted);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    unsigned own = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) own += (keys[i] > last) << 16 | (keys[i] == last);
    own = sum_of_warp(own);
    if (lane == 0) totals[warp] = own;
    __syncthreads();
    const int equal_wanted = wanted - static_cast<int>(sum_of_warp(totals[lane]) >> 16);
    const unsigned before = sum_of_warp(lane < warp ? totals[lane] : 0u);
    int above_before = before >> 16, equal_before = before & 0xffffu;

    const unsigned lower_lanes = (1u << lane) - 1;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const unsigned above = __ballot_sync(ALL_LANES, keys[i] > last);
        const unsigned equal = __ballot_sync(ALL_LANES, keys[i] == last);
        const int equal_rank = equal_before + __popc(equal & lower_lanes);
        if (keys[i] > last || (keys[i] == last && equal_rank < equal_wanted)) {
            const int above_rank = above_before + __popc(above & lower_lanes);
            store(above_rank + min(equal_rank, equal_wanted), keys[i], first_place() + i * WARP);
        }
        above_before += __popc(above);
        equal_before += __popc(equal);
    }
}

// `sort_block` with one entry per thread. Lanes exchange entries by shuffling them, so that only
// every fourth step waits for other warps.
__device__ void sort_registers(Entry* entries, int size) {
    static_assert(MAX_K >= 2 * THREADS, "steps alternate between two copies of the entries");
    const int thread = threadIdx.x;
    Entry own = entries[thread];
    int copy = 0;
    for (int run = 2; run <= size; run *= 2) {
        for (int step = run / 2; step > 0; step /= 2) {
            Entry other;
            if (step < WARP) {
                other = __shfl_xor_sync(ALL_LANES, own, step);
            } else {
                copy ^= THREADS;
                entries[copy + thread] = own;
                __syncthreads();
                other = entries[copy + (thread ^ step)];
            }
            const bool first = (thread & step) == 0, descends = (thread & run) == 0;
            if ((first == descends) == (own < other)) own = other;
        }
    }
    __syncthreads();
    entries[thread] = own;
    __syncthreads();
}

// Descending bitonic sort of `size` entries, a power of two. Entries beyond them change.
__device__ void sort_block(Entry* entries, int size) {
    __syncthreads();
    if (size <= THREADS) {
        sort_registers(entries, size);
        return;
    }
    for (int run = 2; run <= size; run *= 2) {
        for (int step = run / 2; step > 0; step /= 2) {
            for (int pair = threadIdx.x; pair < size / 2; pair += THREADS) {
                const int first = 2 * pair - (pair & (step - 1)), second = first + step;
                const Entry a = entries[first], b = entries[second];
                const bool descends = (first & run) == 0;
                if (descends == (a < b)) {
                    entries[first] = b;
                    entries[second] = a;
                }
            }
            __syncthreads();
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
prune_top_k(const Value* __restrict__ values, const int* __restrict__ candidates, int stride,
            int count, int k, int left, int* __restrict__ survivors) {
    const long long row_index = blockIdx.x;
    const Row row = {values + row_index * stride,
                     candidates ? candidates + row_index * count : nullptr};
    const int start = blockIdx.y * THREADS * ITEMS, size = min(THREADS * ITEMS, count - start);
    survivors += row_index * left + static_cast<long long>(blockIdx.y) * k;
    Keys keys;
    load_keys(row, start, size, keys);
    place_largest(keys, min(k, size), [&](int slot, unsigned, int place) {
        survivors[slot] = row.index_of(start + place);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS)
sort_top_k(const Value* __restrict__ values, const int* __restrict__ candidates, int stride,
           int count, int k, Value* __restrict__ largest, long long* __restrict__ indices) {
    __shared__ Entry entries[MAX_K];
    const long long row_index = blockIdx.x;
    const Row row = {values + row_index * stride,
                     candidates ? candidates + row_index * count : nullptr};
    largest += row_index * k;
    indices += row_index * k;
    Keys keys;
    load_keys(row, 0, count, keys);
    // The inverted place makes entries distinct, and the first of equal entries the largest.
    place_largest(keys, k, [&](int slot, unsigned key, int place) {
        entries[slot] = static_cast<Entry>(key) << KEY_BITS | ~static_cast<unsigned>(place);
    });
    int size = 1;
    while (size < k) size *= 2;
    for (int slot = k + threadIdx.x; slot < size; slot += THREADS) entries[slot] = 0;
    sort_block(entries, size);
    for (int slot = threadIdx.x; slot < k; slot += THREADS) {
        const int index = row.index_of(~static_cast<unsigned>(entries[slot]));
        largest[slot] = row.values[index];
        indices[slot] = index;
    }
}
