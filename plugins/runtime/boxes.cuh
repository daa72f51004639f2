// Arithmetic of xyxy boxes in float32. Formulas are evaluated in torch's order and compiled without
// fused multiply-add, so that results equal the CPU's bit for bit.
#pragma once

constexpr float LARGEST_FLOAT = 0x1.fffffep127f;

__device__ inline float area_of(const float4& box) {
    return (box.z - box.x) * (box.w - box.y);
}

__device__ inline float intersection_of(const float4& a, const float4& b) {
    const float width = fmaxf(fminf(a.z, b.z) - fmaxf(a.x, b.x), 0.0f);
    const float height = fmaxf(fminf(a.w, b.w) - fmaxf(a.y, b.y), 0.0f);
    return width * height;
}

// Intersection over union; 0 if the union is empty or a coordinate is NaN.
__device__ inline float iou_of(const float4& a, float area_a, const float4& b, float area_b) {
    const float intersection = intersection_of(a, b);
    // Division is slow, and most pairs do not overlap.
    if (!(intersection > 0.0f)) return 0.0f;
    const float united = area_a + area_b - intersection;
    return united > 0.0f ? intersection / united : 0.0f;
}
