// Encode boxes as deltas relative to references. Specification: box_deltas/operation.py.
//
// Compile-time constants: CENTER_WEIGHT, SIZE_WEIGHT, THREADS.

__device__ float encoded_center(float near, float far, float reference_near, float reference_far) {
    const float reference_side = reference_far - reference_near;
    const float center = near + 0.5f * (far - near);
    const float reference_center = reference_near + 0.5f * reference_side;
    return CENTER_WEIGHT * (center - reference_center) / reference_side;
}

__device__ float encoded_size(float near, float far, float reference_near, float reference_far) {
    return SIZE_WEIGHT * logf((far - near) / (reference_far - reference_near));
}

extern "C" __global__ void __launch_bounds__(THREADS)
encode_boxes(const float4* __restrict__ boxes, const float4* __restrict__ references, int count,
             float4* __restrict__ deltas) {
    const int index = blockIdx.x * THREADS + threadIdx.x;
    if (index >= count) return;
    const float4 box = boxes[index], reference = references[index];
    deltas[index] = {encoded_center(box.x, box.z, reference.x, reference.z),
                     encoded_center(box.y, box.w, reference.y, reference.w),
                     encoded_size(box.x, box.z, reference.x, reference.z),
                     encoded_size(box.y, box.w, reference.y, reference.w)};
}
