// Sample positions of RoIAlign and its gradient in a feature pyramid.
// Specification: pyramid_roi_align/operation.py.
//
// Compile-time constants: FEATURE (type), LEVELS, OUTPUT_SIZE, SAMPLING_RATIO (0: adaptive),
// FINEST_LEVEL (log2 of its stride), CANONICAL_LEVEL, CANONICAL_SIZE, ALIGNED, INCLUSIVE,
// CHANNELS_LAST (memory format of the maps), VECTOR (channels per thread and step), THREADS (per
// block).
#pragma once
#include "levels.cuh"
#include "numeric.cuh"

using Feature = FEATURE;
using Real = Accumulator<Feature>;

// VECTOR neighbouring channels.
using Features = Vector<Feature, VECTOR>;
constexpr int ALL_CELLS = OUTPUT_SIZE * OUTPUT_SIZE;

#define SIZE_PARAMETERS(l) int height##l, int width##l
#define MAP_OF_LEVEL(l) {map##l, height##l, width##l}

// Features of one level, or their gradients.
template <typename Element>
struct Map {
    Element* values;
    int height, width;
};

// RoI in feature cells of its level. The level is -1, and the pooled features are zero, if the
// RoI's area is NaN or negative, or if the RoI is too large.
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

// Cells and weights of bilinear interpolation along one axis; low is -1 outside of the map.
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
