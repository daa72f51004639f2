// Paste mask probabilities into images and encode them as COCO run lengths, one block per instance.
// Specification: paste_rle/operation.py.
//
// Only pixels within the box are computed, column by column. Each column is followed by a
// background pixel, unless the box spans the whole height of the image. A thread computes 32 pixels
// at a time as the bits of a word. A run ends where neighbouring bits differ. Prefix scans over the
// block give the number of runs that end before a word, and the end of the last of these runs.
//
// Compile-time constants: EXACT (1: detectron2's rule for boxes, 0: torchvision's), PROBABILITY
// (type), SIDE, THREADS, THRESHOLD.

#include "numeric.cuh"
#include "warp.cuh"

constexpr int WORD = 32;
constexpr int WARPS = THREADS / WARP;
// Side of the mask with its border of zeros.
constexpr int BORDERED = SIDE + 2;
using Samples = float[BORDERED][BORDERED];
// float32 represents all whole pixels up to this coordinate.
constexpr float FARTHEST = 16777216.0f;
static_assert(THREADS % WARP == 0, "threads are used by the warp");

// Pixels that the box, border included, covers along one axis.
struct Axis {
    int first, count;
    // Mapping from pixels to samples of the bordered mask.
    float shift, scale;
};

struct Sample {
    int low, high;
    float fraction;
};

// The results of all implementations are equal bit for bit. Operations, their order and precision
// are therefore those of the CPU implementation, here and below.
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

// The `total` computed pixels, column by column. `stride` is the number of computed pixels per
// column, including the background pixel after it.
struct Window {
    Axis columns, rows;
    int height, stride, total;

    // Index of a pixel in the image, in column-major order.
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
    // One more background pixel ends the last run, unless the box ends at the image's last pixel.
    return {columns, rows, height, stride, ends_image ? covered : covered + 1};
}

// Mask values of 32 pixels from `index` on, the first in the lowest bit.
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

// Number of runs that ended before a pixel, and the end of the last of these runs.
struct Ended {
    int runs, last;

    // Positions ascend, so the last one is the largest.
    __device__ void add(Ended later) {
        runs += later.runs;
        last = max(last, later.last);
    }
};

// Return the exclusive prefix scan of run ends over the block, plus `before`. Then add the ends of
// all threads to `before`. Call __syncthreads() between two calls of this function.
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

// Return the bits that differ from the preceding bit. `before` is the bit before the block's first
// bit, and is set to the block's last bit. Call __syncthreads() between two calls of this function.
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
}
