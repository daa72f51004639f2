// Top k of each part of each row, ties broken by the lower index. Contract:
// stable_top_k/operation.py.
//
// A block reads a chunk of a part, THREADS * ITEMS entries, into registers. It converts the entries
// to integer keys, which have the order of the values. Bit by bit it finds the key of the k-th
// largest entry, and writes the k largest entries in row order, which breaks ties. Bits that all
// keys share are skipped: 13 of 32 if the values were computed in fp16. `prune_top_k` does no more.
// It is launched until the remaining entries of a part fit into one block. Then `sort_top_k` does
// the same, and sorts the k entries.
//
// Compile-time constants: VALUE (type), ITEMS, LEVELS (number of parts), MAX_K (largest number of
// sorted entries, a power of two), THREADS.
#include "levels.cuh"
#include "numeric.cuh"

#define PART_PARAMETERS(l) int first##l, int count##l
#define PART_OF_LEVEL(l) {first##l, count##l}

constexpr int WARP = 32;
constexpr int KEY_BITS = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr unsigned SIGN = 0x80000000u;
// Bits of negative infinity.
constexpr unsigned NEGATIVE_INFINITY = 0xff800000u;
static_assert(THREADS == WARP * WARP, "a warp has a lane for each warp's total");
static_assert(MAX_K == 4 * THREADS, "a thread sorts one, two or four entries");
static_assert(THREADS * ITEMS < 1 << 16, "totals of a chunk are packed in 16 bits");

using Value = VALUE;
using Keys = unsigned[ITEMS];
using Entry = unsigned long long;

struct Part {
    // Index of the part's first entry in a row.
    int first;
    // Number of entries that are left after pruning: the candidates.
    int count;
};

// The block's part of a row.
struct Row {
    const Value* values;
    // Ascending indices into the row; null: all entries of the part.
    const int* candidates;
    Part part;

    __device__ Row(const Value* values, int stride, const int* candidates, int width,
                   const Part (&parts)[LEVELS])
        : values(values + static_cast<long long>(blockIdx.x / LEVELS) * stride),
          candidates(candidates ? candidates + static_cast<long long>(blockIdx.x) * width
                                : nullptr),
          part(parts[blockIdx.x % LEVELS]) {}

    __device__ int index_of(int place) const {
        return candidates ? candidates[place] : part.first + place;
    }
};

// Integer key of a value: SIGN plus or minus the bits of its magnitude. Zeros of either sign are
// equal. All NaN are equal and the largest. No value has the key 0. If the low bits of values are
// zero, as in values of 16 bits, the low bits of their keys are zero too.
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
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) places[i] = row.index_of(places[i]);
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

// Call store(slot, key, place) for the `wanted` largest entries of the block's chunk. `slot` counts
// them in row order, and `place` is the index of the entry in the chunk.
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

// Descending bitonic sort of `size` entries, a power of two of at most OWN * THREADS. Entries
// beyond them change. A thread holds the entries `thread + i * THREADS` in registers. Only the
// steps between WARP and THREADS exchange them through shared memory.
template <int OWN>
__device__ void sort_block(Entry* entries, int size) {
    // With two copies of the entries, one is read while the other is written.
    constexpr bool TWO_COPIES = 2 * OWN * THREADS <= MAX_K;
    const int thread = threadIdx.x;
    Entry own[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) own[i] = entries[thread + i * THREADS];
    int copy = 0;
    for (int run = 2; run <= size; run *= 2) {
        int step = run / 2;
#pragma unroll
        for (int distance = OWN / 2; distance > 0; distance /= 2) {
            if (step != distance * THREADS) continue;
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                Entry &a = own[i & ~distance], &b = own[i | distance];
                const bool descends = ((thread + i * THREADS) & run) == 0;
                if ((i & distance) == 0 && descends == (a < b)) {
                    const Entry larger = b;
                    b = a;
                    a = larger;
                }
            }
            step /= 2;
        }
        for (; step > 0; step /= 2) {
            if (step >= WARP) {
                if (TWO_COPIES) copy ^= OWN * THREADS;
                else __syncthreads();
#pragma unroll
                for (int i = 0; i < OWN; ++i) entries[copy + thread + i * THREADS] = own[i];
                __syncthreads();
            }
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                const Entry other = step < WARP
                                        ? __shfl_xor_sync(ALL_LANES, own[i], step)
                                        : entries[copy + (thread ^ step) + i * THREADS];
                const bool first = (thread & step) == 0;
                const bool descends = ((thread + i * THREADS) & run) == 0;
                if ((first == descends) == (own[i] < other)) own[i] = other;
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OWN; ++i) entries[thread + i * THREADS] = own[i];
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS)
prune_top_k(const Value* __restrict__ values, const int* __restrict__ candidates, int stride,
            int width, EACH_LEVEL(PART_PARAMETERS), int k, int left, int* __restrict__ survivors) {
    const Part parts[LEVELS] = {EACH_LEVEL(PART_OF_LEVEL)};
    const Row row(values, stride, candidates, width, parts);
    const int start = blockIdx.y * THREADS * ITEMS;
    const int size = min(THREADS * ITEMS, row.part.count - start);
    if (size <= 0) return;
    survivors += static_cast<long long>(blockIdx.x) * left + blockIdx.y * k;
    Keys keys;
    load_keys(row, start, size, keys);
    place_largest(keys, min(k, size), [&](int slot, unsigned, int place) {
        survivors[slot] = row.index_of(start + place);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS)
sort_top_k(const Value* __restrict__ values, const int* __restrict__ candidates, int stride,
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
    // The inverted index in the chunk makes entries distinct. Of entries with equal keys, the first
    // is the largest.
    place_largest(keys, wanted, [&](int slot, unsigned key, int place) {
        entries[slot] = static_cast<Entry>(key) << KEY_BITS | ~static_cast<unsigned>(place);
    });
    int size = 1;
    while (size < wanted) size *= 2;
    for (int slot = wanted + threadIdx.x; slot < size; slot += THREADS) entries[slot] = 0;
    __syncthreads();
    if (size <= THREADS) sort_block<1>(entries, size);
    else if (size <= 2 * THREADS) sort_block<2>(entries, size);
    else sort_block<MAX_K / THREADS>(entries, size);
    for (int slot = threadIdx.x; slot < k; slot += THREADS) {
        if (slot < wanted) {
            const int index = row.index_of(~static_cast<unsigned>(entries[slot]));
            largest[slot] = row.values[index];
            indices[slot] = index;
        } else {
            narrow(__uint_as_float(NEGATIVE_INFINITY), largest[slot]);
            indices[slot] = -1;
        }
    }
}
