// Transition between two residual blocks. Specification: block_transition/operation.py.
//
// A thread block keeps all weights in shared memory. Each of its warps computes tiles of 16 pixels,
// without waiting for other warps. Four threads share a pixel. Of each chunk of 32 channels, thread
// `q` of the four holds channels 8q to 8q + 7, which are 16 bytes. This assignment determines the
// order of the channels in the tensor-core operands.
//
// A packet is one chunk of channels of a tile's input. A thread copies to shared memory only the
// values that it reads itself, and starts each copy while it computes the previous tile. Threads
// therefore need not wait for one another, and enough copies are in flight to use the whole
// bandwidth of the memory.
//
// Compile-time constants: VALUE (type), CHANNELS (of the input), SHORTCUT (channels of the
// shortcut's input; 0: the shortcut is a map to add), OUTPUTS, REDUCED, THREADS (per block).
#include "tensor_cores.cuh"
#include "warp.cuh"

constexpr int WARPS = THREADS / WARP, CHUNK = 32;
// Pixels per tile and per thread.
constexpr int TILE = 16, OWN_PIXELS = 2;
constexpr int INPUTS = CHANNELS + SHORTCUT;
static_assert(CHANNELS % CHUNK == 0 && SHORTCUT % CHUNK == 0, "inputs are read in chunks");
// Channels of the second input, which is the shortcut's input or the map to add. Number of packets
// of a tile: the packets of the first input come first, then those of the second input.
constexpr int SECOND = SHORTCUT > 0 ? SHORTCUT : OUTPUTS;
constexpr int PACKETS = (CHANNELS + SECOND) / CHUNK;
static_assert(OUTPUTS % CHUNK == 0 && REDUCED % CHUNK == 0, "outputs are written in chunks");

// 8 neighbouring channels of a pixel, two to a word.
using Words = Vector<unsigned, 4>;

// Return the index of the warp's first operand in a weight that `arrange` stored. COLUMNS is the
// weight's number of input channels. The arguments select a chunk of output channels, a chunk of
// input channels, half of that chunk, and a pair of matrices of 8 output channels.
template <int COLUMNS>
__device__ int place_of(int output_chunk, int input_chunk, int half, int pair) {
    return (((output_chunk * (COLUMNS / CHUNK) + input_chunk) * 2 + half) * 2 + pair) * WARP;
}

// Copy a weight [ROWS, OWN] to shared memory, in the order in which `multiply` reads it. The copy
// becomes the columns from `first` on of a weight [ROWS, COLUMNS] in shared memory.
template <int ROWS, int OWN, int COLUMNS>
__device__ void arrange(const VALUE* __restrict__ weight, int first, uint4* operands) {
    for (int index = threadIdx.x; index < ROWS * OWN / 4; index += THREADS) {
        const int row = index / (OWN / 4), column = 4 * (index % (OWN / 4));
        const int target_column = first + column;
        const int matrix = row / 2 % 4, thread = column / 8 % 4;
        const int lane = (row / 8 % 4 * 2 + row % 2) * 4 + thread;
        const int place = place_of<COLUMNS>(row / CHUNK, target_column / CHUNK, column / 4 % 2,
                                            matrix / 2);
        reinterpret_cast<uint2*>(operands + place + lane)[matrix % 2] =
            *reinterpret_cast<const uint2*>(weight + row * OWN + column);
    }
}

__device__ Words load(const VALUE* source) { return *reinterpret_cast<const Words*>(source); }
__device__ void store(VALUE* target, const Words& words) {
    *reinterpret_cast<Words*>(target) = words;
}

// Value `i` of the thread's 8 channels.
__device__ float channel(const Words& words, int i) {
    VALUE value;
    value.bits = static_cast<unsigned short>(words.values[i / 2] >> 16 * (i % 2));
    return widen(value);
}

// Sums of the thread's 8 channels for its two pixels. sums[i][2 * p + c] is the sum of channel
// 2 * i + c and pixel p.
using Sums = float[4][4];

// Add the product of one chunk of the pixels' channels and the weight of one chunk of outputs.
template <int COLUMNS>
__device__ void multiply(Sums& sums, const Words (&pixels)[OWN_PIXELS],
                         const uint4* weight, int output_chunk, int input_chunk) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned a[4] = {pixels[0].values[2 * half], pixels[1].values[2 * half],
                               pixels[0].values[2 * half + 1], pixels[1].values[2 * half + 1]};
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            const uint4 b = weight[place_of<COLUMNS>(output_chunk, input_chunk, half, pair) +
                                   threadIdx.x % WARP];
            multiply_add(sums[2 * pair], a, b.x, b.y, VALUE{});
            multiply_add(sums[2 * pair + 1], a, b.z, b.w, VALUE{});
        }
    }
}

// Add the bias of the thread's 8 channels.
__device__ void add_bias(Sums& sums, const VALUE* bias) {
    const Words words = load(bias);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
#pragma unroll
        for (int p = 0; p < OWN_PIXELS; ++p) sums[c / 2][2 * p + c % 2] += channel(words, c);
    }
}

// Return the ReLU of the sums plus `added`, for the thread's 8 channels of its pixel `p` (0 or 1).
__device__ Words relu_of(const Sums& sums, int p, const Words& added) {
    Words words;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float* pair = sums[i] + 2 * p;
        words.values[i] = relu_pair(pair[0] + channel(added, 2 * i),
                                    pair[1] + channel(added, 2 * i + 1), VALUE{});
    }
    return words;
}

// Packets in shared memory. A thread copies and reads only its own values of a packet.
struct Packets {
    const VALUE *images, *shortcut;
    int pixels;
    uint4* slots;

    // Index in the batch of the thread's pixel `p` (0 or 1) of a tile. In the last tile, threads
    // without a pixel read the last pixel; their results are not stored.
    __device__ long long pixel_of(int tile, int p) const {
        return min(tile * TILE + static_cast<int>(threadIdx.x % WARP / 4) + 8 * p, pixels - 1);
    }

    __device__ uint4* slot(int packet, int p) const {
        return slots + (OWN_PIXELS * packet + p) * THREADS + threadIdx.x;
    }

    __device__ void fetch(int packet, int tile) const {
        const int channel = packet * CHUNK + 8 * (threadIdx.x % 4);
#pragma unroll
        for (int p = 0; p < OWN_PIXELS; ++p) {
            const VALUE* source =
                packet < CHANNELS / CHUNK
                    ? images + pixel_of(tile, p) * CHANNELS + channel
                    : shortcut + pixel_of(tile, p) * SECOND + channel - CHANNELS;
            const auto target = static_cast<unsigned>(__cvta_generic_to_shared(slot(packet, p)));
#if __CUDA_ARCH__ >= 800
            if (tile * TILE < pixels) {
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source)
                             : "memory");
            }
#endif
        }
#if __CUDA_ARCH__ >= 800
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }

    // Wait for the oldest copy, which must be that of `packet`, and read the packet.
    __device__ void take(int packet, Words (&words)[OWN_PIXELS]) const {
#if __CUDA_ARCH__ >= 800
        asm volatile("cp.async.wait_group %0;" ::"n"(PACKETS - 1) : "memory");
#endif
#pragma unroll
        for (int p = 0; p < OWN_PIXELS; ++p) words[p] = *reinterpret_cast<const Words*>(slot(packet, p));
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
block_transition(const VALUE* __restrict__ images, const VALUE* __restrict__ weight,
                 const VALUE* __restrict__ bias, const VALUE* __restrict__ shortcut,
                 const VALUE* __restrict__ shortcut_weight,
                 const VALUE* __restrict__ shortcut_bias, const VALUE* __restrict__ next_weight,
                 const VALUE* __restrict__ next_bias, int pixels, VALUE* __restrict__ output,
                 VALUE* __restrict__ reduced) {
    extern __shared__ uint4 shared[];
    uint4 *const expansion = shared, *const reduction = expansion + OUTPUTS * INPUTS / 8;
    const Packets packets = {images, shortcut, pixels, reduction + REDUCED * OUTPUTS / 8};
    const int step = gridDim.x * WARPS, own = 8 * (threadIdx.x % 4);
    int tile = blockIdx.x * WARPS + threadIdx.x / WARP;
    for (int packet = 0; packet < PACKETS; ++packet) packets.fetch(packet, tile);
    arrange<OUTPUTS, CHANNELS, INPUTS>(weight, 0, expansion);
    if constexpr (SHORTCUT > 0) {
        arrange<OUTPUTS, SHORTCUT, INPUTS>(shortcut_weight, CHANNELS, expansion);
    }
    arrange<REDUCED, OUTPUTS, OUTPUTS>(next_weight, 0, reduction);
    __syncthreads();

    for (; tile * TILE < pixels; tile += step) {
        const int first = tile * TILE + threadIdx.x % WARP / 4;
        Words inputs[INPUTS / CHUNK][OWN_PIXELS];
#pragma unroll
        for (int i = 0; i < INPUTS / CHUNK; ++i) {
            packets.take(i, inputs[i]);
            packets.fetch(i, tile + step);
        }
        Sums totals[REDUCED / CHUNK] = {};
#pragma unroll 4
        for (int chunk = 0; chunk < OUTPUTS / CHUNK; ++chunk) {
            const int start = chunk * CHUNK + own;
            Sums sums = {};
            add_bias(sums, bias + start);
            if constexpr (SHORTCUT > 0) add_bias(sums, shortcut_bias + start);
#pragma unroll
            for (int i = 0; i < INPUTS / CHUNK; ++i) {
                multiply<INPUTS>(sums, inputs[i], expansion, chunk, i);
            }
            Words added[OWN_PIXELS] = {}, expanded[OWN_PIXELS];
            if constexpr (SHORTCUT == 0) {
                packets.take(CHANNELS / CHUNK + chunk, added);
                packets.fetch(CHANNELS / CHUNK + chunk, tile + step);
            }
#pragma unroll
            for (int p = 0; p < OWN_PIXELS; ++p) {
                const int pixel = first + 8 * p;
                expanded[p] = relu_of(sums, p, added[p]);
                if (pixel < pixels) {
                    store(output + static_cast<long long>(pixel) * OUTPUTS + start, expanded[p]);
                }
            }
#pragma unroll
            for (int i = 0; i < REDUCED / CHUNK; ++i) {
                multiply<OUTPUTS>(totals[i], expanded, reduction, i, chunk);
            }
        }
#pragma unroll
        for (int i = 0; i < REDUCED / CHUNK; ++i) {
            const int start = i * CHUNK + own;
            add_bias(totals[i], next_bias + start);
#pragma unroll
            for (int p = 0; p < OWN_PIXELS; ++p) {
                const int pixel = first + 8 * p;
                if (pixel < pixels) {
                    store(reduced + static_cast<long long>(pixel) * REDUCED + start,
                          relu_of(totals[i], p, Words{}));
                }
            }
        }
    }
}
