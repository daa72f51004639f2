// RoIAlign over a feature pyramid. roi_sampling.cuh has the constants and the distribution of work.
// Further constant: POOLED_CHANNELS_LAST, the memory format of the pooled features.
#include "roi_sampling.cuh"

#define MAP_PARAMETER(l) const Feature* __restrict__ map##l

using Features = Vector<Feature, VECTOR>;

// Threads that handle neighbouring channels cannot write the cells of one channel as whole cache
// lines. The cells are staged in shared memory.
constexpr bool STAGED = CHANNELS_LAST && !POOLED_CHANNELS_LAST;
static_assert(CHANNELS_LAST || !POOLED_CHANNELS_LAST, "no model needs this change of order");

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
