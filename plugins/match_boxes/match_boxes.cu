// Match candidates to ground-truth boxes by IoU. Specification: match_boxes/operation.py.
//
// A warp handles ITEMS * 32 neighbouring candidates, a lane every 32nd of them. The warp
// skips ground-truth boxes ("truths") that lie outside of the bounding box of its candidates.
//
// Compile-time constants: FOREGROUND_IOU, BACKGROUND_IOU, LOW_QUALITY (1: also compute the inputs
// of match_best.cu), ITEMS, TILE (truths that a block loads at once), THREADS.
#include "boxes.cuh"
#include "warp.cuh"

static_assert(TILE <= THREADS, "a thread loads one truth of a tile");

struct Truth {
    float4 box;
    float area;
    bool exists;
    // Bits of the highest IoU with a candidate of the block. Bits of non-negative floats have the
    // order of the floats, so integer atomicMax works.
    int best;
};

__device__ float highest_of_warp(float value) {
    return combined_over_warp(value, [](float a, float b) { return fmaxf(a, b); });
}

// Return an empty box, which touches no other box and does not extend a bounding box.
__device__ float4 nowhere() {
    return {LARGEST_FLOAT, LARGEST_FLOAT, -LARGEST_FLOAT, -LARGEST_FLOAT};
}

// Bounding box of the candidates of a warp.
__device__ float4 surrounding(const float4 (&boxes)[ITEMS]) {
    float4 around = nowhere();
    for (const float4& box : boxes) {
        around = {fminf(around.x, box.x), fminf(around.y, box.y), fmaxf(around.z, box.z),
                  fmaxf(around.w, box.w)};
    }
    return {-highest_of_warp(-around.x), -highest_of_warp(-around.y), highest_of_warp(around.z),
            highest_of_warp(around.w)};
}

__device__ bool touch(const float4& a, const float4& b) {
    return a.x < b.z && a.z > b.x && a.y < b.w && a.w > b.y;
}

extern "C" __global__ void __launch_bounds__(THREADS)
match_boxes(const float4* __restrict__ truths, const long long* __restrict__ labels,
            const float4* __restrict__ candidates, int truth_count, int count,
            int candidates_stride, long long* __restrict__ target,
            unsigned char* __restrict__ positive, unsigned char* __restrict__ negative
#if LOW_QUALITY
            , float* __restrict__ highest, int* __restrict__ best
#endif
) {
    __shared__ Truth tile[TILE];
    const int thread = threadIdx.x, lane = thread % WARP;
    const int first = (blockIdx.x * THREADS + thread - lane) * ITEMS + lane;
    const long long image = blockIdx.y;
    candidates += image * candidates_stride;

    float4 own[ITEMS];
    float area[ITEMS], iou[ITEMS];
    int match[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int index = first + i * WARP;
        own[i] = index < count ? candidates[index] : nowhere();
        area[i] = area_of(own[i]);
        iou[i] = 0.0f;
        match[i] = -1;
    }
    const float4 around = surrounding(own);

    int first_truth = -1;
    for (int start = 0; start < truth_count; start += TILE) {
        const int size = min(TILE, truth_count - start);
        const long long place = image * truth_count + start + thread;
        __syncthreads();
        if (thread < size) {
            tile[thread] = {truths[place], area_of(truths[place]), labels[place] > 0, 0};
        }
        __syncthreads();

        for (int t = 0; t < size; ++t) {
            if (!tile[t].exists) continue;
            if (first_truth < 0) first_truth = start + t;
            const float4 truth = tile[t].box;
            if (!touch(truth, around)) continue;
            float highest_of_truth = 0.0f;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const float overlap = iou_of(truth, tile[t].area, own[i], area[i]);
                highest_of_truth = fmaxf(highest_of_truth, overlap);
                if (overlap > iou[i]) {
                    iou[i] = overlap;
                    match[i] = start + t;
                }
            }
#if LOW_QUALITY
            highest_of_truth = highest_of_warp(highest_of_truth);
            if (lane == 0) atomicMax(&tile[t].best, __float_as_int(highest_of_truth));
#endif
        }
#if LOW_QUALITY
        __syncthreads();
        if (thread < size && tile[thread].best > 0) atomicMax(&best[place], tile[thread].best);
#endif
    }

#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int index = first + i * WARP;
        if (index >= count) break;
        const long long place = image * count + index;
        const bool exists = first_truth >= 0;
        // All IoUs of a candidate that touches no truth are 0: the first truth wins the tie.
        target[place] = match[i] >= 0 ? match[i] : max(first_truth, 0);
        positive[place] = exists && iou[i] >= FOREGROUND_IOU;
        negative[place] = !exists || iou[i] < BACKGROUND_IOU;
#if LOW_QUALITY
        highest[place] = iou[i];
#endif
    }
}
