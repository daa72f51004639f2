"""Batch types for the processing steps on the GPU, and helpers for CUDA events and copies."""

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...model.bundle.manifest import Category
from ...model.bundle.spec import ShapeBucket
from ...model.device_masks import EncodedMasks, MaskBatch
from ...model.image_limits import ImageError
from ...plugins.detection_messages import ClassTable
from ..backends.base import ModelOutputs
from ..detections import MaskFormat, Timing
from ..messages import class_fields, encode_detections, response_with_detections
from .base import BatchEntry, ImageRequest, aligned_layout

# Pauses between polls of an event, in seconds: the first pause, and the default maximum.
FIRST_PAUSE_S: Final = 1e-4
LONGEST_PAUSE_S: Final = 5e-4
# Share of the model's expected duration for which there are no polls. The rest is a margin for
# batches that take less time than earlier ones.
_UNPOLLED_SHARE: Final = 0.9

# Maximum size in bytes of a serialised detection without its class fields and RLE `counts`: 27 for
# score and box, and 6 (tag and varint) for each of: the mask's height and width, and the lengths of
# the detection, of its mask and of `counts`.
_FIELDS_LENGTH: Final = 57


# Queue of a device's work, and context manager that makes it the current one. Two threads must not
# enter the same stream at once. On the CPU, where work is synchronous, it does nothing.
Stream = torch.cuda.Stream | nullcontext[None]


def new_stream(device: torch.device, priority: int = 0) -> Stream:
    """Create a CUDA stream, or a null context if `device` is the CPU.

    Among CUDA streams, the GPU prefers those with lower numbers of `priority`.
    """
    if device.type == "cuda":
        return torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]
    return nullcontext()


def by_any_thread(stream: Stream) -> AbstractContextManager[object]:
    """Return a context manager that makes a stream current, and that several threads can enter.

    It is slower than the stream itself, which is a context manager for one thread at a time.
    """
    return torch.cuda.stream(stream) if isinstance(stream, torch.cuda.Stream) else stream


class StreamEvent:
    """CUDA event with timing. On the CPU, where work is synchronous, it is complete on creation."""

    def __init__(self, stream: Stream) -> None:
        """Record an event in a stream."""
        # Time at which the event was recorded, that is, queued in the stream.
        self.queued_s = time.perf_counter()
        self._event: Any = None
        if isinstance(stream, torch.cuda.Stream):
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            # Without an argument, `record` looks up the current stream, which takes 5 to 20 us.
            self._event.record(stream)

    def wait(self, longest_pause_s: float = LONGEST_PAUSE_S, earliest_s: float = 0.0) -> float:
        """Wait until the GPU work before the event is complete.

        The event is polled at the start of the call, and repeatedly from `earliest_s` on.

        Args:
            longest_pause_s: Longest pause between two of the repeated polls, in seconds.
            earliest_s: Time from which the event is polled repeatedly, as `time.perf_counter`
                returns it. 0.0: from the start of the call.

        Returns:
            Time of the last poll at which the work was not complete, or 0.0 if there was none.
        """
        # CUDA's own waits are worse: the spinning one occupies a core, and the blocking one takes
        # 10 ms on some virtual machines. The pauses grow, because each poll takes the GIL, and
        # about 30 us of CPU time. Bulk prediction passes a smaller `longest_pause_s`, because it is
        # faster with short pauses.
        pause_s, latest_s = FIRST_PAUSE_S, 0.0
        while self._event is not None and not self._event.query():
            latest_s = time.perf_counter()
            if latest_s < earliest_s:
                time.sleep(earliest_s - latest_s)
            else:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_pause_s)
        return latest_s

    def block(self, stream: Stream) -> None:
        """Make the CUDA stream `stream` wait for this CUDA event. On the CPU, do nothing."""
        if isinstance(stream, torch.cuda.Stream):
            stream.wait_event(self._event)

    def seconds_since(self, earlier: "StreamEvent") -> float:
        """Return the seconds from the event `earlier` to this event. Both must be complete."""
        if self._event is None:
            return self.queued_s - earlier.queued_s
        return float(earlier._event.elapsed_time(self._event)) / 1000


class ReadBatch(NamedTuple):
    """Batch after reading: files that the device will decode, and images that the CPU decoded."""

    requests: Sequence[ImageRequest]
    # Contents of the files that the device decodes, each [bytes] uint8.
    files: Sequence[Tensor]
    # For each request, the image [3, h, w] decoded and resized on the CPU, or its error. None: the
    # device decodes the image.
    from_host: Sequence[Tensor | ImageError | None]


class PreparedBatch(NamedTuple):
    """Batch after decoding, resizing and padding: the model's input."""

    bucket: ShapeBucket
    entries: Sequence[BatchEntry]
    # [B, 3, H, W] uint8, or float32 with the resize rule `torchvision`.
    images: Tensor
    # [B, 2] int64, height and width before padding.
    sizes: Tensor
    # [B, 2] int64, height and width of the source images.
    source_sizes: Tensor
    # [B, 1, 4] float32, factors that scale xyxy boxes to the source images.
    scales: Tensor
    # [B, 1, 4] float32, upper limits to which the scaled boxes are clipped.
    limits: Tensor
    # [B, 2] float64, maximum number of detections and score threshold in each request.
    selections: Tensor
    # Event recorded before decoding.
    begin: StreamEvent
    # The tensors are valid after this event.
    ready: StreamEvent


class InferredBatch(NamedTuple):
    """Batch after inference: the model's outputs."""

    prepared: PreparedBatch
    outputs: ModelOutputs[Tensor]
    # Events before and after the model's computation. The computation begins when the batch is
    # prepared and the model has computed the previous batch.
    begin: StreamEvent
    ready: StreamEvent


class PastedBatch(NamedTuple):
    """Batch after mask encoding: boxes, scores, labels, masks and serialised detections."""

    inferred: InferredBatch
    masks: MaskBatch
    # Fields of `ModelOutputs` except the masks, as host arrays. Boxes are in pixels of the source
    # images. Empty if the device serialises all responses.
    detections: Sequence[NDArray[Any]]
    # RLE masks on the device. None: no request needs them.
    rles: EncodedMasks[Tensor] | None
    # Host arrays by mask format, for requests whose response the device does not serialise. RLE:
    # the fields of `EncodedMasks`. PROBABILITIES: one array, the masks in `ModelOutputs`.
    encoded: Mapping[MaskFormat, Sequence[NDArray[Any]]]
    # The outputs of `detection_messages` as host arrays. None: no request needs them.
    messages: Sequence[NDArray[Any]] | None
    # The arrays on the host are valid after this event.
    ready: StreamEvent


class BatchWaiter:
    """Waiter for the end of batches, with few polls of their CUDA events. Thread-safe.

    The model takes about as long for a batch as for earlier batches of the same input size and
    number of images. For most of this time, the waiter sleeps without polls.
    """

    def __init__(self, longest_pause_s: float) -> None:
        """Set the longest pause between two polls near the end of a batch, in seconds."""
        self._longest_pause_s = longest_pause_s
        # One batch at a time, because each poll takes the GIL.
        self._lock = threading.Lock()
        # Durations of the model in seconds for the latest two batches, by input size and batch
        # size. The shorter one is used, because an unusually long one would delay the next batch.
        self._durations: dict[tuple[ShapeBucket, int], deque[float]] = defaultdict(
            lambda: deque(maxlen=2)
        )
        # Earliest time at which the model can have finished the previous batch.
        self._free_s = 0.0

    def wait(self, batch: PastedBatch) -> None:
        """Wait until a batch's arrays on the host are valid."""
        inferred = batch.inferred
        with self._lock:
            durations = self._durations[inferred.prepared.bucket, len(inferred.prepared.entries)]
            # Earliest time at which the model can have begun, as it computes one batch at a time.
            begin_s = max(inferred.begin.queued_s, self._free_s)
            earliest_s = begin_s + _UNPOLLED_SHARE * min(durations, default=0.0)
            incomplete_s = batch.ready.wait(self._longest_pause_s, earliest_s)
            duration_s = inferred.ready.seconds_since(inferred.begin)
            # Not the present time: if this thread woke up late, the next wait would end late, too.
            # But at most the present time, because threads can wait for batches in another order.
            after_s = batch.ready.seconds_since(inferred.ready)
            end_s = max(begin_s + duration_s, incomplete_s - after_s)
            self._free_s = min(end_s, time.perf_counter())
            durations.append(duration_s)


def timing_of(batch: PastedBatch, host_s: float) -> Timing:
    """Return the duration of each stage of a batch, from decoding to encoding, and the batch size.

    `host_s` is the duration in seconds of the CPU work that follows the GPU work. It counts as
    encoding.
    """
    inferred = batch.inferred
    prepared = inferred.prepared
    return Timing(
        decode_us=round(1e6 * prepared.ready.seconds_since(prepared.begin)),
        queue_us=round(1e6 * inferred.begin.seconds_since(prepared.ready)),
        infer_us=round(1e6 * inferred.ready.seconds_since(inferred.begin)),
        encode_us=round(1e6 * (batch.ready.seconds_since(inferred.ready) + host_s)),
        batch_size=len(prepared.entries),
    )


def copy_to_host(tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Queue copies of tensors to host memory in the current stream. Return the host arrays.

    The arrays are valid once the stream has run the copies. They share one allocation.
    """
    # One allocation, because torch tracks each block of pinned memory with CUDA events.
    starts, size = aligned_layout([tensor.nbytes for tensor in tensors])
    memory = torch.empty(size, dtype=torch.uint8, pin_memory=tensors[0].is_cuda)
    hosts = []
    for tensor, start in zip(tensors, starts, strict=True):
        host = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        hosts.append(host.copy_(tensor, non_blocking=True).numpy())
    return hosts


def scales_and_limits(
    sizes: NDArray[np.int64], source_sizes: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return factors that scale boxes to the source images, and limits that clip the scaled boxes.

    Args:
        sizes: [B, 2], height and width of the resized images.
        source_sizes: [B, 2], height and width of the source images.

    Returns:
        [2, B, 4] float32. Element [0]: factor for each coordinate of an xyxy box. Element [1]:
        upper limit of each coordinate in pixels of the source image.
    """
    # In NumPy, because torch would launch ten kernels on the GPU.
    corners, limits = (
        pairs.take([1, 0, 1, 0], axis=1).astype(np.float32) for pairs in (sizes, source_sizes)
    )
    return np.stack([limits / corners, limits])


def boxes_in_sources(boxes: Tensor, scales: Tensor, limits: Tensor) -> Tensor:
    """Scale boxes to the source images and clip them, as `detections_from_outputs` does.

    Args:
        boxes: [B, D, 4] float32 xyxy in pixels of the resized images.
        scales: [B, 1, 4] float32, factor for each coordinate; see `scales_and_limits`.
        limits: [B, 1, 4] float32, upper limit of each scaled coordinate.

    Returns:
        [B, D, 4] in pixels of the source images.
    """
    return torch.minimum((boxes * scales).clamp_(min=0), limits)


def class_table(categories: Sequence[Category], device: torch.device) -> ClassTable:
    """Serialise the class fields of each category. Return them as a table on `device`.

    The fields are `label`, `class_name` and `category_id` of the protobuf message `Detection`.
    """
    rows = [class_fields(label, category) for label, category in enumerate(categories, 1)]
    stride = max(map(len, rows), default=0)
    padded = bytearray().join(row.ljust(stride, b"\0") for row in rows)
    fields = torch.frombuffer(padded, dtype=torch.uint8).reshape(len(rows), stride)
    lengths = torch.tensor(list(map(len, rows)), dtype=torch.int64)
    return ClassTable(fields.to(device), lengths.to(device))


def message_overhead(classes: ClassTable) -> int:
    """Return the maximum size in bytes of a serialised detection, without its RLE `counts`.

    `classes` are the serialised class fields of all categories, from `class_table`.
    """
    return classes.fields.shape[1] + _FIELDS_LENGTH


def is_serialised_on_device(request: ImageRequest) -> bool:
    """Return whether the device is to serialise the response to a request.

    True if the mask format is RLE and the encoder is `encode_detections`. Even then, the device
    cannot serialise the response if a mask exceeds the mask encoder's buffers or a class is
    unknown; see `device_response`.
    """
    return request.encoder is encode_detections and request.options.mask_format is MaskFormat.RLE


def selections_of(requests: Sequence[ImageRequest]) -> NDArray[np.float64]:
    """Return each request's maximum number of detections and its score threshold.

    The result is an array [B, 2], for the field `selections` of `DetectionBatch`. The maximum is
    infinity if the request sets none.
    """
    options = [request.options for request in requests]
    return np.array(
        [
            [math.inf if own.max_detections is None else own.max_detections, own.score_threshold]
            for own in options
        ],
        np.float64,
    )


def device_response(batch: PastedBatch, row: int, request: ImageRequest) -> bytes | None:
    """Return the response that the device has serialised for one request of a batch.

    `row` is the index of `request` in the batch. None: the device has not serialised the response.
    """
    if batch.messages is None or not is_serialised_on_device(request):
        return None
    data, spans = batch.messages
    start, length = spans[row].tolist()
    if not 0 <= length <= len(data) - start:
        return None  # a mask exceeds the encoder's buffers, or a class is unknown
    return response_with_detections(*request.image.source_size, data[start : start + length].data)
