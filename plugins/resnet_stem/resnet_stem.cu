// Stem of a ResNet. Specification: resnet_stem/operation.py.
//
// A block computes a tile of pooled pixels. The normalised pixels that the tile needs lie in shared
// memory, four channels each. The fourth channel is zero. A row of a tensor-core matrix is 16
// neighbouring values in shared memory: four pixels, which are multiplied by four columns of the
// convolution's kernel. A warp computes two rows of the convolution, half of the channels at
// a time, so that two blocks fit on a multiprocessor: one loads or pools while the other
// multiplies.
//
// Compile-time constants: PIXEL (type of the images), VALUE (type of weights and output).
#include "stem_pixels.cuh"
#include "warp.cuh"

constexpr int WARPS = 8, THREADS = WARPS * WARP;
constexpr int CHANNELS = 64;
// Rows and columns of a tile of the convolution's output, and of the tile after pooling.
constexpr int ROWS = 2 * WARPS, COLUMNS = 32;
constexpr int POOLED_ROWS = ROWS / 2 - 1, POOLED_COLUMNS = COLUMNS / 2 - 1;
// Pixels that a tile needs; the matrices read one column more than the kernel has.
constexpr int PIXEL_ROWS = 2 * (ROWS - 1) + KERNEL, PIXEL_COLUMNS = 2 * (COLUMNS - 1) + KERNEL + 1;
constexpr int PAIRS_AT_ONCE = (PIXEL_ROWS * PIXEL_COLUMNS / 2 - 1) / THREADS + 1;
// Matrices of 16x16 pixel values and of 16x8 weights, and their numbers per warp.
constexpr int MATRIX = 16, MATRIX_COLUMNS = 8;
constexpr int PIXEL_MATRICES = 2 * COLUMNS / MATRIX, WEIGHT_MATRICES = CHANNELS / 2 / MATRIX_COLUMNS;
// Number of channels that are pooled at a time. Distance between neighbouring pixels in shared
// memory, in values, which avoids bank conflicts.
constexpr int PART = 2 * MATRIX_COLUMNS, DISTANCE = PART + 8;

// Load four matrices of 8x8 values. In each lane, `row` is the address of one of their 32 rows.
__device__ void load_matrix(unsigned (&matrix)[4], const void* row) {
    const auto address = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(address)
                 : "memory");
}

// Store the warp's results for PART channels after bias and ReLU. Outside of the map, store zeros.
// They do not change the maximum, because no value is less than 0.
__device__ void store_maps(const float (&sums)[PIXEL_MATRICES][WEIGHT_MATRICES][4], int part,
                           const VALUE* bias, Map hidden, int first_row, int first_column,
                           VALUE* maps) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int index = 0; index < 2 * PIXEL_MATRICES; ++index) {
        const int m = index / 2, half = index % 2;
        const int row = 2 * warp + m / 2, column = MATRIX * (m % 2) + 8 * half + lane / 4;
        const bool inside = hidden.has(first_row + row, first_column + column);
        VALUE* target = maps + (row * COLUMNS + column) * DISTANCE + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < PART / MATRIX_COLUMNS; ++n) {
            const VALUE* offset = bias + MATRIX_COLUMNS * n + 2 * (lane % 4);
            const float* pair = sums[m][part * PART / MATRIX_COLUMNS + n] + 2 * half;
            const unsigned bits =
                relu_pair(pair[0] + widen(offset[0]), pair[1] + widen(offset[1]), VALUE{});
            *reinterpret_cast<unsigned*>(target + MATRIX_COLUMNS * n) = inside ? bits : 0;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
resnet_stem(const PIXEL* __restrict__ images, const long long* __restrict__ image_sizes,
            const uint4* __restrict__ weight, const VALUE* __restrict__ bias,
            const float* __restrict__ mean, const float* __restrict__ std, int height, int width,
            VALUE* __restrict__ output) {
    __shared__ PixelTile<PIXEL_ROWS, PIXEL_COLUMNS> pixels;
    __shared__ alignas(16) VALUE maps[ROWS * COLUMNS * DISTANCE];
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const int pooled_row = blockIdx.y * POOLED_ROWS, pooled_column = blockIdx.x * POOLED_COLUMNS;
    // First row and column of the tile of the convolution.
    const int first_row = 2 * pooled_row - 1, first_column = 2 * pooled_column - 1;
    const Map size = {height, width}, hidden = size.halved(), pooled = hidden.halved();
    // Clamp the sizes, so that loads do not read beyond the padded images.
    const Map image = {min(static_cast<int>(image_sizes[2 * blockIdx.z]), height),
                       min(static_cast<int>(image_sizes[2 * blockIdx.z + 1]), width)};
    const long long plane = static_cast<long long>(height) * width;
    images += 3 * plane * blockIdx.z;
    pixels.load<THREADS, PAIRS_AT_ONCE>(images, plane, width, image,
                                        2 * first_row - KERNEL / 2, 2 * first_column - KERNEL / 2,
                                        mean, std, 0.f);
    __syncthreads();

    // Rows of a matrix are neighbouring pixels of the convolution, two pixels apart in the image.
    const auto* matrix_row = pixels.at(4 * warp, 2 * (lane % MATRIX) + 2 * (lane / MATRIX));
    // Pooled pixel and channels of this thread.
    const int own_channel = 8 * (thread % 2), own_column = thread / 2 % POOLED_COLUMNS;
    const int own_row = thread / 2 / POOLED_COLUMNS;
    const bool pools = own_row < POOLED_ROWS &&
                       pooled.has(pooled_row + own_row, pooled_column + own_column);
    const long long line =
        static_cast<long long>(blockIdx.z) * pooled.height + pooled_row + own_row;
    output += (line * pooled.width + pooled_column + own_column) * CHANNELS + own_channel;

#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        float sums[PIXEL_MATRICES][WEIGHT_MATRICES][4] = {};
#pragma unroll
        for (int step = 0; step < 2 * KERNEL; ++step) {
            uint4 b[WEIGHT_MATRICES / 2];
#pragma unroll
            for (int n = 0; n < WEIGHT_MATRICES / 2; ++n) {
                b[n] = weight[((2 * step + half) * WEIGHT_MATRICES / 2 + n) * WARP + lane];
            }
#pragma unroll
            for (int m = 0; m < PIXEL_MATRICES; ++m) {
                const int row = 2 * (m / 2) + step / 2;
                const int column = 2 * MATRIX * (m % 2) + 4 * (step % 2);
                unsigned a[4];
                load_matrix(a, matrix_row + (row * PIXEL_COLUMNS + column) / 2);
#pragma unroll
                for (int n = 0; n < WEIGHT_MATRICES / 2; ++n) {
                    multiply_add(sums[m][2 * n], a, b[n].x, b[n].y, VALUE{});
                    multiply_add(sums[m][2 * n + 1], a, b[n].z, b[n].w, VALUE{});
                }
            }
        }
#pragma unroll
        for (int part = 0; part < CHANNELS / 2 / PART; ++part) {
            const int first_channel = half * CHANNELS / 2 + part * PART;
            __syncthreads();
            store_maps(sums, part, bias + first_channel, hidden, first_row, first_column, maps);
            __syncthreads();
            if (!pools) continue;
            Vector<unsigned, 4> largest = {};
#pragma unroll
            for (int neighbour = 0; neighbour < 9; ++neighbour) {
                const int row = 2 * own_row + neighbour / 3, column = 2 * own_column + neighbour % 3;
                const VALUE* source = maps + (row * COLUMNS + column) * DISTANCE + own_channel;
                const auto words = *reinterpret_cast<const Vector<unsigned, 4>*>(source);
                for (int i = 0; i < 4; ++i) {
                    // Compared as signed integers, the bits of numbers that are not negative have
                    // the order of the numbers. NaN is the largest, a negative zero the smallest.
                    largest.values[i] = __vmaxs2(largest.values[i], words.values[i]);
                }
            }
            *reinterpret_cast<Vector<unsigned, 4>*>(output + first_channel) = largest;
        }
    }
}
