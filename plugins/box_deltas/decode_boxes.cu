// Decode selected deltas and clip the boxes to their images.
// Specification: box_deltas/operation.py.
//
// Compile-time constants: CENTER_WEIGHT, SIZE_WEIGHT, MAX_LOG_SCALE, INCLUSIVE, MIN_SIDE, THREADS,
// LARGE (1: the kernel has the output `large`; 0: it has not, as in the TensorRT plugin).

struct Interval {
    float near, far;
};

// These comparisons propagate NaN, unlike fminf and fmaxf.
__device__ float at_most(float value, float limit) { return value > limit ? limit : value; }
__device__ float at_least(float value, float limit) { return value < limit ? limit : value; }

__device__ Interval decoded(float shift, float log_scale, Interval reference, long long size) {
    const float reference_side = reference.far - reference.near;
    const float reference_center = reference.near + 0.5f * reference_side;
    const float center = shift / CENTER_WEIGHT * reference_side + reference_center;
    const float scale = expf(at_most(log_scale / SIZE_WEIGHT, MAX_LOG_SCALE));
    const float half_side = 0.5f * scale * reference_side;
    const float end = static_cast<float>(size), least = INCLUSIVE;
    return {at_most(at_least(center - half_side, 0.0f), end - least),
            at_most(at_least(center + half_side, least), end)};
}

__device__ bool is_large(Interval interval) {
    const float side = interval.far - interval.near;
    return side >= MIN_SIDE && side > 0.0f;
}

extern "C" __global__ void __launch_bounds__(THREADS)
decode_boxes(const float4* __restrict__ deltas, const float4* __restrict__ references,
             const long long* __restrict__ indices, const long long* __restrict__ image_sizes,
             int reference_count, int references_stride, int classes, int chosen_count,
             float4* __restrict__ boxes
#if LARGE
             , unsigned char* __restrict__ large
#endif
) {
    const int place = blockIdx.x * THREADS + threadIdx.x;
    if (place >= chosen_count) return;
    const long long image = blockIdx.y;
    const long long output = image * chosen_count + place;
    const long long index = indices[output];
    if (index < 0) {
        boxes[output] = {0.0f, 0.0f, 0.0f, 0.0f};
#if LARGE
        large[output] = 0;
#endif
        return;
    }
    const float4 delta = deltas[image * reference_count * classes + index];
    const float4 reference = references[image * references_stride + index / classes];
    const long long height = image_sizes[2 * image], width = image_sizes[2 * image + 1];
    const Interval x = decoded(delta.x, delta.z, {reference.x, reference.z}, width);
    const Interval y = decoded(delta.y, delta.w, {reference.y, reference.w}, height);
    boxes[output] = {x.near, y.near, x.far, y.far};
#if LARGE
    large[output] = is_large(x) && is_large(y);
#endif
}
