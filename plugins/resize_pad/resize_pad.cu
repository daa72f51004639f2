// Resize images into a padded batch. Specification: resize_pad/operation.py.
//
// Like Pillow, the kernels resize along one axis after the other, with integer weights, and round
// to 8 bits after each of the two passes. `resize_weights` computes the weights. A thread of
// `resize_pad` computes ROWS neighbouring output pixels of a column. Usually the first pass is
// along the rows. In this case, the thread resizes a source row only once, even if several of its
// output pixels need the row.
//
// Compile-time constants: CHANNELS, ROWS, WEIGHT_BITS (fractional bits of a weight).

struct Image {
    const unsigned char* pixels;
    long long channel_stride, row_stride, column_stride;
    long long height, width;
    long long resized_height, resized_width;
    // Whether the first pass is along the columns.
    long long vertical_first;
};

constexpr int HALF = 1 << (WEIGHT_BITS - 1);
// Axes of an image. Indices along the third axis of the table of weights: first source pixel,
// number of source pixels, and first weight.
enum { ROW_AXIS, COLUMN_AXIS, AXES };
enum { FIRST, COUNT, WEIGHTS };

__device__ int rounded(int sum) { return min(max((sum + HALF) >> WEIGHT_BITS, 0), 255); }

using Sums = int[CHANNELS];

// Add the channels of a source pixel, multiplied by the weight.
__device__ void add(Sums& sums, int weight, const unsigned char* pixel, long long stride) {
#pragma unroll
    for (int channel = 0; channel < CHANNELS; ++channel) {
        sums[channel] += weight * pixel[channel * stride];
    }
}

// Add the rounded result of the first pass, multiplied by the weight of the second pass.
__device__ void add(Sums& sums, int weight, const Sums& first_pass) {
#pragma unroll
    for (int channel = 0; channel < CHANNELS; ++channel) {
        sums[channel] += weight * rounded(first_pass[channel]);
    }
}

// The table is [images, AXES, WEIGHTS + taps, places]. For each place on an axis of a resized
// image, it has the index of the first source pixel that contributes, the number of such pixels,
// and their weights. A weight falls linearly with the distance between the centres of the pixels.
// Weights are computed in double precision and in Pillow's order of operations, so that they equal
// Pillow's.
extern "C" __global__ void resize_weights(const Image* __restrict__ images, int taps, int places,
                                          int* __restrict__ table) {
    const int place = blockIdx.x * blockDim.x + threadIdx.x, axis = blockIdx.y;
    const Image image = images[blockIdx.z];
    const int size = axis == ROW_AXIS ? image.height : image.width;
    const int resized = axis == ROW_AXIS ? image.resized_height : image.resized_width;
    if (place >= resized) return;
    const double scale = static_cast<double>(size) / resized, reach = scale < 1.0 ? 1.0 : scale;
    const double centre = (place + 0.5) * scale, step = 1.0 / reach;
    const int first = max(static_cast<int>(centre - reach + 0.5), 0);
    const int count = min(static_cast<int>(centre + reach + 0.5), size) - first;

    table += (static_cast<long long>(blockIdx.z) * AXES + axis) * (WEIGHTS + taps) * places + place;
    table[FIRST * places] = first;
    table[COUNT * places] = count;
    const auto weight = [&](int tap) {
        const double distance = (tap + first - centre + 0.5) * step;
        const double fall = distance < 0.0 ? -distance : distance;
        return fall < 1.0 ? 1.0 - fall : 0.0;
    };
    double total = 0.0;
    for (int tap = 0; tap < count; ++tap) total += weight(tap);
    for (int tap = 0; tap < count; ++tap) {
        const double share = total != 0.0 ? weight(tap) / total : weight(tap);
        table[(WEIGHTS + tap) * places] = static_cast<int>(0.5 + share * (1 << WEIGHT_BITS));
    }
}

extern "C" __global__ void resize_pad(const Image* __restrict__ images,
                                      const int* __restrict__ table, int taps, int places,
                                      int height, int width, unsigned char* __restrict__ batch) {
    const int x = blockIdx.x * blockDim.x + threadIdx.x;
    const int first_y = (blockIdx.y * blockDim.y + threadIdx.y) * ROWS;
    if (x >= width || first_y >= height) return;
    const Image image = images[blockIdx.z];
    const int resized_height = image.resized_height, resized_width = image.resized_width;
    int sums[ROWS][CHANNELS] = {};

    if (x < resized_width && first_y < resized_height) {
        const long long axis_size = static_cast<long long>(WEIGHTS + taps) * places;
        const int* rows = table + blockIdx.z * AXES * axis_size + first_y;
        const int* columns = table + (blockIdx.z * AXES + COLUMN_AXIS) * axis_size + x;
        const int left = columns[FIRST * places], column_count = columns[COUNT * places];
        // Rows of the batch beyond the resized image have no source rows.
        int firsts[ROWS], counts[ROWS], bottom = 0;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const bool inside = first_y + i < resized_height;
            firsts[i] = inside ? rows[FIRST * places + i] : 0;
            counts[i] = inside ? rows[COUNT * places + i] : 0;
            bottom = max(bottom, firsts[i] + counts[i]);
        }
        const unsigned char* corner = image.pixels + left * image.column_stride;
        if (image.vertical_first) {
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                for (int tap = 0; tap < column_count; ++tap) {
                    const unsigned char* source =
                        corner + tap * image.column_stride + firsts[i] * image.row_stride;
                    int pixel[CHANNELS] = {};
                    for (int row = 0; row < counts[i]; ++row) {
                        add(pixel, rows[(WEIGHTS + row) * places + i], source, image.channel_stride);
                        source += image.row_stride;
                    }
                    add(sums[i], columns[(WEIGHTS + tap) * places], pixel);
                }
            }
        } else {
            for (int row = firsts[0]; row < bottom; ++row) {
                const unsigned char* source = corner + row * image.row_stride;
                int pixel[CHANNELS] = {};
#pragma unroll 2
                for (int tap = 0; tap < column_count; ++tap) {
                    add(pixel, columns[(WEIGHTS + tap) * places], source, image.channel_stride);
                    source += image.column_stride;
                }
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    const int tap = row - firsts[i];
                    if (tap < 0 || tap >= counts[i]) continue;
                    add(sums[i], rows[(WEIGHTS + tap) * places + i], pixel);
                }
            }
        }
    }
    const long long plane = static_cast<long long>(height) * width;
    batch += blockIdx.z * CHANNELS * plane + static_cast<long long>(first_y) * width + x;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (first_y + i >= height) return;
#pragma unroll
        for (int channel = 0; channel < CHANNELS; ++channel) {
            batch[channel * plane + i * width] = rounded(sums[i][channel]);
        }
    }
}
