// Pairwise IoU of two sets of boxes. Specification: box_iou/operation.py.
//
// A thread computes the IoU of one box of `others` with ROWS boxes of `boxes`.
//
// Compile-time constants: ROWS, THREADS.
#include "boxes.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
box_iou(const float4* __restrict__ boxes, const float4* __restrict__ others, int rows, int columns,
        int others_stride, float* __restrict__ iou) {
    const int column = blockIdx.x * THREADS + threadIdx.x;
    if (column >= columns) return;
    const long long image = blockIdx.z;
    const float4 other = others[image * others_stride + column];
    const float other_area = area_of(other);
    boxes += image * rows;
    iou += image * rows * columns + column;
    const int first = blockIdx.y * ROWS, end = min(first + ROWS, rows);
    for (int row = first; row < end; ++row) {
        const float4 box = boxes[row];
        iou[static_cast<long long>(row) * columns] = iou_of(box, area_of(box), other, other_area);
    }
}
