// Input of a ResNet's stem in shared memory.
//
// Compile-time constants: PIXEL (type of the images), VALUE (type of weights and output).
#pragma once
#include "tensor_cores.cuh"

// Rows and columns of the convolution's kernel.
constexpr int KERNEL = 7;

struct Map {
    int height, width;

    // Output size of a convolution or pooling with stride 2: half the size, rounded up.
    __device__ Map halved() const { return {(height + 1) / 2, (width + 1) / 2}; }
    __device__ bool has(int row, int column) const {
        return row >= 0 && row < height && column >= 0 && column < width;
    }
};

// Normalised pixels of a tile of ROWS x COLUMNS pixels, row by row, four channels each. The fourth
// channel is a constant. The other channels of pixels outside of the image are zero.
template <int ROWS, int COLUMNS>
struct PixelTile {
    // Two neighbouring pixels as words of two channels.
    using Pair = Vector<unsigned, 4>;
    static constexpr int PAIRS = COLUMNS / 2;
    static_assert(COLUMNS % 2 == 0, "a row consists of pairs");

    Pair pairs[ROWS * PAIRS];

    // `column` is even.
    __device__ const Pair* at(int row, int column) const {
        return pairs + row * PAIRS + column / 2;
    }

    // Fill the tile. `first_row` and `first_column` are the position of its first pixel in the
    // image. `plane` is the number of values in a channel, `width` the number in a row, both with
    // padding. `fourth` is the value of the fourth channel. Each of the block's THREADS threads
    // loads AT_ONCE pairs before it stores them.
    template <int THREADS, int AT_ONCE>
    __device__ void load(const PIXEL* images, long long plane, int width, Map image, int first_row,
                         int first_column, const float* mean, const float* std, float fourth) {
        float scale[3], offset[3];
#pragma unroll
        for (int channel = 0; channel < 3; ++channel) {
            scale[channel] = 1.f / std[channel];
            offset[channel] = -mean[channel] * scale[channel];
        }
        for (int begin = 0; begin < ROWS * PAIRS; begin += AT_ONCE * THREADS) {
            PIXEL values[AT_ONCE][2][3];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int index = begin + i * THREADS + threadIdx.x;
                const int row = first_row + index / PAIRS;
                const int column = first_column + index % PAIRS * 2;
                const PIXEL* source = images + static_cast<long long>(row) * width + column;
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const bool inside = image.has(row, column + k);
#pragma unroll
                    for (int channel = 0; channel < 3; ++channel) {
                        const PIXEL* value = source + channel * plane + k;
                        values[i][k][channel] = inside ? *value : static_cast<PIXEL>(0);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int index = begin + i * THREADS + threadIdx.x;
                if (index >= ROWS * PAIRS) break;
                const int row = first_row + index / PAIRS;
                const int column = first_column + index % PAIRS * 2;
                Pair pair;
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    float channels[3];
#pragma unroll
                    for (int channel = 0; channel < 3; ++channel) {
                        const float value = static_cast<float>(values[i][k][channel]);
                        channels[channel] = value * scale[channel] + offset[channel];
                    }
                    const bool inside = image.has(row, column + k);
                    const unsigned low = narrow_pair(channels[0], channels[1], VALUE{});
                    pair.values[2 * k] = inside ? low : 0;
                    pair.values[2 * k + 1] =
                        narrow_pair(inside ? channels[2] : 0.f, fourth, VALUE{});
                }
                pairs[index] = pair;
            }
        }
    }
};
