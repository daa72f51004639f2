// Greedy non-maximum suppression, one block a set of boxes; plugins/nms_keep.py has the contract.
//
// The block goes through the set in tiles of 64 boxes. Which boxes of a tile overlap is computed by
// all threads at once, one thread then picks those that stay, and all threads strike out what these
// suppress among the boxes that follow. Thread t looks after boxes t, t + 1024, ...
//
// Constants: IOU_THRESHOLD (0 or more), MAX_KEEP (0: no limit), THREADS.

constexpr int TILE = 64;
constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
using Bits = unsigned long long;
static_assert(THREADS % TILE == 0, "a tile's boxes belong to neighbouring threads");

struct Candidate {
    float4 box;
    long long label;
};

// Computed as in the single-precision reference, without contraction: the answer is compared
// bit for bit.
__device__ bool suppresses(const Candidate& kept, const Candidate& other) {
    if (kept.label != other.label) return false;
    const float4 a = kept.box, b = other.box;
    const float width = fmaxf(fminf(a.z, b.z) - fmaxf(a.x, b.x), 0.0f);
    const float height = fmaxf(fminf(a.w, b.w) - fmaxf(a.y, b.y), 0.0f);
    const float intersection = width * height;
    const float area_a = (a.z - a.x) * (a.w - a.y), area_b = (b.z - b.x) * (b.w - b.y);
    // The division is slow and most pairs do not touch.
    return intersection > 0.0f &&
           intersection / (area_a + area_b - intersection) > IOU_THRESHOLD;
}

extern "C" __global__ void __launch_bounds__(THREADS)
nms_keep(const float4* boxes, const long long* labels, int count, unsigned char* keep) {
    __shared__ Candidate tile[TILE];
    __shared__ unsigned alive_words[TILE / WARP];
    __shared__ Bits overlaps[TILE];
    __shared__ Bits kept;
    __shared__ int total;

    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const long long offset = static_cast<long long>(blockIdx.x) * count;
    boxes += offset;
    labels += offset;
    keep += offset;
    // Bit n: box `thread + n * THREADS` is suppressed.
    unsigned suppressed = 0;
    if (thread == 0) total = 0;

    int start = 0;
    for (; start < count; start += TILE) {
        const int in_tile = start % THREADS;
        if (thread >= in_tile && thread < in_tile + TILE) {
            const int own = thread - in_tile, index = start + own;
            const bool exists = index < count;
            if (exists) tile[own] = {boxes[index], labels[index]};
            const bool is_suppressed = suppressed >> (start / THREADS) & 1u;
            const bool alive = exists && !is_suppressed && tile[own].label >= 0;
            const unsigned word = __ballot_sync(ALL_LANES, alive);
            if (lane == 0) alive_words[own / WARP] = word;
        }
        __syncthreads();

        const Bits alive = static_cast<Bits>(alive_words[1]) << WARP | alive_words[0];
        for (int row = warp; row < TILE; row += THREADS / WARP) {
            if (!(alive >> row & 1u)) continue;
            Bits bits = 0;
            for (int half = 0; half < TILE / WARP; ++half) {
                const int column = half * WARP + lane;
                const bool hit = column > row && (alive >> column & 1u) &&
                                 suppresses(tile[row], tile[column]);
                bits |= static_cast<Bits>(__ballot_sync(ALL_LANES, hit)) << (half * WARP);
            }
            if (lane == 0) overlaps[row] = bits;
        }
        __syncthreads();

        if (thread == 0) {
            Bits candidates = alive, chosen = 0;
            int chosen_total = total;
            while (candidates && (MAX_KEEP == 0 || chosen_total < MAX_KEEP)) {
                const int first = __ffsll(candidates) - 1;
                const Bits bit = Bits{1} << first;
                chosen |= bit;
                candidates &= ~(bit | overlaps[first]);
                ++chosen_total;
            }
            kept = chosen;
            total = chosen_total;
        }
        __syncthreads();

        const Bits chosen = kept;
        if (thread < TILE && start + thread < count) keep[start + thread] = chosen >> thread & 1u;
        if (MAX_KEEP > 0 && total == MAX_KEEP) break;
        for (int n = (start + TILE - thread + THREADS - 1) / THREADS, index;
             (index = thread + n * THREADS) < count; ++n) {
            if (suppressed >> n & 1u) continue;
            const Candidate own = {boxes[index], labels[index]};
            for (Bits rest = chosen; rest; rest &= rest - 1) {
                if (suppresses(tile[__ffsll(rest) - 1], own)) {
                    suppressed |= 1u << n;
                    break;
                }
            }
        }
        __syncthreads();
    }
    for (int index = start + TILE + thread; index < count; index += THREADS) keep[index] = 0;
}
