// Gradient of pyramid_roi_align with respect to the features. Each block computes a tile of one
// map's gradient: it finds the RoIs that reach the tile, and adds their contributions in the order
// of the RoIs, so that results are reproducible. Compile-time constants are those of
// roi_sampling.cuh.
#include "roi_sampling.cuh"
#include "warp.cuh"

static_assert(CHANNELS_LAST, "neighbouring threads handle neighbouring channels");

#define MAP_PARAMETER(l) Feature* map##l

// A tile has as many rows and columns as a block has warps. A warp computes one row.
constexpr int SIDE = THREADS / WARP;
// RoIs per step. Their weights take up to 32 KiB of shared memory.
constexpr int ROIS_THAT_FIT = (32 << 10) / (2 * OUTPUT_SIZE * SIDE * sizeof(Real));
constexpr int STEP = ROIS_THAT_FIT < THREADS / (2 * SIDE) ? ROIS_THAT_FIT : THREADS / (2 * SIDE);
static_assert(STEP > 0, "OUTPUT_SIZE is too large");
enum Axis { ACROSS, DOWN };

// Part of a map's gradient: its level, first column and first row.
struct Tile {
    Map<Feature> map;
    int level, column, row;
};

// Pooled cells along one axis, from `first` up to but excluding `last`.
struct Span {
    int first, last;
};

struct Shared {
    // Indices of the RoIs that reach the tile, among THREADS candidates.
    int rois[THREADS];
    // Number of these RoIs that each warp found.
    int counts[SIDE];
    // Weights of the tile's pixels in the average of each pooled cell, by RoI and axis.
    Vector<Real, SIDE> weights[STEP][2][OUTPUT_SIZE];
    // By RoI: pooled cells that contribute to each row of the tile, and to any of its columns.
    Span rows[STEP][SIDE], columns[STEP];
};

__device__ int tiles_along(int size) { return (size + SIDE - 1) / SIDE; }

// Tile of the block; the grid counts the tiles of the finest level first.
__device__ Tile own_tile(const Map<Feature> (&maps)[LEVELS]) {
    Map<Feature> map = maps[0];
    int level = 0, tile = 0, before = 0;
#pragma unroll
    for (int l = 0; l < LEVELS; ++l) {
        if (static_cast<int>(blockIdx.x) >= before) {
            map = maps[l];
            level = l;
            tile = blockIdx.x - before;
        }
        before += tiles_along(maps[l].width) * tiles_along(maps[l].height);
    }
    const int columns = tiles_along(map.width);
    return {map, level, tile % columns * SIDE, tile / columns * SIDE};
}

// Whether samples between `start` and `start + length` may touch SIDE pixels from `first` on.
__device__ bool reaches(Real start, Real length, int first, int size) {
    const Real last = size - 1, end = start + length;
    const Real low = fmin(fmax(fmin(start, end), Real(0)), last);
    const Real high = fmin(fmax(fmax(start, end), Real(0)), last);
    return low < first + SIDE && high >= first - 1;
}

__device__ bool reaches(const Region& region, const Tile& tile) {
    return region.level == tile.level &&
           reaches(region.x, region.cell_width * OUTPUT_SIZE, tile.column, tile.map.width) &&
           reaches(region.y, region.cell_height * OUTPUT_SIZE, tile.row, tile.map.height);
}

// List the RoIs that reach the tile, of THREADS candidates from `first` on; return their number.
__device__ int list_rois(const float4* rois, int first, int count, const Tile& tile,
                         Shared& shared) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int candidate = first + threadIdx.x;
    const bool hit = candidate < count && reaches(region_of(rois[candidate]), tile);
    const unsigned hits = __ballot_sync(~0u, hit);
    if (lane == 0) shared.counts[warp] = __popc(hits);
    __syncthreads();
    int place = __popc(hits & ((1u << lane) - 1)), found = 0;
    for (int w = 0; w < SIDE; ++w) {
        if (w == warp) place += found;
        found += shared.counts[w];
    }
    if (hit) shared.rois[place] = candidate;
    __syncthreads();
    return found;
}

// Weight of a pixel in the average of a pooled cell, along one axis.
__device__ Real weight_of(Real start, Real cell_size, int cell, int count, int size, int pixel) {
    const auto samples = samples_of(start, cell_size, cell, count, size);
    Real weight = 0;
    for (int n = samples.first; n < samples.last; ++n) {
        const Tap tap = tap_of(samples, n, size);
        if (tap.low == pixel) weight += tap.low_weight;
        if (tap.high == pixel) weight += tap.high_weight;
    }
    return weight / max(count, 1);
}

// Compute the weights of up to STEP listed RoIs. Each thread computes the weights of one pixel
// along one axis.
__device__ void compute_weights(const float4* rois, const int* listed, int count, const Tile& tile,
                                Shared& shared) {
    const int slot = threadIdx.x / (2 * SIDE), pixel = threadIdx.x % SIDE;
    const bool down = threadIdx.x / SIDE % 2 == DOWN;
    Span span = {OUTPUT_SIZE, 0};
    if (slot < count) {
        const Region region = region_of(rois[listed[slot]]);
        const Real start = down ? region.y : region.x;
        const Real cell_size = down ? region.cell_height : region.cell_width;
        const int samples = down ? region.rows : region.columns;
        const int size = down ? tile.map.height : tile.map.width;
        const int own = (down ? tile.row : tile.column) + pixel;
        for (int cell = 0; cell < OUTPUT_SIZE; ++cell) {
            const Real weight = weight_of(start, cell_size, cell, samples, size, own);
            shared.weights[slot][down][cell].values[pixel] = weight;
            if (weight != 0) span = {min(span.first, cell), cell + 1};
        }
        if (down) shared.rows[slot][pixel] = span;
    }
#pragma unroll
    for (int distance = 1; distance < SIDE; distance *= 2) {
        span.first = min(span.first, __shfl_xor_sync(~0u, span.first, distance));
        span.last = max(span.last, __shfl_xor_sync(~0u, span.last, distance));
    }
    if (slot < count && !down && pixel == 0) shared.columns[slot] = span;
}

// Add a RoI's contribution to the warp's row of the tile. `pooled` is the gradient of the RoI's
// pooled features, from the thread's channels on.
__device__ void add_shares(const Feature* pooled, int slot, int channels, const Shared& shared,
                           Real (&sums)[SIDE][VECTOR]) {
    const int warp = threadIdx.x / WARP;
    const Span rows = shared.rows[slot][warp], columns = shared.columns[slot];
    for (int i = rows.first; i < rows.last; ++i) {
        const Real row_weight = shared.weights[slot][DOWN][i].values[warp];
#pragma unroll 2
        for (int j = columns.first; j < columns.last; ++j) {
            const Feature* cell = pooled + (i * OUTPUT_SIZE + j) * channels;
            const auto gradients = *reinterpret_cast<const Features*>(cell);
            const auto column_weights = shared.weights[slot][ACROSS][j];
#pragma unroll
            for (int x = 0; x < SIDE; ++x) {
                const Real weight = row_weight * column_weights.values[x];
                if (weight == 0) continue;
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) sums[x][v] += weight * widen(gradients.values[v]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
pyramid_roi_align_backward(const Feature* __restrict__ pooled, const float4* __restrict__ rois,
                           int channels, int rois_per_image, EACH_LEVEL(SIZE_PARAMETERS),
                           EACH_LEVEL(MAP_PARAMETER)) {
    __shared__ Shared shared;
    const Map<Feature> maps[LEVELS] = {EACH_LEVEL(MAP_OF_LEVEL)};
    const Tile tile = own_tile(maps);
    const int channel = (blockIdx.z * WARP + threadIdx.x % WARP) * VECTOR;
    const bool has_channels = channel < channels;
    const long long roi_size = static_cast<long long>(ALL_CELLS) * channels;
    rois += static_cast<long long>(blockIdx.y) * rois_per_image;
    pooled += blockIdx.y * rois_per_image * roi_size + channel;

    Real sums[SIDE][VECTOR] = {};
    for (int first = 0; first < rois_per_image; first += THREADS) {
        const int found = list_rois(rois, first, rois_per_image, tile, shared);
        for (int done = 0; done < found; done += STEP) {
            const int count = min(STEP, found - done);
            compute_weights(rois, shared.rois + done, count, tile, shared);
            __syncthreads();
            for (int slot = 0; slot < count && has_channels; ++slot) {
                const int roi = shared.rois[done + slot];
                add_shares(pooled + roi * roi_size, slot, channels, shared, sums);
            }
            __syncthreads();
        }
    }

    const int row = tile.row + static_cast<int>(threadIdx.x) / WARP;
    if (row >= tile.map.height || !has_channels) return;
    const long long before =
        (static_cast<long long>(blockIdx.y) * tile.map.height + row) * tile.map.width;
#pragma unroll
    for (int x = 0; x < SIDE; ++x) {
        const int column = tile.column + x;
        if (column >= tile.map.width) break;
        Features gradients;
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) narrow(sums[x][v], gradients.values[v]);
        Feature* pixel = tile.map.values + (before + column) * channels + channel;
        *reinterpret_cast<Features*>(pixel) = gradients;
    }
}
