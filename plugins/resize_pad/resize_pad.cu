// Resize images into a padded batch. Contract: resize_pad/operation.py.
//
// A thread computes all channels of one output pixel: the weighted mean of nearby source pixels.
// The weight of a source pixel falls linearly with its distance along each axis.
//
// Compile-time constants: CHANNELS.

struct Image {
    const unsigned char* pixels;
    long long channel_stride, row_stride, column_stride;
    long long height, width;
    long long resized_height, resized_width;
};

// Source pixels along one axis that contribute to a resized pixel, and their weights.
struct Window {
    float centre, sharpness;
    int begin, end;

    __device__ Window(int place, int size, int resized) {
        const float scale = static_cast<float>(size) / resized;
        const float reach = fmaxf(scale, 1.f);
        centre = scale * (place + 0.5f);
        sharpness = 1.f / reach;
        begin = max(static_cast<int>(centre - reach + 0.5f), 0);
        end = min(static_cast<int>(centre + reach + 0.5f), size);
    }

    __device__ float weight(int source) const {
        return fmaxf(1.f - fabsf(source + 0.5f - centre) * sharpness, 0.f);
    }
};

extern "C" __global__ void resize_pad(const Image* __restrict__ images, int height, int width,
                                      unsigned char* __restrict__ batch) {
    const int x = blockIdx.x * blockDim.x + threadIdx.x;
    const int y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= width || y >= height) return;

    const Image image = images[blockIdx.z];
    float sums[CHANNELS] = {}, total = 1.f;
    if (x < image.resized_width && y < image.resized_height) {
        const Window rows(y, image.height, image.resized_height);
        const Window columns(x, image.width, image.resized_width);
        total = 0.f;
        for (int row = rows.begin; row < rows.end; ++row) {
            const unsigned char* line = image.pixels + row * image.row_stride;
            for (int column = columns.begin; column < columns.end; ++column) {
                const unsigned char* pixel = line + column * image.column_stride;
                const float weight = rows.weight(row) * columns.weight(column);
                total += weight;
                for (int channel = 0; channel < CHANNELS; ++channel) {
                    sums[channel] += weight * pixel[channel * image.channel_stride];
                }
            }
        }
    }
    const long long plane = static_cast<long long>(height) * width;
    batch += blockIdx.z * CHANNELS * plane + static_cast<long long>(y) * width + x;
    for (int channel = 0; channel < CHANNELS; ++channel) {
        batch[channel * plane] = static_cast<unsigned char>(rintf(sums[channel] / total));
    }
}
