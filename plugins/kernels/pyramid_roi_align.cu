// RoIAlign over a feature pyramid; roi_sampling.cuh has the constants and who does what.
#include "roi_sampling.cuh"

#define MAP_PARAMETER(l) const Feature* __restrict__ map##l

using Features = Vector<Feature, VECTOR>;

extern "C" __global__ void __launch_bounds__(THREADS)
pyramid_roi_align(EACH_LEVEL(MAP_PARAMETER), const float4* __restrict__ rois, int channels,
                  EACH_LEVEL(SIZE_PARAMETERS), Feature* __restrict__ pooled) {
    const Map<const Feature> maps[LEVELS] = {EACH_LEVEL(MAP_OF_LEVEL)};
    const Region region = region_of(rois[own_roi()]);
    const auto map = map_of_image(maps, region.level, channels);
    pooled += own_roi() * channels * (OUTPUT_SIZE * OUTPUT_SIZE);

    for_own_cells(channels, [&](int cell, int channel, int place) {
        const int stride = CHANNELS_LAST ? channels : 1;
        const Feature* own = map.values + (CHANNELS_LAST ? channel
                                                         : channel * map.height * map.width);
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
        *reinterpret_cast<Features*>(pooled + place) = averages;
    });
}
