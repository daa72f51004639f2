// Rasterise polygons within RoIs, one block per RoI.
// Specification: polygon_mask_targets/operation.py.
//
// pycocotools walks along the edges of a ring on a grid five times as fine as the pixels. Where an
// edge crosses from one column of pixels to the next, pycocotools records the row. This kernel
// computes the rows without walking. Each crossing toggles the pixels of its column from its row
// downwards.
//
// Compile-time constants: REACH (limit of corner coordinates in pixels), SIDE, THREADS.

constexpr int FINE = 5;
// An edge crosses the middle of column c between fine columns 5 c + 2 and 5 c + 3.
constexpr int MIDDLE = FINE / 2;
constexpr int WORD = 32;
constexpr int WORDS = (SIDE + WORD - 1) / WORD;

struct Point {
    int x, y;
};

// Mapping from image pixels to the fine grid, in double precision as on a CPU.
struct Frame {
    double left, top, x_scale, y_scale;

    __device__ int fine(double coordinate, double origin, double scale) const {
        const double reach = REACH;
        const double cells = fmin(fmax((coordinate - origin) * scale, -reach), reach);
        return static_cast<int>(FINE * cells + 0.5);
    }

    __device__ Point operator()(const float* vertex) const {
        return {fine(vertex[0], left, x_scale), fine(vertex[1], top, y_scale)};
    }
};

// Coordinate along an edge's shorter axis after `steps` steps along its longer axis.
__device__ int after_steps(int start, double slope, int steps) {
    return static_cast<int>(start + slope * steps + 0.5);
}

// Return the row of the fine grid at which an edge crosses from column `x` of that grid to the next
// column. If the edge changes its row at this crossing, return the upper row. A flat edge (at
// least as wide as high) must go right, and a steep edge down.
__device__ int passage(Point from, Point to, int x) {
    const int width = to.x - from.x, height = to.y - from.y;
    if (abs(width) >= abs(height)) {
        const double slope = static_cast<double>(height) / width;
        const int steps = x - from.x;
        return min(after_steps(from.y, slope, steps), after_steps(from.y, slope, steps + 1));
    }
    // Binary search for the first step that ends on the other side of the crossing.
    const double slope = static_cast<double>(width) / height;
    int before = 0, after = height;
    while (after - before > 1) {
        const int middle = (before + after) / 2;
        const bool right = after_steps(from.x, slope, middle) > x;
        (right == (width > 0) ? after : before) = middle;
    }
    return from.y + before;
}

__device__ void toggle_passages(Point from, Point to, unsigned (&toggles)[SIDE][WORDS]) {
    const bool flat = abs(to.x - from.x) >= abs(to.y - from.y);
    if (flat ? from.x > to.x : from.y > to.y) {
        const Point start = from;
        from = to;
        to = start;
    }
    const int left = min(from.x, to.x), right = max(from.x, to.x);
    int column = left <= MIDDLE ? 0 : (left - MIDDLE + FINE - 1) / FINE;
    for (; column < SIDE && FINE * column + MIDDLE < right; ++column) {
        const int fine = passage(from, to, FINE * column + MIDDLE);
        const int row = fine <= MIDDLE ? 0 : (fine - MIDDLE + FINE - 1) / FINE;
        if (row < SIDE) atomicXor(&toggles[column][row / WORD], 1u << row % WORD);
    }
}

// Add pixels of a column to `covered`: those for which the number of toggles in their row and all
// rows above is odd. Clear the toggles.
__device__ void cover(unsigned (&toggles)[WORDS], unsigned (&covered)[WORDS]) {
    unsigned carry = 0;
    for (int word = 0; word < WORDS; ++word) {
        unsigned parity = toggles[word];
        for (int distance = 1; distance < WORD; distance *= 2) parity ^= parity << distance;
        parity ^= carry;
        carry = parity >> (WORD - 1) ? 0xffffffffu : 0u;
        covered[word] |= parity;
        toggles[word] = 0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
mask_targets_from_polygons(const float* vertices, const long long* ring_offsets,
                           const long long* instance_offsets, const float* boxes,
                           const long long* matched, int instances, float* targets) {
    __shared__ unsigned toggles[SIDE][WORDS], covered[SIDE][WORDS];

    const int thread = threadIdx.x;
    const long long roi = blockIdx.x, owner = matched[roi];
    const float* box = boxes + 4 * roi;
    const bool finite =
        isfinite(box[0]) && isfinite(box[1]) && isfinite(box[2]) && isfinite(box[3]);
    const double width = fmax(static_cast<double>(box[2]) - box[0], 1.0);
    const double height = fmax(static_cast<double>(box[3]) - box[1], 1.0);
    const Frame frame = {box[0], box[1], SIDE / width, SIDE / height};
    for (int column = thread; column < SIDE; column += THREADS) {
        for (int word = 0; word < WORDS; ++word) toggles[column][word] = covered[column][word] = 0;
    }
    __syncthreads();

    if (finite && owner >= 0 && owner < instances) {
        for (long long ring = instance_offsets[owner]; ring < instance_offsets[owner + 1]; ++ring) {
            const long long first = ring_offsets[ring], last = ring_offsets[ring + 1] - 1;
            for (long long corner = first + thread; corner <= last; corner += THREADS) {
                const long long next = corner == last ? first : corner + 1;
                toggle_passages(frame(vertices + 2 * corner), frame(vertices + 2 * next), toggles);
            }
            __syncthreads();
            for (int column = thread; column < SIDE; column += THREADS) {
                cover(toggles[column], covered[column]);
            }
            __syncthreads();
        }
    }

    targets += roi * SIDE * SIDE;
    for (int cell = thread; cell < SIDE * SIDE; cell += THREADS) {
        const int row = cell / SIDE, column = cell % SIDE;
        targets[cell] = covered[column][row / WORD] >> row % WORD & 1u;
    }
}
