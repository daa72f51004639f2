// Mask probabilities pasted into images and encoded as COCO run lengths, one block an instance;
// plugins/paste_rle.py has the contract.
//
// Only pixels within the box are looked at: the columns of the box one after another, each closed
// by a pixel of background unless the next column follows on directly in the image. A thread takes
// 32 of these pixels at a time, whose values are the bits of a word; where neighbouring bits differ
// a run ends. Scans over the block say how many runs ended before, and where the last did.
//
// Constants: EXACT (0: boxes of whole pixels), PROBABILITY (type), SIDE, THREADS, THRESHOLD.

#include "numeric.cuh"

constexpr int WARP = 32;
constexpr int WORD = 32;
constexpr int WARPS = THREADS / WARP;
constexpr unsigned ALL_LANES = 0xffffffffu;
// The mask between zeros.
constexpr int BORDERED = SIDE + 2;
using Samples = float[BORDERED][BORDERED];
// Single precision knows all whole pixels up to here.
constexpr float FARTHEST = 16777216.0f;
static_assert(THREADS % WARP == 0, "threads are used by the warp");

// The pixels of an axis that the box, border included, covers.
struct Axis {
    int first, count;
    // From pixels to samples of the bordered mask.
    float shift, scale;
};

struct Sample {
    int low, high;
    float fraction;
};

// The answer is compared bit for bit. So, here and below, operations, their order and precision are
// those of the contract.
__device__ Axis covered_pixels(float near, float far, int size) {
    if (!(fabsf(near) <= FARTHEST && fabsf(far) <= FARTHEST)) return {0, 0, 0.0f, 1.0f};
    int first, end;
    Axis axis;
    if constexpr (EXACT) {
        const double cell = (static_cast<double>(far) - near) / SIDE;
        if (!(cell > 0.0)) return {0, 0, 0.0f, 1.0f};
        first = static_cast<int>(floor(near - cell));
        end = static_cast<int>(ceil(far + cell));
        axis.shift = static_cast<float>(0.5 - near);
        axis.scale = static_cast<float>(cell);
    } else {
        constexpr float EXPANSION = static_cast<float>(static_cast<double>(BORDERED) / SIDE);
        const float centre = (far + near) * 0.5f;
        const float half = (far - near) * 0.5f * EXPANSION;
        first = static_cast<int>(centre - half);
        end = static_cast<int>(centre + half) + 1;
        axis.shift = static_cast<float>(first);
        axis.scale = static_cast<float>(BORDERED) / static_cast<float>(max(end - first, 1));
    }
    axis.first = max(first, 0);
    axis.count = max(min(end, size) - axis.first, 0);
    return axis;
}

__device__ Sample sample_at(const Axis& axis, int index) {
    const float pixel = static_cast<float>(axis.first + index);
    float source;
    if constexpr (EXACT) {
        source = (pixel + axis.shift) / axis.scale + 0.5f;
    } else {
        source = (pixel - axis.shift + 0.5f) * axis.scale - 0.5f;
    }
    source = fminf(fmaxf(source, 0.0f), BORDERED - 1.0f);
    const int low = static_cast<int>(source);
    return {low, min(low + 1, BORDERED - 1), source - static_cast<float>(low)};
}

__device__ float between(float low, float high, float fraction) {
    return low * (1.0f - fraction) + high * fraction;
}

// The pixels that are looked at: `total` of them, one closed column after another.
struct Window {
    Axis columns, rows;
    int height, stride, total;

    // Index of a pixel in the image, which goes down its columns too.
    __device__ int position(int index) const {
        return (columns.first + index / stride) * height + rows.first + index % stride;
    }
};

__device__ Window window_of(const float* box, int height, int width) {
    const Axis columns = covered_pixels(box[0], box[2], width);
    const Axis rows = covered_pixels(box[1], box[3], height);
    const int stride = min(rows.count + 1, height);
    if (columns.count == 0 || rows.count == 0) return {columns, rows, height, stride, 0};
    const int covered = (columns.count - 1) * stride + rows.count;
    const bool ends_image =
        columns.first + columns.count == width && rows.first + rows.count == height;
    // One pixel more lets the last run end, unless the image does.
    return {columns, rows, height, stride, ends_image ? covered : covered + 1};
}

// Values of 32 pixels, the first in the lowest bit.
__device__ unsigned values_from(int index, const Window& window, const Samples& mask) {
    unsigned bits = 0;
    int column = index / window.stride, row = index % window.stride;
    Sample x = sample_at(window.columns, column);
    int loaded = -1;
    float low = 0.0f, high = 0.0f;
    for (int bit = 0; bit < WORD && column < window.columns.count; ++bit) {
        if (row < window.rows.count) {
            const Sample y = sample_at(window.rows, row);
            if (y.low != loaded) {
                low = between(mask[y.low][x.low], mask[y.low][x.high], x.fraction);
                high = between(mask[y.high][x.low], mask[y.high][x.high], x.fraction);
                loaded = y.low;
            }
            bits |= static_cast<unsigned>(between(low, high, y.fraction) > THRESHOLD) << bit;
        }
        if (++row == window.stride) {
            row = 0;
            x = sample_at(window.columns, ++column);
            loaded = -1;
        }
    }
    return bits;
}

// What pixels before others know of runs: how many have ended, and where the last did.
struct Ended {
    int runs, last;

    // Positions ascend, so that the last is the largest.
    __device__ void add(Ended later) {
        runs += later.runs;
        last = max(last, later.last);
    }
};

// What ended before each thread's pixels; `before`, which ended before the block's, becomes what
// ended after them. Threads must meet between two calls.
__device__ Ended ended_before(Ended own, Ended& before) {
    __shared__ Ended warps[WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int distance = 1; distance < WARP; distance *= 2) {
        const Ended earlier = {__shfl_up_sync(ALL_LANES, own.runs, distance),
                               __shfl_up_sync(ALL_LANES, own.last, distance)};
        if (lane >= distance) own.add(earlier);
    }
    if (lane == WARP - 1) warps[warp] = own;
    const Ended neighbours = {__shfl_up_sync(ALL_LANES, own.runs, 1),
                              __shfl_up_sync(ALL_LANES, own.last, 1)};
    __syncthreads();

    Ended exclusive = before;
    if (lane > 0) exclusive.add(neighbours);
    for (int other = 0; other < WARPS; ++other) {
        if (other < warp) exclusive.add(warps[other]);
        before.add(warps[other]);
    }
    return exclusive;
}

// Bits that differ from the one before; `before`, the bit before the block's, becomes its last.
// Threads must meet between two calls.
__device__ unsigned changes_in(unsigned bits, unsigned& before) {
    __shared__ unsigned warps[WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const unsigned last = bits >> (WORD - 1);
    if (lane == WARP - 1) warps[warp] = last;
    unsigned previous = __shfl_up_sync(ALL_LANES, last, 1);
    __syncthreads();

    if (lane == 0) previous = warp == 0 ? before : warps[warp - 1];
    before = warps[WARPS - 1];
    return bits ^ (bits << 1 | previous);
}

extern "C" __global__ void __launch_bounds__(THREADS)
paste_rle(const PROBABILITY* masks, const float* boxes, const long long* sizes, int capacity,
          int* counts, int* num_runs) {
    __shared__ Samples mask;
    const int thread = threadIdx.x;
    const long long instance = blockIdx.x;
    masks += instance * SIDE * SIDE;
    counts += instance * capacity;
    const int height = static_cast<int>(sizes[2 * instance]);
    const int width = static_cast<int>(sizes[2 * instance + 1]);
    const Window window = window_of(boxes + 4 * instance, height, width);

    for (int cell = thread; cell < BORDERED * BORDERED; cell += THREADS) {
        const int y = cell / BORDERED - 1, x = cell % BORDERED - 1;
        const bool inside = y >= 0 && y < SIDE && x >= 0 && x < SIDE;
        mask[y + 1][x + 1] = inside ? widen(masks[y * SIDE + x]) : 0.0f;
    }
    __syncthreads();

    Ended ended = {0, 0};
    unsigned last_value = 0;
    for (int start = 0; start < window.total; start += THREADS * WORD) {
        const int index = start + thread * WORD, rest = window.total - index;
        unsigned changes = changes_in(rest > 0 ? values_from(index, window, mask) : 0u, last_value);
        if (rest < WORD) changes &= rest > 0 ? (1u << rest) - 1u : 0u;
        const int last = changes ? window.position(index + WORD - 1 - __clz(changes)) : 0;
        Ended here = ended_before({__popc(changes), last}, ended);
        for (; changes; changes &= changes - 1) {
            const int position = window.position(index + __ffs(changes) - 1);
            if (here.runs < capacity) counts[here.runs] = position - here.last;
            here = {here.runs + 1, position};
        }
    }

    if (thread == 0) {
        if (ended.runs < capacity) counts[ended.runs] = height * width - ended.last;
        num_runs[instance] = ended.runs + 1;
    }
    for (int run = ended.runs + 1 + thread; run < capacity; run += THREADS) counts[run] = 0;
}
