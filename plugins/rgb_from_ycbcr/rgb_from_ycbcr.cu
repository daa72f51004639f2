// Convert decoded JPEG planes to RGB. Specification: rgb_from_ycbcr/operation.py.
//
// A thread computes one pixel. Chroma planes of half the width or height are interpolated: the
// nearest sample has the weight 3, and its neighbour on the pixel's side the weight 1.
//
// Compile-time constants: CHANNELS.

struct Image {
    const unsigned char* luma;
    const unsigned char* chroma;
    unsigned char* rgb;
    long long height, width;
    long long chroma_height, chroma_width;
};

// Samples along one axis of a chroma plane that contribute to a pixel.
struct Samples {
    int nearest, neighbour;

    __device__ Samples(int place, bool halved, int count)
        : nearest(halved ? place / 2 : place),
          neighbour(halved ? min(max(nearest + 2 * (place % 2) - 1, 0), count - 1) : nearest) {}
};

__device__ unsigned char clamped(int value) { return min(max(value, 0), 255); }

extern "C" __global__ void rgb_from_ycbcr(const Image* __restrict__ images) {
    const int x = blockIdx.x * blockDim.x + threadIdx.x;
    const int y = blockIdx.y * blockDim.y + threadIdx.y;
    const Image image = images[blockIdx.z];
    if (x >= image.width || y >= image.height) return;
    const long long plane = image.height * image.width, pixel = y * image.width + x;
    const int luma = image.luma[pixel];
    if (!image.chroma_height) {
        for (int channel = 0; channel < CHANNELS; ++channel)
            image.rgb[channel * plane + pixel] = luma;
        return;
    }
    const bool halved_rows = image.chroma_height != image.height;
    const bool halved_columns = image.chroma_width != image.width;
    // libjpeg-turbo repeats samples in planes of one or two columns.
    const bool interpolated = !halved_columns || image.chroma_width > 2;
    const Samples row(y, halved_rows, image.chroma_height);
    const Samples column(x, halved_columns, image.chroma_width);

    int chroma[CHANNELS - 1];
    for (int index = 0; index < CHANNELS - 1; ++index) {
        const unsigned char* samples =
            image.chroma + index * image.chroma_height * image.chroma_width;
        const unsigned char* near_row = samples + row.nearest * image.chroma_width;
        const unsigned char* far_row = samples + row.neighbour * image.chroma_width;
        int value = near_row[column.nearest];
        if (interpolated && (halved_rows || halved_columns)) {
            // Without halved rows, both rows are the same, and likewise for columns.
            const int near_sum = 3 * value + far_row[column.nearest];
            const int far_sum = 3 * near_row[column.neighbour] + far_row[column.neighbour];
            const int sum = 3 * near_sum + far_sum;
            // Halves are rounded up and down alternately. If only one axis is halved, the sum is
            // four times the sum that libjpeg-turbo rounds.
            const int odd = halved_columns ? x % 2 : y % 2;
            const int half = halved_rows && halved_columns ? 8 - odd : 4 + 4 * odd;
            value = (sum + half) >> 4;
        }
        chroma[index] = value - 128;
    }

    // ITU-R BT.601 coefficients, rounded to 16 fractional bits.
    const int half = 1 << 15, blueness = chroma[0], redness = chroma[1];
    image.rgb[pixel] = clamped(luma + ((91881 * redness + half) >> 16));
    image.rgb[plane + pixel] =
        clamped(luma + ((half - 22554 * blueness - 46802 * redness) >> 16));
    image.rgb[2 * plane + pixel] = clamped(luma + ((116130 * blueness + half) >> 16));
}
