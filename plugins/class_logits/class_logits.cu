// Product of an instance's features and the weight of its class. `relu_class_logits` first adds a
// bias to the features and applies a ReLU; `relu_class_logits_backward` computes its gradient.
// Specification: class_logits/operation.py.
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

// The channels that a lane holds of a cell's features, of a weight or of the offset. Channels from
// CHANNELS on are zero.
struct Channels {
    float values[STEPS][VECTOR] = {};
};

// Call use(step, channel) for each of the lane's groups of VECTOR channels. `channel` is the first
// one.
template <typename Use>
__device__ void for_each_step(const Use& use) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int channel = step * STEP + static_cast<int>(threadIdx.x) % WARP * VECTOR;
        if (channel < CHANNELS) use(step, channel);
    }
}

__device__ Channels channels_of(const VALUE* row) {
    Channels channels;
    for_each_step([&](int step, int channel) {
        const auto values = *reinterpret_cast<const Values*>(row + channel);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) channels.values[step][v] = widen(values.values[v]);
    });
    return channels;
}

// Unlike fmaxf, this keeps NaN, as torch does.
__device__ float relu(float value) { return value < 0.f ? 0.f : value; }

template <bool WITH_RELU>
__device__ void compute_logits(const VALUE* features, const VALUE* offset, const VALUE* weight,
                               const VALUE* bias, const long long* labels, int cells,
                               VALUE* logits) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const long long instance = blockIdx.x, label = labels[instance];
    const Channels factors = channels_of(weight + label * CHANNELS);
    Channels offsets;
    if (WITH_RELU) offsets = channels_of(offset);
    const float added = widen(bias[label]);
    features += instance * cells * CHANNELS;
    logits += instance * cells;
#pragma unroll 4
    for (int cell = blockIdx.y * WARPS + warp; cell < cells; cell += gridDim.y * WARPS) {
        const Channels own = channels_of(features + static_cast<long long>(cell) * CHANNELS);
        float sum = 0.f;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                float value = own.values[step][v];
                if (WITH_RELU) value = relu(value + offsets.values[step][v]);
                sum += factors.values[step][v] * value;
            }
        }
        sum = combined_over_warp(sum, [](float a, float b) { return a + b; });
        if (lane == 0) narrow(sum + added, logits[cell]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
class_logits(const VALUE* __restrict__ features, const VALUE* __restrict__ weight,
             const VALUE* __restrict__ bias, const long long* __restrict__ labels, int cells,
             VALUE* __restrict__ logits) {
    compute_logits<false>(features, nullptr, weight, bias, labels, cells, logits);
}

extern "C" __global__ void __launch_bounds__(THREADS)
relu_class_logits(const VALUE* __restrict__ features, const VALUE* __restrict__ offset,
                  const VALUE* __restrict__ weight, const VALUE* __restrict__ bias,
                  const long long* __restrict__ labels, int cells, VALUE* __restrict__ logits) {
    compute_logits<true>(features, offset, weight, bias, labels, cells, logits);
}

// Add up the sums of all warps in a fixed order, so that results are reproducible.
__device__ void write_sum(const Channels& own, float* output) {
    __shared__ float total[CHANNELS];
    for (int warp = 0; warp < WARPS; ++warp) {
        if (warp == static_cast<int>(threadIdx.x) / WARP) {
            for_each_step([&](int step, int channel) {
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) {
                    const float before = warp == 0 ? 0.f : total[channel + v];
                    total[channel + v] = before + own.values[step][v];
                }
            });
        }
        __syncthreads();
    }
    for (int channel = threadIdx.x; channel < CHANNELS; channel += THREADS) {
        output[channel] = total[channel];
    }
    __syncthreads();
}

// A block handles all cells of one instance.
extern "C" __global__ void __launch_bounds__(THREADS)
relu_class_logits_backward(const VALUE* __restrict__ gradient, const VALUE* __restrict__ features,
                           const VALUE* __restrict__ offset, const VALUE* __restrict__ weight,
                           const long long* __restrict__ labels, int cells,
                           VALUE* __restrict__ feature_gradients, float* __restrict__ weighted,
                           float* __restrict__ sums) {
    const long long instance = blockIdx.x;
    const Channels factors = channels_of(weight + labels[instance] * CHANNELS);
    const Channels offsets = channels_of(offset);
    gradient += instance * cells;
    features += instance * cells * CHANNELS;
    feature_gradients += instance * cells * CHANNELS;

    Channels weighted_sum, gradient_sum;
#pragma unroll 4
    for (int cell = threadIdx.x / WARP; cell < cells; cell += WARPS) {
        const long long first = static_cast<long long>(cell) * CHANNELS;
        const float own = widen(gradient[cell]);
        const Channels values = channels_of(features + first);
        for_each_step([&](int step, int channel) {
            Values results;
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                const float value = values.values[step][v] + offsets.values[step][v];
                const float share = value <= 0.f ? 0.f : own * factors.values[step][v];
                weighted_sum.values[step][v] += own * relu(value);
                gradient_sum.values[step][v] += share;
                narrow(share, results.values[v]);
            }
            *reinterpret_cast<Values*>(feature_gradients + first + channel) = results;
        });
    }
    write_sum(weighted_sum, weighted + instance * CHANNELS);
    write_sum(gradient_sum, sums + instance * CHANNELS);
}
