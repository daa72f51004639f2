// Select the k largest entries of each part of each row. A part is, for example, the scores of one
// pyramid level. Of equal entries, the one of lower index comes first.
// Specification: stable_top_k/operation.py.
//
// A block reads a chunk of a part, THREADS * ITEMS entries, into registers. It converts the entries
// to integer keys, which have the order of the values. By radix selection it finds the key of the
// k-th largest entry, and writes the k largest entries in row order, which breaks ties.
// `prune_top_k` does only this. It is launched repeatedly, until the remaining entries of a part
// fit into one block. Then `sort_top_k` selects in the same way, and sorts the k entries by a radix
// sort. Both kernels skip bits that all keys share, such as the low 13 of 32 if the values were
// computed in fp16.
//
// Compile-time constants: VALUE (type), ITEMS, LEVELS (number of parts), MAX_K (largest number of
// sorted entries, a power of two), THREADS.
#include "levels.cuh"
#include "numeric.cuh"
#include "warp.cuh"

#define PART_PARAMETERS(l) int first##l, int count##l
#define PART_OF_LEVEL(l) {first##l, count##l}

constexpr int KEY_BITS = 32;
// Bits of the keys per pass of the selection, and number of bins.
constexpr int SELECTED_BITS = 11;
constexpr int BINS = 1 << SELECTED_BITS;
// Number of values of a digit: the six bits by which one pass of the sort orders entries.
constexpr int DIGITS = 64;
constexpr unsigned SIGN = 0x80000000u;
// Bits of negative infinity.
constexpr unsigned NEGATIVE_INFINITY = 0xff800000u;
static_assert(THREADS == WARP * WARP, "a warp has a lane for each warp's total");
static_assert(BINS == 2 * THREADS && DIGITS * WARP == 2 * THREADS, "a thread has two counters");
static_assert(MAX_K == 4 * THREADS, "a thread sorts one, two or four entries");
static_assert(THREADS * ITEMS < 1 << 16, "totals of a chunk are packed in 16 bits");

using Value = VALUE;
using Keys = unsigned[ITEMS];

struct __align__(8) Entry {
    unsigned key;
    // Index in the row.
    int index;
};

struct Part {
    // Index of the part's first entry in a row.
    int first;
    // Number of entries that are left after pruning: the candidates.
    int count;
};

// The block's part of a row.
struct Row {
    const Value* values;
    // Entries by ascending index; null: all entries of the part.
    const Entry* candidates;
    Part part;

    __device__ Row(const Value* values, int stride, const Entry* candidates, int width,
                   const Part (&parts)[LEVELS])
        : values(values + static_cast<long long>(blockIdx.x / LEVELS) * stride),
          candidates(candidates ? candidates + static_cast<long long>(blockIdx.x) * width
                                : nullptr),
          part(parts[blockIdx.x % LEVELS]) {}

    __device__ int index_of(int place) const {
        return candidates ? candidates[place].index : part.first + place;
    }
};

// Integer key of a value: SIGN plus or minus the bits of its magnitude. Zeros of either sign are
// equal. All NaN are equal and the largest. No value has the key 0. If the low bits of values are
// zero, as in values of 16 bits, the low bits of their keys are zero too, except for NaN.
__device__ unsigned key_of(Value value) {
    const float wide = widen(value);
    const unsigned bits = __float_as_uint(wide), magnitude = bits & ~SIGN;
    const unsigned key = bits & SIGN ? SIGN - magnitude : SIGN + magnitude;
    return isnan(wide) ? 0xffffffffu : key;
}

// Index of the thread's first entry in a chunk. Its further entries are WARP entries apart.
__device__ int first_place() {
    const int lane = threadIdx.x % WARP;
    return (threadIdx.x - lane) * ITEMS + lane;
}

__device__ void load_keys(const Row& row, int start, int size, Keys& keys) {
    // Unconditional loads can all be in flight at once.
    if (row.candidates) {
        const Entry* entries = row.candidates + start;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            keys[i] = entries[min(first_place() + i * WARP, size - 1)].key;
        }
    } else {
        const Value* values = row.values + row.part.first + start;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            keys[i] = key_of(values[min(first_place() + i * WARP, size - 1)]);
        }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (first_place() + i * WARP >= size) keys[i] = 0;
    }
}

__device__ unsigned sum_of_warp(unsigned value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(ALL_LANES, value);
#endif
    return combined_over_warp(value, [](unsigned a, unsigned b) { return a + b; });
}

__device__ unsigned or_of_warp(unsigned value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_or_sync(ALL_LANES, value);
#endif
    return combined_over_warp(value, [](unsigned a, unsigned b) { return a | b; });
}

// Return the sum of `totals` of all warps with a lower index than this one.
__device__ unsigned sum_of_lower_warps(const unsigned (&totals)[WARP]) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    return sum_of_warp(lane < warp ? totals[lane] : 0);
}

// Return the bits that differ between some keys of the block. `ones` are the bits that are one in
// some key of the thread, `zeros` those that are zero in some key. Calls must be separated by a
// barrier.
__device__ unsigned differing_bits(unsigned ones, unsigned zeros) {
    __shared__ unsigned warps_ones[WARP], warps_zeros[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    ones = or_of_warp(ones);
    zeros = or_of_warp(zeros);
    if (lane == 0) {
        warps_ones[warp] = ones;
        warps_zeros[warp] = zeros;
    }
    __syncthreads();
    return or_of_warp(warps_ones[lane]) & or_of_warp(warps_zeros[lane]);
}

// Return the sum of `count` of all threads with a lower index. Separate calls by a barrier.
__device__ int sum_of_lower_threads(int count) {
    __shared__ unsigned totals[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int sum = count;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const int other = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == WARP - 1) totals[warp] = sum;
    __syncthreads();
    return sum - count + static_cast<int>(sum_of_lower_warps(totals));
}

// Two counters per thread. The selection counts entries by bin, the sort by digit and warp.
__shared__ int counters[2 * THREADS];

struct Threshold {
    // The keys of all wanted entries are at least this key.
    unsigned key;
    // Whether the keys of all other entries are less. False: some may be equal to `key`.
    bool is_exact;
};

// Return the threshold of the `wanted` largest entries of the block. Radix selection: count all
// entries by the highest bits that differ; then count those in the bin of the last wanted entry by
// the next bits, and so on.
__device__ Threshold threshold_of_largest(const Keys& keys, int wanted) {
    // Bin of the last wanted entry, number of entries in earlier bins, and number in this bin.
    __shared__ int found_bin, found_before, found_count;
    // The thread's two bins. Bin 0 has the entries with the largest bits.
    const int bin = 2 * threadIdx.x;
    int &first = counters[bin], &second = counters[bin + 1];
    unsigned ones = 0, zeros = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        ones |= keys[i];
        zeros |= ~keys[i];
    }
    first = second = 0;
    unsigned differing = differing_bits(ones, zeros);
    // At first, the key has only the bits that all keys share.
    Threshold threshold = {keys[0] & ~differing, false};
    while (differing != 0 && !threshold.is_exact) {
        const int top = KEY_BITS - 1 - __clz(differing), shift = max(0, top + 1 - SELECTED_BITS);
        const unsigned above = ~0u << top << 1;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (((keys[i] ^ threshold.key) & above) == 0) {
                atomicAdd(&counters[~(keys[i] >> shift) & (BINS - 1)], 1);
            }
        }
        __syncthreads();
        const int before = sum_of_lower_threads(first + second);
        if (before < wanted && wanted <= before + first + second) {
            const bool is_second = before + first < wanted;
            found_bin = bin + is_second;
            found_before = before + is_second * first;
            found_count = is_second ? second : first;
        }
        first = second = 0;
        __syncthreads();
        threshold.key |= (~found_bin & (BINS - 1)) << shift & ~above;
        wanted -= found_before;
        threshold.is_exact = wanted == found_count;
        differing &= (1u << shift) - 1;
    }
    return threshold;
}

// Call store(slot, key, place) for the `wanted` largest entries of the block's chunk. `slot` counts
// them in row order, and `place` is the index of the entry in the chunk.
template <typename Store>
__device__ void place_largest(const Keys& keys, int wanted, const Store& store) {
    __shared__ unsigned totals[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const unsigned lower_lanes = (1u << lane) - 1;
    const Threshold threshold = threshold_of_largest(keys, wanted);
    // Bit i: whether the thread's entry i is wanted.
    unsigned chosen = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) chosen |= (keys[i] >= threshold.key) << i;
    if (!threshold.is_exact) {
        // Of the entries that are equal to the threshold, only the first are wanted. The high half
        // of a total counts entries above the threshold, the low half entries equal to it.
        unsigned own = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            own += (keys[i] > threshold.key) << 16 | (keys[i] == threshold.key);
        }
        own = sum_of_warp(own);
        if (lane == 0) totals[warp] = own;
        __syncthreads();
        const int equal_wanted = wanted - static_cast<int>(sum_of_warp(totals[lane]) >> 16);
        int equal_before = sum_of_lower_warps(totals) & 0xffffu;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const unsigned equal = __ballot_sync(ALL_LANES, keys[i] == threshold.key);
            const int rank = equal_before + __popc(equal & lower_lanes);
            if (keys[i] == threshold.key && rank >= equal_wanted) chosen &= ~(1u << i);
            equal_before += __popc(equal);
        }
        __syncthreads();
    }
    const unsigned own = sum_of_warp(__popc(chosen));
    if (lane == 0) totals[warp] = own;
    __syncthreads();
    int before = sum_of_lower_warps(totals);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const bool is_chosen = chosen >> i & 1;
        const unsigned lanes = __ballot_sync(ALL_LANES, is_chosen);
        if (is_chosen) {
            store(before + __popc(lanes & lower_lanes), keys[i], first_place() + i * WARP);
        }
        before += __popc(lanes);
    }
}

// Sort `count` entries (at most OWN * THREADS) by descending key. Entries with equal keys keep
// their order. The entries from `count` to OWN * THREADS must have the key 0. Radix sort: each pass
// orders the entries by six bits of their keys (a digit), from the lowest bits that differ to the
// highest.
template <int OWN>
__device__ void sort_block(Entry* entries, int count) {
    // The counters are a table [DIGITS, WARP] of numbers of entries by digit and warp. The first row
    // counts the largest digit. Rows are rotated, so that each bank has two of a warp's counters.
    const auto counter_of = [](int row, int warp) {
        return &counters[row * WARP + (row + warp) % WARP];
    };
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int row = 2 * threadIdx.x / WARP, column = 2 * threadIdx.x % WARP;
    int &first = *counter_of(row, column), &second = *counter_of(row, column + 1);
    // Index of the thread's first entry. Its further entries are WARP entries apart.
    const int begin = warp * WARP * OWN + lane;
    Entry own[OWN];
    unsigned ones = 0, zeros = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        own[i] = entries[begin + i * WARP];
        if (begin + i * WARP < count) {
            ones |= own[i].key;
            zeros |= ~own[i].key;
        }
    }
    for (unsigned differing = differing_bits(ones, zeros); differing != 0;) {
        const int shift = __ffs(differing) - 1;
        differing &= ~((DIGITS - 1u) << shift);
        first = second = 0;
        __syncthreads();
        int ranks[OWN];
        int* counter[OWN];
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const unsigned digit = ~(own[i].key >> shift) & (DIGITS - 1);
            const unsigned equal = __match_any_sync(ALL_LANES, digit);
            const int lower = __popc(equal & ((1u << lane) - 1));
            counter[i] = counter_of(digit, warp);
            ranks[i] = *counter[i] + lower;
            __syncwarp();
            if (lower == 0) *counter[i] += __popc(equal);
            __syncwarp();
        }
        __syncthreads();
        const int before = sum_of_lower_threads(first + second);
        second = before + first;
        first = before;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < OWN; ++i) entries[*counter[i] + ranks[i]] = own[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < OWN; ++i) own[i] = entries[begin + i * WARP];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
prune_top_k(const Value* __restrict__ values, const Entry* __restrict__ candidates, int stride,
            int width, EACH_LEVEL(PART_PARAMETERS), int k, int left,
            Entry* __restrict__ survivors) {
    const Part parts[LEVELS] = {EACH_LEVEL(PART_OF_LEVEL)};
    const Row row(values, stride, candidates, width, parts);
    const int start = blockIdx.y * THREADS * ITEMS;
    const int size = min(THREADS * ITEMS, row.part.count - start);
    if (size <= 0) return;
    survivors += static_cast<long long>(blockIdx.x) * left + blockIdx.y * k;
    Keys keys;
    load_keys(row, start, size, keys);
    place_largest(keys, min(k, size), [&](int slot, unsigned key, int place) {
        survivors[slot] = {key, row.index_of(start + place)};
    });
}

extern "C" __global__ void __launch_bounds__(THREADS)
sort_top_k(const Value* __restrict__ values, const Entry* __restrict__ candidates, int stride,
           int width, EACH_LEVEL(PART_PARAMETERS), int k, Value* __restrict__ largest,
           long long* __restrict__ indices) {
    __shared__ Entry entries[MAX_K];
    const Part parts[LEVELS] = {EACH_LEVEL(PART_OF_LEVEL)};
    const Row row(values, stride, candidates, width, parts);
    const int wanted = min(k, row.part.count);
    largest += static_cast<long long>(blockIdx.x) * k;
    indices += static_cast<long long>(blockIdx.x) * k;
    Keys keys;
    load_keys(row, 0, row.part.count, keys);
    place_largest(keys, wanted, [&](int slot, unsigned key, int place) {
        entries[slot] = {key, row.index_of(place)};
    });
    for (int slot = wanted + threadIdx.x; slot < MAX_K; slot += THREADS) entries[slot] = {0, 0};
    __syncthreads();
    if (wanted <= THREADS) sort_block<1>(entries, wanted);
    else if (wanted <= 2 * THREADS) sort_block<2>(entries, wanted);
    else sort_block<MAX_K / THREADS>(entries, wanted);
    for (int slot = threadIdx.x; slot < k; slot += THREADS) {
        if (slot < wanted) {
            const int index = entries[slot].index;
            largest[slot] = row.values[index];
            indices[slot] = index;
        } else {
            narrow(__uint_as_float(NEGATIVE_INFINITY), largest[slot]);
            indices[slot] = -1;
        }
    }
}
