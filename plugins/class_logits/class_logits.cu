// Product of an instance's features and the weight of its class. Contract:
// class_logits/operation.py.
//
// A block handles cells of one instance, and a warp one cell at a time. A lane keeps its channels
// of the class's weight in registers.
//
// Compile-time constants: VALUE (type), CHANNELS, VECTOR (channels per load), THREADS (per block).
#include "numeric.cuh"
#include "warp.cuh"

constexpr int WARPS = THREADS / WARP;
constexpr int STEP = WARP * VECTOR, STEPS = (CHANNELS + STEP - 1) / STEP;
static_assert(CHANNELS % VECTOR == 0, "a load does not cross a cell's end");

using Values = Vector<VALUE, VECTOR>;

extern "C" __global__ void __launch_bounds__(THREADS)
class_logits(const VALUE* __restrict__ features, const VALUE* __restrict__ weight,
             const VALUE* __restrict__ bias, const long long* __restrict__ labels, int cells,
             VALUE* __restrict__ logits) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const long long instance = blockIdx.x, label = labels[instance];
    float factors[STEPS][VECTOR] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int channel = step * STEP + lane * VECTOR;
        if (channel >= CHANNELS) continue;
        const auto values = *reinterpret_cast<const Values*>(weight + label * CHANNELS + channel);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) factors[step][v] = widen(values.values[v]);
    }
    const float offset = widen(bias[label]);
    features += instance * cells * CHANNELS;
    logits += instance * cells;
#pragma unroll 4
    for (int cell = blockIdx.y * WARPS + warp; cell < cells; cell += gridDim.y * WARPS) {
        float sum = 0.f;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int channel = step * STEP + lane * VECTOR;
            if (channel >= CHANNELS) continue;
            const VALUE* source = features + static_cast<long long>(cell) * CHANNELS + channel;
            const auto values = *reinterpret_cast<const Values*>(source);
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) sum += factors[step][v] * widen(values.values[v]);
        }
        sum = combined_over_warp(sum, [](float a, float b) { return a + b; });
        if (lane == 0) narrow(sum + offset, logits[cell]);
    }
}
