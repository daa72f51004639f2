// Mask probabilities pasted into images and encoded as COCO run lengths, one block an instance;
// plugins/paste_rle.py has the contract.
//
// Only pixels within the box are looked at: the columns of the box one after another, each closed
// by a pixel of background unless the next column follows on directly in the image. A thread takes
// 32 of these pixels at a time, whose values are the bits of a word; where neighbouring bits differ
// a run ends. Scans over the block say how many runs ended before, and where the last did.
//
// Constants: EXACT (0: boxes of whole pixels), PROBABILITY (type), SIDE, THREADS, THRESHOLD.

#include "numeric.cuh"

constexpr int WARP = 32;
constexpr int WARPS = THREADS / WARP;
constexpr unsigned ALL_LANES = 0xffffffffu;
// The mask between zeros.
constexpr int BORDERED = SIDE + 2;
// Single precision knows all whole pixels up to here.
constexpr float FARTHEST = 16777216.0f;
static_assert(THREADS % WARP == 0, "threads are used by the warp");

// The pixels of an axis that the box, border included, covers.
struct Axis {
    int first, count;
    // From pixels to samples of the bordered mask.
    float shift, scale;
};

struct Sample {
    int low, high;
    float fraction;
};

// Operations and their order are those of the implementations that share the contract, in single
// and double precision as there: a mask's edge must not move by a pixel.
__device__ Axis covered_pixels(float near, float far, int size) {
    if (!(fabsf(near) <= FARTHEST && fabsf(far) <= FARTHEST)) return {0, 0, 0.0f, 1.0f};
    int first, end;
    Axis axis;
    if constexpr (EXACT) {
        const double cell = (static_cast<double>(far) - near) / SIDE;
        if (!(cell > 0.0)) return {0, 0, 0.0f, 1.0f};
        first = static_cast<int>(floor(near - cell));
        end = static_cast<int>(ceil(far + cell));
        axis.shift = static_cast<float>(0.5 - near);
        axis.scale = static_cast<float>(cell);
    } else {
        constexpr float EXPANSION = static_cast<float>(static_cast<double>(BORDERED) / SIDE);
        const float centre = (far + near) * 0.5f;
        const float half = (far - near) * 0.5f * EXPANSION;
        first = static_cast<int>(centre - half);
        end = static_cast<int>(centre + half) + 1;
        axis.shift = static_cast<float>(first);
        axis.scale = static_cast<float>(BORDERED) / static_cast<float>(max(end - first, 1));
    }
    axis.first = max(first, 0);
    axis.count = max(min(end, size) - axis.first, 0);
    return axis;
}

__device__ Sample sample_at(const Axis& axis, int index) {
    const float pixel = static_cast<float>(axis.first + index);
    float source;
    if constexpr (EXACT) {
        source = (pixel + axis.shift) / axis.scale + 0.5f;
    } else {
        source = (pixel - axis.shift + 0.5f) * axis.scale - 0.5f;
    }
    source = fminf(fmaxf(source, 0.0f), BORDERED - 1.0f);
    const int low = static_cast<int>(source);
    return {low, min(low + 1, BORDERED - 1), source - static_cast<float>(low)};
}

__device__ float between(float low, float high, float fraction) {
    return low * (1.0f - fraction) + high * fraction;
}

// Values of 32 pixels of the closed columns, the first in the lowest bit.
__device__ unsigned values_from(int index, int stride, const Axis& columns, const Axis& rows,
                                const float (&mask)[BORDERED][BORDERED]) {
    unsigned bits = 0;
    int column = index / stride, row = index % stride;
    Sample x = sample_at(columns, column);
    int loaded = -1;
    float low = 0.0f, high = 0.0f;
    for (int bit = 0; bit < 32; ++bit) {
        if (column >= columns.count) break;
        if (row < rows.count) {
            const Sample y = sample_at(rows, row);
            if (y.low != loaded) {
                // Along rows first, as where the contract comes from.
                low = between(mask[y.low][x.low], mask[y.low][x.high], x.fraction);
                high = between(mask[y.high][x.low], mask[y.high][x.high], x.fraction);
                loaded = y.low;
            }
            bits |= static_cast<unsigned>(between(low, high, y.fraction) > THRESHOLD) << bit;
        }
        if (++row == stride) {
            row = 0;
            x = sample_at(columns, ++column);
            loaded = -1;
        }
    }
    return bits;
}

extern "C" __global__ void __launch_bounds__(THREADS)
paste_rle(const PROBABILITY* masks, const float* boxes, const long long* sizes, int capacity,
          int* counts, int* num_runs) {
    __shared__ float mask[BORDERED][BORDERED];
    __shared__ unsigned last_values[WARPS];
    __shared__ int warp_edges[WARPS], warp_ends[WARPS];

    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const long long instance = blockIdx.x;
    masks += instance * SIDE * SIDE;
    boxes += instance * 4;
    counts += instance * capacity;
    const int height = static_cast<int>(sizes[2 * instance]);
    const int width = static_cast<int>(sizes[2 * instance + 1]);

    for (int cell = thread; cell < BORDERED * BORDERED; cell += THREADS) {
        const int y = cell / BORDERED - 1, x = cell % BORDERED - 1;
        const bool inside = y >= 0 && y < SIDE && x >= 0 && x < SIDE;
        mask[y + 1][x + 1] = inside ? widen(masks[y * SIDE + x]) : 0.0f;
    }
    const Axis columns = covered_pixels(boxes[0], boxes[2], width);
    const Axis rows = covered_pixels(boxes[1], boxes[3], height);
    const int stride = min(rows.count + 1, height);
    // Past the last covered pixel a last run may end, unless the image does.
    int total = 0;
    if (columns.count > 0 && rows.count > 0) {
        const bool ends_image =
            columns.first + columns.count == width && rows.first + rows.count == height;
        total = (columns.count - 1) * stride + rows.count + (ends_image ? 0 : 1);
    }
    __syncthreads();

    // Of all pixels before those at hand: how many runs ended, where the last did, the last value.
    int edges = 0, end = 0;
    unsigned value = 0;
    for (int start = 0; start < total; start += THREADS * 32) {
        const int index = start + thread * 32;
        const unsigned bits =
            index < total ? values_from(index, stride, columns, rows, mask) : 0u;
        if (lane == WARP - 1) last_values[warp] = bits >> 31;
        __syncthreads();

        unsigned before = __shfl_up_sync(ALL_LANES, bits >> 31, 1);
        if (lane == 0) before = warp == 0 ? value : last_values[warp - 1];
        value = last_values[WARPS - 1];
        unsigned changes = bits ^ (bits << 1 | before);
        if (index >= total) {
            changes = 0;
        } else if (total - index < 32) {
            changes &= (1u << (total - index)) - 1u;
        }
        const auto position = [&](int bit) {
            const int column = (index + bit) / stride, row = (index + bit) % stride;
            return (columns.first + column) * height + rows.first + row;
        };

        // Positions ascend, so that the last one before is the largest.
        int own_edges = __popc(changes), own_end = changes ? position(31 - __clz(changes)) : 0;
        for (int distance = 1; distance < WARP; distance *= 2) {
            const int other_edges = __shfl_up_sync(ALL_LANES, own_edges, distance);
            const int other_end = __shfl_up_sync(ALL_LANES, own_end, distance);
            if (lane >= distance) {
                own_edges += other_edges;
                own_end = max(own_end, other_end);
            }
        }
        if (lane == WARP - 1) {
            warp_edges[warp] = own_edges;
            warp_ends[warp] = own_end;
        }
        __syncthreads();

        int rank = own_edges - __popc(changes) + edges;
        int previous = __shfl_up_sync(ALL_LANES, own_end, 1);
        previous = max(lane == 0 ? 0 : previous, end);
        for (int other = 0; other < WARPS; ++other) {
            if (other < warp) {
                rank += warp_edges[other];
                previous = max(previous, warp_ends[other]);
            }
            edges += warp_edges[other];
            end = max(end, warp_ends[other]);
        }
        for (; changes; changes &= changes - 1, ++rank) {
            const int here = position(__ffs(changes) - 1);
            if (rank < capacity) counts[rank] = here - previous;
            previous = here;
        }
    }

    if (thread == 0) {
        if (edges < capacity) counts[edges] = height * width - end;
        num_runs[instance] = edges + 1;
    }
    for (int rest = edges + 1 + thread; rest < capacity; rest += THREADS) counts[rest] = 0;
}
