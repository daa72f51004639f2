// Serialise detections as protobuf messages, one block per image.
// Specification: detection_messages/operation.py.
//
// A block first adds up the lengths of its image's messages, and reserves a range of that length in
// the output. Each thread then writes one detection at a time, except the characters of its mask.
// Finally, warps copy the characters of each mask to the end of the mask's detection.
//
// Compile-time constants: THREADS.
#include "warp.cuh"

constexpr int WARPS = THREADS / WARP;
static_assert(THREADS % WARP == 0, "threads are used by the warp");

// Wire types of protobuf. LENGTH precedes bytes and messages.
enum WireType { VARINT = 0, LENGTH = 2, FIXED32 = 5 };

__device__ constexpr unsigned char tag(int field, WireType type) { return field << 3 | type; }

// Fields of the messages in protos/maskrcnn/v1/detector.proto.
constexpr unsigned char RESPONSE_DETECTIONS = tag(4, LENGTH);
constexpr unsigned char DETECTION_SCORE = tag(4, FIXED32);
constexpr unsigned char DETECTION_BOX = tag(5, LENGTH);
constexpr unsigned char DETECTION_RLE = tag(6, LENGTH);
constexpr unsigned char RLE_HEIGHT = tag(1, VARINT);
constexpr unsigned char RLE_WIDTH = tag(2, VARINT);
constexpr unsigned char RLE_COUNTS = tag(3, LENGTH);
constexpr int CORNERS = 4;
// Bytes of a float field: tag and value.
constexpr int FLOAT_FIELD = 1 + sizeof(float);

__device__ int varint_length(unsigned value) { return (38 - __clz(value | 1)) / 7; }

// Length of a field that contains `length` bytes, which are a byte string or a message.
__device__ int field_length(int length) { return 1 + varint_length(length) + length; }

struct Writer {
    unsigned char* place;

    __device__ void byte(unsigned value) { *place++ = static_cast<unsigned char>(value); }

    __device__ void varint(unsigned tag, unsigned value) {
        byte(tag);
        for (; value >= 0x80; value >>= 7) byte((value & 0x7f) | 0x80);
        byte(value);
    }

    // Protobuf leaves out fields with the value zero.
    __device__ void number(unsigned tag, float value) {
        const unsigned bits = __float_as_uint(value);
        if (bits == 0) return;
        byte(tag);
        for (int shift = 0; shift < 32; shift += 8) byte(bits >> shift);
    }
};

struct ImageDetections {
    const float* scores;
    const float* boxes;
    const long long* labels;
    const long long* spans;
    float score_threshold;
    int limit, height, width, classes, text_capacity;
    const long long* class_lengths;

    __device__ bool is_selected(int detection) const {
        return detection < limit && scores[detection] > score_threshold;
    }

    __device__ long long class_row(int detection) const { return labels[detection] - 1; }

    // Whether the detection has a mask and a known class.
    __device__ bool is_complete(int detection) const {
        const long long start = spans[2 * detection], length = spans[2 * detection + 1];
        return length >= 0 && start + length <= text_capacity && class_row(detection) >= 0 &&
               class_row(detection) < classes;
    }

    __device__ int box_length(int detection) const {
        int length = 0;
        for (int corner = 0; corner < CORNERS; ++corner) {
            const float value = boxes[CORNERS * detection + corner];
            length += __float_as_uint(value) != 0 ? FLOAT_FIELD : 0;
        }
        return length;
    }

    __device__ int characters(int detection) const {
        return static_cast<int>(spans[2 * detection + 1]);
    }

    __device__ int rle_length(int detection) const {
        return 1 + varint_length(height) + 1 + varint_length(width) +
               field_length(characters(detection));
    }

    __device__ int detection_length(int detection) const {
        return static_cast<int>(class_lengths[class_row(detection)]) +
               (__float_as_uint(scores[detection]) != 0 ? FLOAT_FIELD : 0) +
               field_length(box_length(detection)) + field_length(rle_length(detection));
    }

    // Write the field of a detection without the characters of its mask.
    __device__ void write(Writer out, int detection, const unsigned char* class_fields) const {
        out.varint(RESPONSE_DETECTIONS, detection_length(detection));
        const int class_length = static_cast<int>(class_lengths[class_row(detection)]);
        for (int place = 0; place < class_length; ++place) out.byte(class_fields[place]);
        out.number(DETECTION_SCORE, scores[detection]);
        out.varint(DETECTION_BOX, box_length(detection));
        for (int corner = 0; corner < CORNERS; ++corner) {
            out.number(tag(corner + 1, FIXED32), boxes[CORNERS * detection + corner]);
        }
        out.varint(DETECTION_RLE, rle_length(detection));
        out.varint(RLE_HEIGHT, height);
        out.varint(RLE_WIDTH, width);
        out.varint(RLE_COUNTS, characters(detection));
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
detection_messages(const long long* __restrict__ counts, const float* __restrict__ boxes,
                   const float* __restrict__ scores, const long long* __restrict__ labels,
                   const unsigned char* __restrict__ text, const long long* __restrict__ text_spans,
                   const long long* __restrict__ sizes, const double* __restrict__ selections,
                   const unsigned char* __restrict__ class_fields,
                   const long long* __restrict__ class_lengths, int depth, int text_capacity,
                   int classes, int class_stride, int capacity,
                   unsigned char* __restrict__ messages, long long* __restrict__ spans) {
    __shared__ long long first;
    // For each thread's detection: position of its mask's characters in `text`, position in
    // `messages` at which they end, and number of characters.
    __shared__ long long sources[THREADS], ends[THREADS];
    __shared__ int lengths[THREADS];
    const long long row = blockIdx.x, start_of_image = row * depth;
    const double limit = fmin(selections[2 * row], static_cast<double>(counts[row]));
    const ImageDetections image{scores + start_of_image,
                      boxes + CORNERS * start_of_image,
                      labels + start_of_image,
                      text_spans + 2 * start_of_image,
                      static_cast<float>(selections[2 * row + 1]),
                      static_cast<int>(limit),
                      static_cast<int>(sizes[2 * row]),
                      static_cast<int>(sizes[2 * row + 1]),
                      classes,
                      text_capacity,
                      class_lengths};
    long long* const span = spans + 2 * row;
    // The last row of `spans`, after those of the images, counts all reserved bytes.
    unsigned long long* const reserved =
        reinterpret_cast<unsigned long long*>(spans + 2 * static_cast<long long>(gridDim.x));

    int own = 0, incomplete = 0, length = 0;
    for (int detection = threadIdx.x; detection < depth; detection += THREADS) {
        if (!image.is_selected(detection)) continue;
        if (image.is_complete(detection)) {
            own += field_length(image.detection_length(detection));
        } else {
            incomplete = 1;
        }
    }
    incomplete = __syncthreads_or(incomplete);
    sum_before<WARPS>(own, length);
    if (threadIdx.x == 0) {
        span[1] = incomplete ? -1 : length;
        if (!incomplete) {
            first = static_cast<long long>(
                atomicAdd(reserved, static_cast<unsigned long long>(length)));
            span[0] = first;
        }
    }
    __syncthreads();
    if (incomplete || first + length > capacity) return;

    int written = 0;
    for (int start = 0; start < depth; start += THREADS) {
        const int detection = start + threadIdx.x;
        const bool is_selected = detection < depth && image.is_selected(detection);
        const int size = is_selected ? field_length(image.detection_length(detection)) : 0;
        const long long place = first + sum_before<WARPS>(size, written);
        lengths[threadIdx.x] = is_selected ? image.characters(detection) : 0;
        if (is_selected) {
            image.write(Writer{messages + place}, detection,
                        class_fields + image.class_row(detection) * class_stride);
            sources[threadIdx.x] = image.spans[2 * detection];
            ends[threadIdx.x] = place + size;
        }
        __syncthreads();
        for (int thread = threadIdx.x / WARP; thread < THREADS; thread += WARPS) {
            const unsigned char* const source = text + sources[thread];
            unsigned char* const target = messages + ends[thread] - lengths[thread];
            for (int character = threadIdx.x % WARP; character < lengths[thread];
                 character += WARP) {
                target[character] = source[character];
            }
        }
        __syncthreads();
    }
}
