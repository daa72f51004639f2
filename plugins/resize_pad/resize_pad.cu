// Resize images into a padded batch. Contract: resize_pad/operation.py.
//
// A pixel of the resized image is the weighted mean of nearby source pixels. The weight of a source
// pixel falls linearly with its distance along each axis. A thread computes ROWS neighbouring output
// pixels of a column, and resizes each source row that they need along the columns only once.
//
// Compile-time constants: CHANNELS, ROWS.

struct Image {
    const unsigned char* pixels;
    long long channel_stride, row_stride, column_stride;
    long long height, width;
    long long resized_height, resized_width;
};

// Weights of source pixels along one axis.
struct Axis {
    int size;
    // Quotient of the sizes before and after resizing, distance in source pixels at which a weight
    // is zero, and fall of a weight per source pixel.
    float scale, reach, step;

    __device__ Axis(int size, int resized)
        : size(size), scale(static_cast<float>(size) / resized), reach(fmaxf(scale, 1.f)),
          step(1.f / reach) {}

    __device__ float centre(int place) const { return scale * (place + 0.5f); }
    // First of the source pixels that contribute to a resized pixel, and the end of them.
    __device__ int begin(int place) const {
        return max(static_cast<int>(centre(place) - reach + 0.5f), 0);
    }
    __device__ int end(int place) const {
        return min(static_cast<int>(centre(place) + reach + 0.5f), size);
    }
    __device__ float weight(int source, float centre) const {
        return fmaxf(1.f - fabsf(source + 0.5f - centre) * step, 0.f);
    }
};

extern "C" __global__ void resize_pad(const Image* __restrict__ images, int height, int width,
                                      unsigned char* __restrict__ batch) {
    const int x = blockIdx.x * blockDim.x + threadIdx.x;
    const int first_y = (blockIdx.y * blockDim.y + threadIdx.y) * ROWS;
    if (x >= width || first_y >= height) return;
    const Image image = images[blockIdx.z];
    const int resized_height = image.resized_height, resized_width = image.resized_width;
    // Weighted sums of the pixels, and sums of their weights.
    float sums[ROWS][CHANNELS] = {}, totals[ROWS] = {};

    if (x < resized_width && first_y < resized_height) {
        const Axis rows(image.height, resized_height), columns(image.width, resized_width);
        const float column_centre = columns.centre(x);
        const int left = columns.begin(x), right = columns.end(x);
        const int bottom = rows.end(min(first_y + ROWS, resized_height) - 1);
        for (int row = rows.begin(first_y); row < bottom; ++row) {
            const unsigned char* source =
                image.pixels + row * image.row_stride + left * image.column_stride;
            float pixel[CHANNELS] = {}, total = 0.f;
#pragma unroll 2
            for (int column = left; column < right; ++column) {
                const float weight = columns.weight(column, column_centre);
                total += weight;
#pragma unroll
                for (int channel = 0; channel < CHANNELS; ++channel) {
                    pixel[channel] += weight * source[channel * image.channel_stride];
                }
                source += image.column_stride;
            }
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const float weight = rows.weight(row, rows.centre(first_y + i));
                totals[i] += weight * total;
#pragma unroll
                for (int channel = 0; channel < CHANNELS; ++channel) {
                    sums[i][channel] += weight * pixel[channel];
                }
            }
        }
    }
    const long long plane = static_cast<long long>(height) * width;
    batch += blockIdx.z * CHANNELS * plane + static_cast<long long>(first_y) * width + x;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (first_y + i >= height) return;
        const bool inside = x < resized_width && first_y + i < resized_height;
        const float factor = inside ? 1.f / totals[i] : 0.f;
#pragma unroll
        for (int channel = 0; channel < CHANNELS; ++channel) {
            batch[channel * plane + i * width] =
                static_cast<unsigned char>(rintf(sums[i][channel] * factor));
        }
    }
}
