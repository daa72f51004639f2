// Anchors of all cells of a pyramid, one thread per anchor.
// Specification: grid_anchors/operation.py.
//
// Compile-time constants: LEVELS, THREADS.
#include "levels.cuh"

#define MAP_PARAMETERS(l) int down##l, int across##l, int rows##l, int columns##l
#define MAP_OF_LEVEL(l) {down##l, across##l, rows##l, columns##l}

struct Map {
    // Stride in pixels.
    int down, across;
    int rows, columns;
};

extern "C" __global__ void __launch_bounds__(THREADS)
grid_anchors(const float4* __restrict__ cell_anchors, int anchors_per_cell,
             EACH_LEVEL(MAP_PARAMETERS), float4* __restrict__ anchors) {
    const Map maps[LEVELS] = {EACH_LEVEL(MAP_OF_LEVEL)};
    const int index = blockIdx.x * THREADS + threadIdx.x;
    int rest = index;
#pragma unroll
    for (int level = 0; level < LEVELS; ++level) {
        const Map& map = maps[level];
        const int count = map.rows * map.columns * anchors_per_cell;
        if (rest < count) {
            const int cell = rest / anchors_per_cell, shape = rest % anchors_per_cell;
            const float y = cell / map.columns * map.down, x = cell % map.columns * map.across;
            const float4 own = cell_anchors[level * anchors_per_cell + shape];
            anchors[index] = {own.x + x, own.y + y, own.z + x, own.w + y};
            return;
        }
        rest -= count;
    }
}
