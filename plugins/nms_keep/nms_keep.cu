// Greedy non-maximum suppression of sets of boxes. Specification: nms_keep/operation.py.
//
// A block processes a set in tiles of 64 boxes. Every warp computes which boxes of the tile are
// kept. Then all threads mark the following boxes that the kept ones suppress. Thread t is
// responsible for boxes t, t + THREADS, ...
//
// `nms_keep` computes the IoUs too. The TensorRT plugin uses it, because a plugin launches only one
// kernel. torch uses two kernels, which are an order of magnitude faster: `nms_overlaps` computes,
// with many blocks per set, which boxes overlap too much. Then `nms_select` reads the result.
//
// Compile-time constants: IOU_THRESHOLD (0 or more), MAX_KEEP (0: no limit), KEEP (type), THREADS.
#include "boxes.cuh"
#include "warp.cuh"

constexpr int TILE = 64;
constexpr int PART = 16;
using Bits = unsigned long long;
static_assert(THREADS % TILE == 0, "a tile's boxes belong to neighbouring threads");

struct Candidate {
    float4 box;
    float area;
    long long label;
};

__device__ Candidate candidate_of(const float4& box, long long label) {
    return {box, area_of(box), label};
}

__device__ bool suppresses(const Candidate& kept, const Candidate& other) {
    // Copy the boxes, so that each is loaded with one instruction.
    const float4 a = kept.box, b = other.box;
    const float intersection = intersection_of(a, b);
    if (!(intersection > 0.0f) || kept.label != other.label) return false;
    const float combined = kept.area + other.area - intersection;
    // Division is slow, and only needed if rounding could decide.
    const float limit = IOU_THRESHOLD * combined;
    const float excess = intersection - limit;
    if (limit > 1e-30f && fabsf(excess) > 1e-5f * limit) return excess > 0.0f;
    return intersection / combined > IOU_THRESHOLD;
}

// Greedy selection within a tile: the boxes in `alive` that no earlier selected box suppresses. The
// iteration runs until nothing changes; each round settles at least one more box, usually many. A
// lane holds the suppressors of two boxes.
__device__ Bits choose(Bits alive, Bits low_suppressors, Bits high_suppressors) {
    Bits chosen = alive, before;
    do {
        before = chosen;
        const unsigned low = __ballot_sync(ALL_LANES, !(low_suppressors & before));
        const unsigned high = __ballot_sync(ALL_LANES, !(high_suppressors & before));
        chosen = alive & (static_cast<Bits>(high) << WARP | low);
    } while (chosen != before);
    return chosen;
}

// The first boxes of `chosen`, as many as MAX_KEEP allows if `total` boxes are already kept.
__device__ Bits limited(Bits chosen, int total) {
    while (MAX_KEEP > 0 && total + __popcll(chosen) > MAX_KEEP) {
        chosen &= ~(Bits{1} << (TILE - 1 - __clzll(chosen)));
    }
    return chosen;
}

extern "C" __global__ void __launch_bounds__(THREADS)
nms_keep(const float4* boxes, const long long* labels, int count, KEEP* keep) {
    __shared__ Candidate tile[TILE], kept[TILE];
    __shared__ unsigned alive_words[TILE / WARP];
    __shared__ Bits suppressors[TILE];

    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const long long offset = static_cast<long long>(blockIdx.x) * count;
    boxes += offset;
    labels += offset;
    keep += offset;
    // Bit n: box `thread + n * THREADS` is suppressed.
    unsigned suppressed = 0;
    int total = 0, start = 0;

    for (; start < count && (MAX_KEEP == 0 || total < MAX_KEEP); start += TILE) {
        const int own = thread - start % THREADS;
        if (own >= 0 && own < TILE) {
            const int index = start + own;
            bool alive = index < count && !(suppressed >> (start / THREADS) & 1u);
            if (alive) {
                tile[own] = candidate_of(boxes[index], labels[index]);
                alive = tile[own].label >= 0;
            }
            const unsigned word = __ballot_sync(ALL_LANES, alive);
            if (lane == 0) alive_words[own / WARP] = word;
        }
        __syncthreads();

        const Bits alive = static_cast<Bits>(alive_words[1]) << WARP | alive_words[0];
        for (int column = warp; column < TILE; column += THREADS / WARP) {
            Bits bits = 0;
            if (alive >> column & 1u) {
                for (int row = lane; row < TILE; row += WARP) {
                    const bool hit = row < column && (alive >> row & 1u) &&
                                     suppresses(tile[row], tile[column]);
                    bits |= static_cast<Bits>(__ballot_sync(ALL_LANES, hit)) << (row - lane);
                }
            }
            if (lane == 0) suppressors[column] = bits;
        }
        __syncthreads();

        const Bits chosen =
            limited(choose(alive, suppressors[lane], suppressors[lane + WARP]), total);
        if (thread < TILE && start + thread < count) {
            const bool stays = chosen >> thread & 1u;
            keep[start + thread] = stays;
            if (stays) kept[__popcll(chosen & ((Bits{1} << thread) - 1))] = tile[thread];
        }
        __syncthreads();

        const int chosen_count = __popcll(chosen);
        total += chosen_count;
        const int following = start + TILE;
        for (int n = (following - thread + THREADS - 1) / THREADS; thread + n * THREADS < count;
             ++n) {
            if (suppressed >> n & 1u) continue;
            const int index = thread + n * THREADS;
            const Candidate candidate = candidate_of(boxes[index], labels[index]);
            for (int i = 0; i < chosen_count; ++i) {
                if (suppresses(kept[i], candidate)) {
                    suppressed |= 1u << n;
                    break;
                }
            }
        }
    }
    for (int index = start + thread; index < count; index += THREADS) keep[index] = 0;
}

// Write suppressors [sets, tiles, count]. Bit i of entry [s, t, b] is set if box i of tile t
// suppresses box b when it is kept. Entries of tiles after the tile of box b are not written. A
// thread compares a box with PART boxes of a tile.
extern "C" __global__ void __launch_bounds__(TILE * TILE / PART)
nms_overlaps(const float4* boxes, const long long* labels, int count, Bits* suppressors) {
    __shared__ Candidate tile[TILE];
    const int row = blockIdx.x, column = blockIdx.y, tiles = gridDim.x;
    if (row > column) return;
    const long long set = blockIdx.z;
    boxes += set * count;
    labels += set * count;
    const int place = threadIdx.x % TILE, part = threadIdx.x / TILE;
    const int index = column * TILE + place, other = row * TILE + threadIdx.x;
    // Only the last tile can be incomplete. Its missing entries are not compared with any box.
    if (threadIdx.x < TILE && other < count) {
        tile[threadIdx.x] = candidate_of(boxes[other], labels[other]);
    }
    __syncthreads();
    if (index >= count) return;
    const Candidate own = candidate_of(boxes[index], labels[index]);
    const int earlier = row < column ? PART : min(place - part * PART, PART);
    unsigned bits = 0;
    for (int i = 0; own.label >= 0 && i < earlier; ++i) {
        bits |= static_cast<unsigned>(suppresses(tile[part * PART + i], own)) << i;
    }
    const long long entry = (set * tiles + row) * count + index;
    reinterpret_cast<unsigned short*>(suppressors)[entry * (TILE / PART) + part] = bits;
}

extern "C" __global__ void __launch_bounds__(THREADS)
nms_select(const long long* labels, const Bits* suppressors, int count, KEEP* keep) {
    // Two buffers, so that a tile's words are read while the next tile's are written.
    __shared__ unsigned alive_words[2][TILE / WARP];
    const int thread = threadIdx.x, lane = thread % WARP;
    const long long set = blockIdx.x;
    labels += set * count;
    keep += set * count;
    suppressors += set * ((count + TILE - 1) / TILE) * count;
    // Bit n: box `thread + n * THREADS` is suppressed, or padding.
    unsigned suppressed = 0;
    for (int n = 0; thread + n * THREADS < count; ++n) {
        suppressed |= static_cast<unsigned>(labels[thread + n * THREADS] < 0) << n;
    }
    int total = 0, start = 0;
    for (; start < count && (MAX_KEEP == 0 || total < MAX_KEEP);
         start += TILE, suppressors += count) {
        unsigned* words = alive_words[start / TILE % 2];
        const int own = thread - start % THREADS, following = start + TILE;
        if (own >= 0 && own < TILE) {
            const bool alive = start + own < count && !(suppressed >> (start / THREADS) & 1u);
            const unsigned word = __ballot_sync(ALL_LANES, alive);
            if (lane == 0) words[own / WARP] = word;
        }
        // Load the suppressors before the threads wait for one another.
        const Bits low = suppressors[min(start + lane, count - 1)];
        const Bits high = suppressors[min(start + lane + WARP, count - 1)];
        int n = max(following - thread + THREADS - 1, 0) / THREADS;
        Bits marking = thread + n * THREADS < count ? suppressors[thread + n * THREADS] : 0;
        __syncthreads();

        const Bits alive = static_cast<Bits>(words[1]) << WARP | words[0];
        const Bits chosen = limited(choose(alive, low, high), total);
        if (thread < TILE && start + thread < count) keep[start + thread] = chosen >> thread & 1u;
        total += __popcll(chosen);
        while (thread + n * THREADS < count) {
            suppressed |= static_cast<unsigned>((marking & chosen) != 0) << n;
            ++n;
            if (thread + n * THREADS < count) marking = suppressors[thread + n * THREADS];
        }
    }
    for (int index = start + thread; index < count; index += THREADS) keep[index] = 0;
}
