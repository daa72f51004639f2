// RoIAlign over a feature pyramid. Compile-time constants are those of roi_sampling.cuh, CELLS
// (pooled cells per block) and POOLED_CHANNELS_LAST (memory format of the pooled features).
#include "roi_sampling.cuh"

#define MAP_PARAMETER(l) const Feature* __restrict__ map##l

// A block handles CELLS pooled cells of one RoI. With channels last, neighbouring threads handle
// neighbouring channels of a cell, so that a warp reads whole cache lines. Otherwise they handle
// neighbouring cells of a channel.
constexpr int INNER = CHANNELS_LAST ? 32 : 64, OUTER = THREADS / INNER;
// Channels per block and step.
constexpr int GROUP = CHANNELS_LAST ? INNER * VECTOR : OUTER;
static_assert(CHANNELS_LAST || VECTOR == 1, "channels are neighbours only with channels last");

__device__ int first_cell() { return blockIdx.z * CELLS; }
__device__ int cells_of_block() { return min(CELLS, ALL_CELLS - first_cell()); }

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

// Return the feature map of a level, with a pointer to the values of the block's image.
__device__ Map<const Feature> map_of_image(const Map<const Feature> (&maps)[LEVELS], int level,
                                           int channels) {
    Map<const Feature> map = maps[0];
#pragma unroll
    for (int l = 1; l < LEVELS; ++l) {
        if (level == l) map = maps[l];
    }
    map.values += static_cast<long long>(blockIdx.y) * channels * map.height * map.width;
    return map;
}

// Index of the block's RoI among the RoIs of all images. The grid is [RoIs of an image, images,
// groups of CELLS pooled cells].
__device__ long long own_roi() {
    return static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
}

// Threads that handle neighbouring channels cannot write the cells of one channel as whole cache
// lines. In this case, the cells are first staged in shared memory.
constexpr bool STAGED = CHANNELS_LAST && !POOLED_CHANNELS_LAST;
static_assert(CHANNELS_LAST || !POOLED_CHANNELS_LAST, "no model needs this change of order");

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

// Averages of a pooled cell for VECTOR channels.
__device__ Features pool(const Map<const Feature>& map, const Region& region, int cell, int channel,
                         int channels) {
    const int stride = CHANNELS_LAST ? channels : 1;
    const Feature* own =
        map.values + (CHANNELS_LAST ? channel : channel * map.height * map.width);
    Real sums[VECTOR] = {};
    if (region.level >= 0) {
        visit_pixels(region, cell, map.height, map.width, [&](int pixel, Real weight) {
            const auto features = *reinterpret_cast<const Features*>(own + pixel * stride);
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) sums[v] += weight * widen(features.values[v]);
        });
    }
    Features averages;
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) narrow(sums[v], averages.values[v]);
    return averages;
}

extern "C" __global__ void __launch_bounds__(THREADS)
pyramid_roi_align(EACH_LEVEL(MAP_PARAMETER), const float4* __restrict__ rois, int channels,
                  EACH_LEVEL(SIZE_PARAMETERS), Feature* __restrict__ pooled) {
    __shared__ Feature stage[STAGED ? GROUP * CELLS : 1];
    const Map<const Feature> maps[LEVELS] = {EACH_LEVEL(MAP_OF_LEVEL)};
    const Region region = region_of(rois[own_roi()]);
    const auto map = map_of_image(maps, region.level, channels);
    const int first = first_cell(), cells = cells_of_block();
    pooled += own_roi() * channels * ALL_CELLS;

    for (int group = 0; group < channels; group += GROUP) {
        for_own_cells(group, channels, [&](int cell, int channel) {
            const Features averages = pool(map, region, first + cell, channel, channels);
            if constexpr (STAGED) {
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) {
                    stage[(channel - group + v) * CELLS + cell] = averages.values[v];
                }
            } else {
                const int place = POOLED_CHANNELS_LAST ? (first + cell) * channels + channel
                                                       : channel * ALL_CELLS + first + cell;
                *reinterpret_cast<Features*>(pooled + place) = averages;
            }
        });
        if constexpr (STAGED) {
            __syncthreads();
            const int count = min(GROUP, channels - group) * cells;
            for (int i = threadIdx.x; i < count; i += THREADS) {
                const int channel = i / cells, cell = i % cells;
                pooled[(group + channel) * ALL_CELLS + first + cell] =
                    stage[channel * CELLS + cell];
            }
            __syncthreads();
        }
    }
}
