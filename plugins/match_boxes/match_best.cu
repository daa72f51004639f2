// Mark the candidates of highest IoU with each ground-truth box ("truth") as positive and not
// negative. match_boxes.cu computes the highest IoUs. Specification: match_boxes/operation.py.
//
// Compile-time constants: THREADS.
#include "boxes.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
match_best(const float4* __restrict__ truths, const float4* __restrict__ candidates,
           const float* __restrict__ highest, const int* __restrict__ best, int truth_count,
           int count, int candidates_stride, unsigned char* __restrict__ positive,
           unsigned char* __restrict__ negative) {
    __shared__ int lowest_best;
    const int index = blockIdx.x * THREADS + threadIdx.x;
    const long long image = blockIdx.y;
    truths += image * truth_count;
    best += image * truth_count;
    if (threadIdx.x == 0) lowest_best = __float_as_int(LARGEST_FLOAT);
    __syncthreads();
    for (int t = threadIdx.x; t < truth_count; t += THREADS) {
        if (best[t] > 0) atomicMin(&lowest_best, best[t]);
    }
    __syncthreads();

    if (index >= count) return;
    const long long place = image * count + index;
    const float own_highest = highest[place];
    // Skip most candidates: their highest IoU is below the highest IoU of every truth.
    if (own_highest < __int_as_float(lowest_best)) return;
    const float4 own = candidates[image * candidates_stride + index];
    const float area = area_of(own);
    for (int t = 0; t < truth_count; ++t) {
        const float wanted = __int_as_float(best[t]);
        if (wanted > 0.0f && wanted <= own_highest &&
            iou_of(truths[t], area_of(truths[t]), own, area) == wanted) {
            positive[place] = 1;
            negative[place] = 0;
            return;
        }
    }
}
