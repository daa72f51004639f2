// RoIAlign of ground-truth masks, one block per RoI. Contract: mask_targets/operation.py.
//
// Masks are pixels or run lengths. Run lengths are not decoded: a search finds the run of a sample.
//
// Compile-time constants: SIDE, THREADS.

constexpr long long FARTHEST = 0x7fffffffffffffffll;
// Side of a cell in pixels from which float32 does not distinguish the samples of the cell.
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

// Column of an image [height, width].
struct PixelColumn {
    const unsigned char* pixels;
    int width;

    __device__ float operator()(int row) {
        return pixels[static_cast<long long>(row) * width];
    }
};

struct Pixels {
    const unsigned char* pixels;
    int height, width;

    __device__ PixelColumn column(int index) const { return {pixels + index, width}; }
};

struct RunColumn;

// The runs of a mask are first .. last - 1. Pixels after the last run are background.
struct Runs {
    const long long* ends;
    long long first, last;
    int height, width;

    __device__ long long start(long long run) const { return run > 0 ? ends[run - 1] : 0; }

    __device__ long long end(long long run) const { return run < last ? ends[run] : FARTHEST; }

    __device__ RunColumn column(int index) const;
};

// Column of a run-length mask. It keeps the current run, so reading from top to bottom is fastest.
struct RunColumn {
    const Runs runs;
    long long top, run, start, end;

    __device__ float operator()(int row) {
        const long long position = top + row;
        while (position < start && run > runs.first) {
            end = start;
            start = runs.start(--run);
        }
        while (position >= end) {
            start = end;
            end = runs.end(++run);
        }
        // Runs of background come first.
        return run < runs.last && (run - runs.first) % 2 == 1 ? 1.0f : 0.0f;
    }
};

__device__ RunColumn Runs::column(int index) const {
    const long long top = start(first) + static_cast<long long>(index) * height;
    long long low = first, high = last;
    while (low < high) {
        const long long middle = (low + high) / 2;
        if (ends[middle] <= top) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return {*this, top, low, start(low), end(low)};
}

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

template <typename Mask>
__device__ float average(const Mask& mask, const Axis& columns, const Axis& rows, int cell) {
    const int row_cell = cell / SIDE, column_cell = cell % SIDE;
    const Span xs = nearby_samples(columns, column_cell), ys = nearby_samples(rows, row_cell);
    float sum = 0.0f;
    for (int i = xs.first; i < xs.end; ++i) {
        const Sample x = sample_at(columns, column_cell, i);
        if (!x.inside) continue;
        auto left = mask.column(x.low), right = mask.column(x.high);
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

template <typename Mask>
__device__ void write_targets(const Mask& mask, const float* box, bool owned, float* targets) {
    const Axis columns = axis_of(box[0], box[2], mask.width);
    const Axis rows = axis_of(box[1], box[3], mask.height);
    const bool empty = !owned || columns.samples == 0 || rows.samples == 0;
    for (int cell = threadIdx.x; cell < SIDE * SIDE; cell += THREADS) {
        targets[cell] = empty ? 0.0f : average(mask, columns, rows, cell);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
mask_targets_from_crops(const unsigned char* masks, const float* boxes, const long long* matched,
                        int rois, int instances, int height, int width, float* targets) {
    const long long roi = blockIdx.x, image = roi / rois, owner = matched[roi];
    const bool owned = owner >= 0 && owner < instances;
    const long long plane = image * instances + (owned ? owner : 0);
    const Pixels mask = {masks + plane * height * width, height, width};
    write_targets(mask, boxes + 4 * roi, owned, targets + roi * SIDE * SIDE);
}

extern "C" __global__ void __launch_bounds__(THREADS)
mask_targets_from_rle(const long long* ends, const long long* offsets, const long long* sizes,
                      const float* boxes, const long long* matched, int instances,
                      float* targets) {
    const long long roi = blockIdx.x, owner = matched[roi];
    const bool owned = owner >= 0 && owner < instances;
    Runs mask = {ends, 0, 0, 0, 0};
    if (owned) {
        const long long* size = sizes + 2 * owner;
        mask = {ends, offsets[owner], offsets[owner + 1], static_cast<int>(size[0]),
                static_cast<int>(size[1])};
    }
    write_targets(mask, boxes + 4 * roi, owned, targets + roi * SIDE * SIDE);
}
