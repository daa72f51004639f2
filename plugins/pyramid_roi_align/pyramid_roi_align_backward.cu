// Gradient of pyramid_roi_align with respect to the features. It is added to the outputs, which
// must be zero initially.
// The order of additions is not deterministic. roi_sampling.cuh has the constants and the
// distribution of work.
#include "roi_sampling.cuh"
static_assert(CHANNELS_LAST, "neighbouring threads add to neighbouring addresses");

#define MAP_PARAMETER(l) Real* map##l

__device__ void add(Real* to, const Real (&gradients)[VECTOR], Real weight) {
#if __CUDA_ARCH__ >= 900
    if constexpr (VECTOR == 4 && sizeof(Real) == sizeof(float)) {
        atomicAdd(reinterpret_cast<float4*>(to),
                  make_float4(weight * gradients[0], weight * gradients[1],
                              weight * gradients[2], weight * gradients[3]));
        return;
    }
#endif
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) atomicAdd(to + v, weight * gradients[v]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
pyramid_roi_align_backward(const Feature* __restrict__ pooled, const float4* __restrict__ rois,
                           int channels, EACH_LEVEL(SIZE_PARAMETERS), EACH_LEVEL(MAP_PARAMETER)) {
    const Map<Real> maps[LEVELS] = {EACH_LEVEL(MAP_OF_LEVEL)};
    const Region region = region_of(rois[own_roi()]);
    if (region.level < 0) return;
    const auto map = map_of_image(maps, region.level, channels);
    pooled += own_roi() * channels * ALL_CELLS;

    for (int group = 0; group < channels; group += GROUP) {
        for_own_cells(group, channels, [&](int cell, int channel) {
            const Feature* own = pooled + (first_cell() + cell) * channels + channel;
            Real gradients[VECTOR];
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) gradients[v] = widen(own[v]);
            visit_pixels(region, first_cell() + cell, map.height, map.width,
                         [&](int pixel, Real weight) {
                add(map.values + pixel * channels + channel, gradients, weight);
            });
        });
    }
}
