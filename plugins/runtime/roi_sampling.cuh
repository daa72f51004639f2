// Sample positions of RoIAlign and its gradient in a feature pyramid, and distribution of the work
// over threads. Contract: pyramid_roi_align/operation.py.
//
// Constants: FEATURE (type), LEVELS, OUTPUT_SIZE, SAMPLING_RATIO (0: adaptive), FINEST_LEVEL (log2
// of its stride), CANONICAL_LEVEL, CANONICAL_SIZE, ALIGNED, INCLUSIVE; CHANNELS_LAST (of the
// maps), VECTOR (channels per thread and step), CELLS (pooled cells per block), THREADS.
#pragma once
#include "levels.cuh"
#include "numeric.cuh"

using Feature = FEATURE;
using Real = Accumulator<Feature>;

#define SIZE_PARAMETERS(l) int height##l, int width##l
#define MAP_OF_LEVEL(l) {map##l, height##l, width##l}

// Features of one level, or their gradients.
template <typename Element>
struct Map {
    Element* values;
    int height, width;
};

// RoI in feature cells of its level. Level -1: the RoI is NaN or too large; it pools zeros.
struct Region {
    int level;
    Real x, y, cell_width, cell_height;
    // Samples per pooled cell.
    int columns, rows;
};

__device__ inline int level_of(const float4& roi) {
    const float area = (roi.z - roi.x) * (roi.w - roi.y);
    const float level = floorf(CANONICAL_LEVEL + log2f(sqrtf(area) / CANONICAL_SIZE) + 1e-6f);
    if (isnan(level)) return -1;
    const float coarsest = FINEST_LEVEL + LEVELS - 1;
    return static_cast<int>(fminf(fmaxf(level, FINEST_LEVEL), coarsest)) - FINEST_LEVEL;
}

__device__ inline Region region_of(const float4& roi) {
    const int level = level_of(roi);
    const Real scale = ldexpf(1.0f, -(FINEST_LEVEL + level));
    const Real shift = ALIGNED ? 0.5f : 0.0f, far = INCLUSIVE ? 1.0f : 0.0f;
    const Real x = roi.x * scale - shift, y = roi.y * scale - shift;
    Real width = (roi.z - far) * scale - shift - x, height = (roi.w - far) * scale - shift - y;
    if (!ALIGNED) {
        width = fmax(width, Real(1));
        height = fmax(height, Real(1));
    }
    const Real cell_width = width / OUTPUT_SIZE, cell_height = height / OUTPUT_SIZE;
    // float32 does not distinguish the samples of larger cells. The comparison is false for NaN.
    const bool measurable = fmax(cell_width, cell_height) < Real(1 << 24);
    return {
        measurable ? level : -1,
        x,
        y,
        cell_width,
        cell_height,
        SAMPLING_RATIO > 0 ? SAMPLING_RATIO : static_cast<int>(ceil(cell_width)),
        SAMPLING_RATIO > 0 ? SAMPLING_RATIO : static_cast<int>(ceil(cell_height)),
    };
}

// Samples of a pooled cell along one axis, from `first` up to but excluding `last`.
struct Samples {
    Real start, step;
    int first, last;
};

__device__ inline Samples samples_of(Real start, Real cell_size, int cell, int count, int size) {
    const Real step = cell_size / count;
    Samples samples = {start + cell * cell_size, step, 0, count};
    if (SAMPLING_RATIO == 0 && count > 1) {
        // A huge RoI has many samples: visit those near the map only.
        const Real before = floor((-1 - samples.start) / step) - 1;
        const Real after = ceil((size - samples.start) / step) + 1;
        samples.first = static_cast<int>(fmin(fmax(before, Real(0)), Real(count)));
        samples.last = static_cast<int>(fmin(fmax(after, Real(0)), Real(count)));
    }
    return samples;
}

// Cells and weights of bilinear interpolation along one axis; low is -1 if the sample is outside.
struct Tap {
    int low, high;
    Real low_weight, high_weight;
};

__device__ inline Tap tap_of(const Samples& samples, int n, int size) {
    Real position = samples.start + (n + Real(0.5)) * samples.step;
    if (!(position >= Real(-1) && position <= Real(size))) return {-1, -1, 0, 0};
    position = fmin(fmax(position, Real(0)), Real(size - 1));
    const int low = static_cast<int>(position);
    const Real fraction = position - low;
    return {low, min(low + 1, size - 1), Real(1) - fraction, fraction};
}

// Call visit(pixel, weight) for all feature cells that contribute to a pooled cell.
template <typename Visit>
__device__ void visit_pixels(const Region& region, int cell, int height, int width, Visit visit) {
    const int row = cell / OUTPUT_SIZE, column = cell % OUTPUT_SIZE;
    const int rows = SAMPLING_RATIO > 0 ? SAMPLING_RATIO : region.rows;
    const int columns = SAMPLING_RATIO > 0 ? SAMPLING_RATIO : region.columns;
    const auto down = samples_of(region.y, region.cell_height, row, rows, height);
    const auto across = samples_of(region.x, region.cell_width, column, columns, width);
    const Real share = Real(1) / fmax(Real(rows) * columns, Real(1));
#pragma unroll
    for (int i = down.first; i < down.last; ++i) {
        const Tap y = tap_of(down, i, height);
        if (y.low < 0) continue;
#pragma unroll
        for (int j = across.first; j < across.last; ++j) {
            const Tap x = tap_of(across, j, width);
            if (x.low < 0) continue;
            const Real low = y.low_weight * share, high = y.high_weight * share;
            visit(y.low * width + x.low, low * x.low_weight);
            visit(y.low * width + x.high, low * x.high_weight);
            visit(y.high * width + x.low, high * x.low_weight);
            visit(y.high * width + x.high, high * x.high_weight);
        }
    }
}

// A block handles CELLS pooled cells of one RoI. With channels last, neighbouring threads handle
// neighbouring channels of a cell, so that a warp reads whole cache lines. Otherwise they handle
// neighbouring cells of a channel.
constexpr int ALL_CELLS = OUTPUT_SIZE * OUTPUT_SIZE;
constexpr int INNER = CHANNELS_LAST ? 32 : 64, OUTER = THREADS / INNER;
// Channels per block and step.
constexpr int GROUP = CHANNELS_LAST ? INNER * VECTOR : OUTER;
static_assert(CHANNELS_LAST || VECTOR == 1, "channels are neighbours only with channels last");

__device__ inline int first_cell() { return blockIdx.z * CELLS; }
__device__ inline int cells_of_block() { return min(CELLS, ALL_CELLS - first_cell()); }

// Call body(cell, channel) for the thread's share of a group of channels. `channel` is the first of
// VECTOR channels; `cell` is relative to the block's first cell.
template <typename Body>
__device__ void for_own_cells(int group, int channels, Body body) {
    const int inner = threadIdx.x % INNER, outer = threadIdx.x / INNER;
    const int channel = group + (CHANNELS_LAST ? inner * VECTOR : outer);
    if (channel >= channels) return;
    const int step = CHANNELS_LAST ? OUTER : INNER;
    for (int cell = CHANNELS_LAST ? outer : inner; cell < cells_of_block(); cell += step) {
        body(cell, channel);
    }
}

// Map of a level, offset to the block's image.
template <typename Element>
__device__ Map<Element> map_of_image(const Map<Element> (&maps)[LEVELS], int level, int channels) {
    Map<Element> map = maps[0];
#pragma unroll
    for (int l = 1; l < LEVELS; ++l) {
        if (level == l) map = maps[l];
    }
    map.values += static_cast<long long>(blockIdx.y) * channels * map.height * map.width;
    return map;
}

// Index of the block's RoI among all images; the grid is [RoIs, images, parts of a RoI].
__device__ inline long long own_roi() {
    return static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
}
