// Stem of a ResNet on GPUs of compute capability 9.0. Specification: resnet_stem/operation.py.
//
// A block computes a tile of pooled pixels, each warpgroup some rows of it. The normalised pixels
// that the tile needs lie in shared memory, four channels each. The fourth channel is 1, and its
// weight is the bias. A matrix product reads the pixels in place: row i of its first matrix is the
// four pixels from pixel 2 * i of an image row on, so that rows overlap. Its second matrix is the
// weights of four neighbouring columns of the convolution's kernel. 14 products give 64 pixels of a
// row of the convolution. Three such rows are pooled vertically in registers, then horizontally in
// shared memory.
//
// Compile-time constants: PIXEL (type of the images), VALUE (type of weights and output).
#include "stem_pixels.cuh"
#include "warp.cuh"
#include "warpgroup.cuh"

constexpr int GROUPS = 2, THREADS = GROUPS * WARPGROUP;
constexpr int CHANNELS = 64;
// Pooled rows per warpgroup. Columns of a tile of the convolution, before and after pooling.
constexpr int POOLED_ROWS = 5, COLUMNS = 64, POOLED_COLUMNS = COLUMNS / 2 - 1;
constexpr int ROWS = 2 * GROUPS * POOLED_ROWS + 1;
// Pixels that a tile needs; the products read one column more than the kernel has.
constexpr int PIXEL_ROWS = 2 * (ROWS - 1) + KERNEL, PIXEL_COLUMNS = 2 * (COLUMNS - 1) + KERNEL + 1;
// Pairs of pixels that a thread loads at once.
constexpr int PAIRS_AT_ONCE = 7;
// Matrix products per row of the convolution, and bytes of the weights of each.
constexpr int STEPS = 2 * KERNEL, WEIGHT_BYTES = CHANNELS * 16 * sizeof(VALUE);
constexpr int BLOCK_BYTES = 128, PIXEL_BYTES = 4 * sizeof(VALUE);
// Distance between neighbouring pixels that are pooled in shared memory, in values. It avoids bank
// conflicts.
constexpr int DISTANCE = CHANNELS + 8;

// Words of a row of the convolution that a thread holds, two channels each.
constexpr int WORDS = 16;

struct Shared {
    PixelTile<PIXEL_ROWS, PIXEL_COLUMNS> pixels;
    alignas(16) unsigned weights[STEPS][WEIGHT_BYTES / sizeof(unsigned)];
    alignas(16) VALUE maps[GROUPS][COLUMNS * DISTANCE];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host allocates the shared memory of a block");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Store the weights as blocks of 8 output channels x 8 values. A word of `weight` holds two values
// of a channel; the four words of a uint4 belong to four blocks.
__device__ void load_weights(const uint4* weight, unsigned* blocks) {
    for (int index = threadIdx.x; index < STEPS * CHANNELS * 16 / 8; index += THREADS) {
        const uint4 words = weight[index];
        unsigned* block = blocks + index / WARP * 4 * WARP + index % WARP;
        block[0 * WARP] = words.x;
        block[1 * WARP] = words.y;
        block[2 * WARP] = words.z;
        block[3 * WARP] = words.w;
    }
}

// Queue the products of a row of the convolution.
__device__ void queue_row(float (&sums)[2 * WORDS], const Shared& shared, int row) {
    SharedMatrix pixels(shared.pixels.at(2 * row, 0), 2 * PIXEL_BYTES, BLOCK_BYTES);
    SharedMatrix weights(shared.weights, BLOCK_BYTES, 2 * BLOCK_BYTES);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        queue_product(sums, pixels, weights, step > 0, VALUE{});
        pixels.move(step % 2 ? (PIXEL_COLUMNS - 4) * PIXEL_BYTES : 4 * PIXEL_BYTES);
        weights.move(WEIGHT_BYTES);
    }
}

// Return the maxima of three words of two 16-bit numbers each. Compared as signed integers, the
// bits of numbers that are not negative have the order of the numbers. NaN is the largest, a
// negative zero the smallest.
__device__ unsigned largest_of(unsigned a, unsigned b, unsigned c) {
    return __vimax3_s16x2(a, b, c);
}

// Two channels of a row of the convolution, after ReLU.
__device__ unsigned word_of(const float (&sums)[2 * WORDS], int word) {
    return relu_pair(sums[2 * word], sums[2 * word + 1], VALUE{});
}

// Pool a vertically pooled row horizontally, and store the first `columns` pixels.
__device__ void store_pooled(const VALUE* maps, int columns, VALUE* output) {
    constexpr int PARTS = CHANNELS / 8;
    for (int item = threadIdx.x % WARPGROUP; item < columns * PARTS; item += WARPGROUP) {
        const VALUE* source = maps + item / PARTS * 2 * DISTANCE + item % PARTS * 8;
        Vector<unsigned, 4> words[3];
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            words[i] = *reinterpret_cast<const Vector<unsigned, 4>*>(source + i * DISTANCE);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            words[0].values[i] =
                largest_of(words[0].values[i], words[1].values[i], words[2].values[i]);
        }
        reinterpret_cast<Vector<unsigned, 4>*>(output)[item] = words[0];
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 2)
resnet_stem_sm90(const PIXEL* __restrict__ images, const long long* __restrict__ image_sizes,
                 const uint4* __restrict__ weight, const VALUE* __restrict__ bias,
                 const float* __restrict__ mean, const float* __restrict__ std, int height,
                 int width, VALUE* __restrict__ output) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x % WARPGROUP / WARP;
    // The shuffle tells the compiler that the index is the same in a warp.
    const int group = __shfl_sync(ALL_LANES, threadIdx.x / WARPGROUP, 0);
    const int pooled_column = blockIdx.x * POOLED_COLUMNS;
    // First row and column of the tile of the convolution.
    const int first_row = 2 * GROUPS * POOLED_ROWS * blockIdx.y - 1;
    const int first_column = 2 * pooled_column - 1;
    const Map size = {height, width}, hidden = size.halved(), pooled = hidden.halved();
    // Clamp the sizes, so that loads do not read beyond the padded images.
    const Map image = {min(static_cast<int>(image_sizes[2 * blockIdx.z]), height),
                       min(static_cast<int>(image_sizes[2 * blockIdx.z + 1]), width)};
    const long long plane = static_cast<long long>(height) * width;
    images += 3 * plane * blockIdx.z;
    load_weights(weight, shared.weights[0]);
    shared.pixels.load<THREADS, PAIRS_AT_ONCE>(images, plane, width, image,
                                               2 * first_row - KERNEL / 2,
                                               2 * first_column - KERNEL / 2, mean, std, 1.f);
    __syncthreads();
    if (threadIdx.x < CHANNELS) {
        // Store the bias as the fourth value of the channel's row in the first product.
        auto* blocks = reinterpret_cast<VALUE*>(shared.weights);
        blocks[(threadIdx.x / 8 * 2 * 8 + threadIdx.x % 8) * 8 + 3] = bias[threadIdx.x];
    }
    publish_to_products();
    __syncthreads();

    // First of the two columns of the tile that this thread holds; the other is 8 columns later.
    const int own_column = 16 * warp + lane / 4;
    const bool inside[2] = {hidden.has(0, first_column + own_column),
                            hidden.has(0, first_column + own_column + 8)};
    VALUE* maps = shared.maps[group];
    float sums[2][2 * WORDS];
    // Latest row of the convolution, which the next pooled row needs again. A row above the map is
    // zero, which does not change a maximum.
    unsigned last[WORDS] = {};
    int row = 2 * group * POOLED_ROWS;
    if (first_row + row >= 0) {
        start_products();
        queue_row(sums[1], shared, row);
        end_products();
        wait_for_sums(sums[1]);
#pragma unroll
        for (int word = 0; word < WORDS; ++word) last[word] = word_of(sums[1], word);
    }
    for (int i = 0; i < POOLED_ROWS; ++i, row += 2) {
        const int pooled_row = (GROUPS * blockIdx.y + group) * POOLED_ROWS + i;
        if (pooled_row >= pooled.height) break;
        start_products();
        queue_row(sums[0], shared, row + 1);
        queue_row(sums[1], shared, row + 2);
        end_products();
        wait_for_sums(sums[0]);
        wait_for_sums(sums[1]);
        const bool has_next = first_row + row + 2 < hidden.height;
#pragma unroll
        for (int word = 0; word < WORDS; ++word) {
            const unsigned next = has_next ? word_of(sums[1], word) : 0;
            const unsigned largest = largest_of(last[word], word_of(sums[0], word), next);
            const int place = (own_column + 8 * (word % 2)) * DISTANCE + 8 * (word / 2);
            *reinterpret_cast<unsigned*>(maps + place + 2 * (lane % 4)) =
                inside[word % 2] ? largest : 0;
            last[word] = next;
        }
        synchronise_warpgroup(1 + group);
        const long long line = static_cast<long long>(blockIdx.z) * pooled.height + pooled_row;
        store_pooled(maps, min(POOLED_COLUMNS, pooled.width - pooled_column),
                     output + (line * pooled.width + pooled_column) * CHANNELS);
        synchronise_warpgroup(1 + group);
    }
#else
    // Operations launch this kernel only on GPUs for which it is compiled.
    __trap();
#endif
}
