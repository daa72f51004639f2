// RoIAlign of ground-truth masks, one block per RoI. Specification: mask_targets/operation.py.
//
// Compile-time constants: SIDE, THREADS.

// If a cell is at least this many pixels wide or high, float32 does not distinguish its samples.
constexpr float TOO_LARGE = 16777216.0f;

// Extent of a RoI along one axis, in pixels of the mask.
struct Axis {
    float start, cell;
    // Samples per cell; 0: the target is zero.
    int samples;
    int size;
};

struct Span {
    int first, end;
};

struct Sample {
    bool inside;
    int low, high;
    float fraction;
};

// Column of a mask [height, width].
struct Column {
    const unsigned char* pixels;
    int width;

    __device__ float operator()(int row) const {
        return pixels[static_cast<long long>(row) * width];
    }
};

// A RoI is at least one pixel wide and high. A cell has as many samples per axis as it spans
// pixels, rounded up.
__device__ Axis axis_of(float near, float far, int size) {
    const float cell = fmaxf(far - near, 1.0f) / SIDE;
    const bool measurable = isfinite(near) && isfinite(far) && cell < TOO_LARGE && size > 0;
    return {near, cell, measurable ? static_cast<int>(ceilf(cell)) : 0, size};
}

// Range of a cell's samples that may lie on the mask. In a huge RoI, most do not.
__device__ Span nearby_samples(const Axis& axis, int cell) {
    const float start = axis.start + cell * axis.cell;
    const float step = axis.cell / axis.samples;
    const float before = floorf((-1.0f - start) / step) - 1.0f;
    const float after = ceilf((axis.size - start) / step) + 1.0f;
    const float count = axis.samples;
    return {static_cast<int>(fminf(fmaxf(before, 0.0f), count)),
            static_cast<int>(fminf(fmaxf(after, 0.0f), count))};
}

__device__ Sample sample_at(const Axis& axis, int cell, int index) {
    float source = axis.start + cell * axis.cell + (index + 0.5f) * axis.cell / axis.samples;
    const bool inside = source >= -1.0f && source <= axis.size;
    source = fmaxf(source, 0.0f);
    const int low = static_cast<int>(source);
    if (low >= axis.size - 1) return {inside, axis.size - 1, axis.size - 1, 0.0f};
    return {inside, low, low + 1, source - low};
}

__device__ float average(const unsigned char* mask, const Axis& columns, const Axis& rows,
                         int cell) {
    const int row_cell = cell / SIDE, column_cell = cell % SIDE;
    const Span xs = nearby_samples(columns, column_cell), ys = nearby_samples(rows, row_cell);
    float sum = 0.0f;
    for (int i = xs.first; i < xs.end; ++i) {
        const Sample x = sample_at(columns, column_cell, i);
        if (!x.inside) continue;
        const Column left = {mask + x.low, columns.size}, right = {mask + x.high, columns.size};
        for (int j = ys.first; j < ys.end; ++j) {
            const Sample y = sample_at(rows, row_cell, j);
            if (!y.inside) continue;
            const float above = left(y.low) * (1.0f - x.fraction) + right(y.low) * x.fraction;
            const float below = left(y.high) * (1.0f - x.fraction) + right(y.high) * x.fraction;
            sum += above * (1.0f - y.fraction) + below * y.fraction;
        }
    }
    return sum / (static_cast<float>(columns.samples) * static_cast<float>(rows.samples));
}

extern "C" __global__ void __launch_bounds__(THREADS)
mask_targets_from_crops(const unsigned char* masks, const float* boxes, const long long* matched,
                        int rois, int instances, int height, int width, float* targets) {
    const long long roi = blockIdx.x, image = roi / rois, owner = matched[roi];
    const bool owned = owner >= 0 && owner < instances;
    const long long plane = image * instances + (owned ? owner : 0);
    const unsigned char* mask = masks + plane * height * width;
    const float* box = boxes + 4 * roi;
    const Axis columns = axis_of(box[0], box[2], width);
    const Axis rows = axis_of(box[1], box[3], height);
    const bool empty = !owned || columns.samples == 0 || rows.samples == 0;
    for (int cell = threadIdx.x; cell < SIDE * SIDE; cell += THREADS) {
        targets[roi * SIDE * SIDE + cell] = empty ? 0.0f : average(mask, columns, rows, cell);
    }
}
