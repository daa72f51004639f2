// Square patches of feature maps, and the gradient of the maps. A warp handles one cell of a patch.
// Specification: feature_patches/operation.py.
//
// Compile-time constants: FEATURE (type), LEVELS, RADIUS (of a patch, in cells), VECTOR (channels
// per thread and step), THREADS (per block).
#include "levels.cuh"
#include "numeric.cuh"
#include "warp.cuh"

#define INPUT_PARAMETER(l) const Feature* map##l
#define OUTPUT_PARAMETER(l) Feature* map##l
#define SIZE_PARAMETERS(l) int height##l, int width##l
#define MAP_OF_LEVEL(l) {map##l, height##l, width##l}

using Feature = FEATURE;
// VECTOR neighbouring channels.
using Features = Vector<Feature, VECTOR>;
constexpr int SIDE = 2 * RADIUS + 1, PATCH_CELLS = SIDE * SIDE;

// Features of one level, or their gradients.
template <typename Element>
struct Map {
    Element* values;
    int height, width;
};

struct Position {
    int level, row, column;
};

// Position of a cell, from its index among the cells of all maps.
template <typename Element>
__device__ Position position_of(long long cell, const Map<Element> (&maps)[LEVELS]) {
    Position position = {-1, 0, 0};
#pragma unroll
    for (int l = 0; l < LEVELS; ++l) {
        const int count = maps[l].height * maps[l].width;
        if (position.level < 0 && cell < count) {
            const int index = cell;
            position = {l, index / maps[l].width, index % maps[l].width};
        }
        cell -= count;
    }
    return position;
}

// Cell of a patch that the warp handles.
struct PatchCell {
    int image, patch, index;
};

__device__ PatchCell own_cell() {
    const int cell = (blockIdx.x * THREADS + threadIdx.x) / WARP;
    return {static_cast<int>(blockIdx.y), cell / PATCH_CELLS, cell % PATCH_CELLS};
}

// Position that a cell of a patch has in the feature map.
__device__ Position position_in_map(const Position& centre, int cell) {
    return {centre.level, centre.row + cell / SIDE - RADIUS, centre.column + cell % SIDE - RADIUS};
}

// Pointer to the features at a position; nullptr if it is outside of the map.
template <typename Element>
__device__ Element* features_at(const Position& position, int image, int channels,
                                const Map<Element> (&maps)[LEVELS]) {
    Element* features = nullptr;
#pragma unroll
    for (int l = 0; l < LEVELS; ++l) {
        const Map<Element>& map = maps[l];
        const bool is_inside = position.row >= 0 && position.row < map.height &&
                               position.column >= 0 && position.column < map.width;
        if (l != position.level || !is_inside) continue;
        const long long row = static_cast<long long>(image) * map.height + position.row;
        features = map.values + (row * map.width + position.column) * channels;
    }
    return features;
}

__device__ long long offset_in_patches(const PatchCell& cell, int patches, int channels) {
    const long long patch = static_cast<long long>(cell.image) * patches + cell.patch;
    return (patch * PATCH_CELLS + cell.index) * channels;
}

extern "C" __global__ void __launch_bounds__(THREADS)
feature_patches(EACH_LEVEL(INPUT_PARAMETER), const long long* __restrict__ centres, int channels,
                int patches, EACH_LEVEL(SIZE_PARAMETERS), Feature* __restrict__ output) {
    const Map<const Feature> maps[LEVELS] = {EACH_LEVEL(MAP_OF_LEVEL)};
    const PatchCell own = own_cell();
    if (own.patch >= patches) return;
    const Position centre = position_of(centres[own.image * patches + own.patch], maps);
    const Feature* features =
        features_at(position_in_map(centre, own.index), own.image, channels, maps);
    output += offset_in_patches(own, patches, channels);
    for (int c = threadIdx.x % WARP * VECTOR; c < channels; c += WARP * VECTOR) {
        Features values = {};
        if (features) values = *reinterpret_cast<const Features*>(features + c);
        *reinterpret_cast<Features*>(output + c) = values;
    }
}

// Add up the gradients of all patches that contain the warp's cell, in the order of the patches, so
// that results are reproducible. Only the warp of the first of these patches writes the sum. Cells
// outside of all patches are not written.
extern "C" __global__ void __launch_bounds__(THREADS)
feature_patches_backward(const Feature* __restrict__ gradients,
                         const long long* __restrict__ centres, int channels, int patches,
                         EACH_LEVEL(SIZE_PARAMETERS), EACH_LEVEL(OUTPUT_PARAMETER)) {
    const Map<Feature> maps[LEVELS] = {EACH_LEVEL(MAP_OF_LEVEL)};
    const PatchCell own = own_cell();
    if (own.patch >= patches) return;
    centres += own.image * patches;
    const Position target = position_in_map(position_of(centres[own.patch], maps), own.index);
    Feature* output = features_at(target, own.image, channels, maps);
    if (!output) return;

    const int lane = threadIdx.x % WARP;
    for (int first_channel = 0; first_channel < channels; first_channel += WARP * VECTOR) {
        const int channel = first_channel + lane * VECTOR;
        Accumulator<Feature> sums[VECTOR] = {};
        for (int first = 0; first < patches; first += WARP) {
            // Index of the cell of the lane's patch that is at `target`; -1: none.
            int index = -1;
            if (first + lane < patches) {
                const Position other = position_of(centres[first + lane], maps);
                const int row = target.row - other.row + RADIUS;
                const int column = target.column - other.column + RADIUS;
                const bool contains = other.level == target.level && row >= 0 && row < SIDE &&
                                      column >= 0 && column < SIDE;
                if (contains) index = row * SIDE + column;
            }
            unsigned hits = __ballot_sync(ALL_LANES, index >= 0);
            if (hits && first + __ffs(hits) - 1 < own.patch) return;
            for (; hits; hits &= hits - 1) {
                const int hit = __ffs(hits) - 1;
                const PatchCell cell = {own.image, first + hit,
                                        __shfl_sync(ALL_LANES, index, hit)};
                if (channel >= channels) continue;
                const Feature* values =
                    gradients + offset_in_patches(cell, patches, channels) + channel;
                const auto shares = *reinterpret_cast<const Features*>(values);
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) sums[v] += widen(shares.values[v]);
            }
        }
        if (channel >= channels) continue;
        Features total;
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) narrow(sums[v], total.values[v]);
        *reinterpret_cast<Features*>(output + channel) = total;
    }
}
