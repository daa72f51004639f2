// Arithmetic of xyxy boxes in single precision. Each formula is written as torch evaluates it and
// compiled without contraction, so that answers equal those of a CPU bit for bit.
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

// 0 where coordinates are no numbers, or where neither box has area.
__device__ inline float iou_of(const float4& a, float area_a, const float4& b, float area_b) {
    const float intersection = intersection_of(a, b);
    // The division is slow and most pairs do not touch.
    if (!(intersection > 0.0f)) return 0.0f;
    const float united = area_a + area_b - intersection;
    return united > 0.0f ? intersection / united : 0.0f;
}
