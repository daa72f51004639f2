"""Processing of batches on the GPU: image files in, detections or serialised responses out.

Input preparation, inference and mask encoding each have their own CUDA stream, so that these steps
of successive batches overlap. Masks that exceed the encoder's buffers are encoded again in a fourth
stream. A batch's tensors are freed after its last step, when no stream uses them. Decoded images
can be large, so they are freed as soon as they are padded.
"""

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...model.bundle.manifest import Manifest
from ...model.device_images import apply_orientation, decode_jpegs, resize_pixels, tensor_from_bytes
from ...model.device_masks import (
    RUN_CAPACITY,
    EncodedMasks,
    MaskBatch,
    encode_masks,
    selected_rles,
    text_capacity,
)
from ...model.image_limits import ImageError
from ...model.masks import Rle
from ...plugins.detection_messages import DetectionBatch, detection_messages
from ...plugins.resize_pad import resize_pad
from ...plugins.runtime.launching import copy_to_device
from ..backends.base import DeviceBackend
from ..detections import Detections, MaskFormat, TimedResponse, Timing
from .base import MODEL_STEP, ImageRequest, Outcome, PlannedImage, Step
from .device_batches import (
    LONGEST_PAUSE_S,
    BatchWaiter,
    InferredBatch,
    PastedBatch,
    PreparedBatch,
    ReadBatch,
    StreamEvent,
    boxes_in_sources,
    by_any_thread,
    class_table,
    copy_to_host,
    device_response,
    is_serialised_on_device,
    message_overhead,
    new_stream,
    scales_and_limits,
    selections_of,
    timing_of,
)
from .host_steps import resized_pixels
from .postprocessing import detections_from_rows, kept_rows

_log = logging.getLogger(__name__)

# Largest image in pixels that the device decodes. A batch of larger images would need gigabytes of
# GPU memory.
_MAX_DEVICE_PIXELS: Final = 1 << 24


class DeviceSteps:
    """Steps that decode images, run the model and encode masks on the backend's device.

    The device also serialises the response to a request if the request's mask format is RLE, its
    encoder is `encode_detections`, and its masks fit the mask encoder's buffers. The last step then
    returns a `TimedResponse` for this request. Only one `StepChain` may run the steps at a time.
    """

    # Two more than `DeviceEngine.saturating_batches`, so that full batches are ready as soon as the
    # model is free, even if other threads of the process run at that time.
    concurrency: Final = 5

    def __init__(
        self,
        backend: DeviceBackend[Tensor],
        manifest: Manifest,
        *,
        run_capacity: int = RUN_CAPACITY,
        longest_pause_s: float = LONGEST_PAUSE_S,
    ) -> None:
        """Create the steps of a batch (decoding, model, encoding) and their CUDA streams.

        Args:
            backend: Backend that runs the model.
            manifest: Manifest of the backend's bundle.
            run_capacity: Size of the mask encoder's buffer, in RLE runs per mask. Masks with more
                runs are encoded again in a larger buffer.
            longest_pause_s: Longest pause, in seconds, between polls for the end of a batch. Short
                pauses take more CPU time.
        """
        self._longest_pause_s = longest_pause_s
        self._backend = backend
        self._manifest = manifest
        self._run_capacity = run_capacity
        self._device = torch.device(backend.device)
        self._classes = class_table(manifest.categories, self._device)
        # High priority: the short kernels must not wait for the model's long ones.
        self._preparing, self._pasting, self._repeating = (
            new_stream(self._device, priority=-1) for _ in range(3)
        )
        self._computing = new_stream(self._device)
        self._waiter = BatchWaiter(longest_pause_s)
        # The steps from "prepare" to "paste" only queue work on the GPU, by hundreds of short calls
        # that release the GIL. If several threads were in these steps at once, each call would have
        # to wait for the GIL again, which costs far more than the calls.
        self.steps = (
            Step("read", self._read, self.concurrency),
            Step("prepare", self._prepare, 1),
            Step(MODEL_STEP, self._infer, 1, continues_section=True),
            Step("paste", self._paste, 1, continues_section=True),
            Step("select", self._select, self.concurrency),
        )

    def synchronize(self) -> None:
        """Wait for the GPU work that the processing steps have queued."""
        # Not for the whole device, because that may end another thread's capture of a CUDA graph.
        for stream in (self._preparing, self._computing, self._pasting, self._repeating):
            StreamEvent(stream).wait(self._longest_pause_s)

    def _read(self, requests: Sequence[ImageRequest]) -> ReadBatch:
        files = [file_for_device(request.image) for request in requests]
        return ReadBatch(
            requests,
            [tensor_from_bytes(file) for file in files if file is not None],
            [
                pixels_from_host(request.image) if file is None else None
                for request, file in zip(requests, files, strict=True)
            ],
        )

    def _prepare(self, batch: ReadBatch) -> PreparedBatch:
        images = [request.image for request in batch.requests]
        with self._preparing:
            begin = StreamEvent(self._preparing)
            pixels = self._decoded(batch)
            padded = self._padded(batch.requests, pixels)
            host_sizes = np.array([[i.size for i in images], [i.source_size for i in images]])
            floats = scales_and_limits(*host_sizes)
            selections = selections_of(batch.requests)
            # Two float32 values, or one float64, are stored as one int64, so that one copy
            # transfers all five tables.
            tables = [host_sizes, floats.view(np.int64), selections.view(np.int64)[None]]
            on_device = copy_to_device(np.concatenate(tables), self._device)
            scales, limits = on_device[2:4].view(torch.float32)[:, :, None]
            entries = [
                own if isinstance(own, ImageError) else request
                for request, own in zip(batch.requests, pixels, strict=True)
            ]
            return PreparedBatch(
                batch.requests[0].bucket,
                entries,
                padded,
                on_device[0],
                on_device[1],
                scales,
                limits,
                on_device[4].view(torch.float64),
                begin,
                StreamEvent(self._preparing),
            )

    def _decoded(self, batch: ReadBatch) -> list[Tensor | ImageError]:
        """Return each request's image [3, h, w] after its EXIF rotation, or its error.

        Images that the device decodes are uint8 in source size. The others are on the host, and
        already resized.
        """
        decoded = iter(decode_jpegs(batch.files, self._device))
        return [
            upright_pixels(request.image, next(decoded)) if own is None else own
            for request, own in zip(batch.requests, batch.from_host, strict=True)
        ]

    def _padded(
        self, requests: Sequence[ImageRequest], pixels: Sequence[Tensor | ImageError]
    ) -> Tensor:
        """Return the images on the device, resized and padded to the input size H x W.

        `pixels` is the output of `_decoded`. The result is [B, 3, H, W]: float32 if the resize rule
        is `torchvision`, else uint8. Invalid images are black.
        """
        empty = torch.empty(3, 0, 0, dtype=torch.uint8)
        images = [empty if isinstance(own, ImageError) else own for own in pixels]
        on_device = [image.to(self._device) for image in images]
        bucket, rule = requests[0].bucket, self._manifest.preprocessing.resize
        if rule == "torchvision":
            rows = torch.zeros(len(images), 3, *bucket, device=self._device)
            for row, image, request in zip(rows, on_device, requests, strict=True):
                if image.numel():
                    height, width = request.image.size
                    row[:, :height, :width] = resize_pixels(image, request.image.size, rule)
            return rows
        sizes = [side for request in requests for side in request.image.size]
        return resize_pad(on_device, sizes, *bucket)

    def _infer(self, batch: PreparedBatch) -> InferredBatch:
        with self._computing:
            batch.ready.block(self._computing)
            begin = StreamEvent(self._computing)
            outputs = self._backend.infer_on_device(batch.bucket, batch.images, batch.sizes)
            return InferredBatch(batch, outputs, begin, StreamEvent(self._computing))

    def _paste(self, batch: InferredBatch) -> PastedBatch:
        prepared, outputs = batch.prepared, batch.outputs
        with self._pasting:
            batch.ready.block(self._pasting)
            boxes = boxes_in_sources(outputs.boxes, prepared.scales, prepared.limits)
            masks = MaskBatch(
                outputs.masks, boxes, prepared.source_sizes, self._manifest.mask_paste
            )
            detections = (outputs.num_detections, boxes, outputs.scores, outputs.labels)
            requests = [e for e in prepared.entries if isinstance(e, ImageRequest)]
            wanted = {request.options.mask_format for request in requests}
            rles = messages = None
            encoded: dict[MaskFormat, Sequence[Tensor]] = {}
            with_rles = [r for r in requests if r.options.mask_format is MaskFormat.RLE]
            if with_rles:
                widths = (request.image.source_size[1] for request in requests)
                capacity = text_capacity(widths, boxes.shape[1])
                rles = encode_masks(masks, self._run_capacity, capacity)
                if any(map(is_serialised_on_device, with_rles)):
                    selected = DetectionBatch(
                        *detections, *rles, prepared.source_sizes, prepared.selections
                    )
                    messages = self._serialised(selected)
                if not all(map(is_serialised_on_device, with_rles)):
                    encoded[MaskFormat.RLE] = rles
            if wanted & {MaskFormat.PROBABILITIES, MaskFormat.POLYGON}:
                encoded[MaskFormat.PROBABILITIES] = (outputs.masks,)
            by_device = all(map(is_serialised_on_device, requests))
            return PastedBatch(
                batch,
                masks,
                () if by_device else copy_to_host(detections),
                rles,
                {mask_format: copy_to_host(own) for mask_format, own in encoded.items()},
                None if messages is None else copy_to_host(messages),
                StreamEvent(self._pasting),
            )

    def _serialised(self, batch: DetectionBatch) -> tuple[Tensor, Tensor]:
        """Serialise a batch's selected detections to a buffer that is large enough for all of them.

        Return the buffer [bytes] uint8, and [B, 2] int64: start and length of each image's bytes.
        For details, see `detection_messages`.
        """
        capacity = len(batch.text) + message_overhead(self._classes) * batch.labels.numel()
        return detection_messages(batch, self._classes, capacity)

    def _select(self, batch: PastedBatch) -> list[Outcome | TimedResponse[bytes]]:
        self._waiter.wait(batch)
        start = time.perf_counter()
        entries = batch.inferred.prepared.entries
        results: dict[int, ImageError | bytes | Detections] = {}
        rest: dict[int, ImageRequest] = {}
        for row, entry in enumerate(entries):
            if isinstance(entry, ImageError):
                results[row] = entry
            elif (response := device_response(batch, row, entry)) is not None:
                results[row] = response
            else:
                rest[row] = entry
        results |= self._detections(batch, rest)
        timing = timing_of(batch, time.perf_counter() - start)
        return [_with_timing(results[row], timing) for row in range(len(entries))]

    def _detections(
        self, batch: PastedBatch, requests: Mapping[int, ImageRequest]
    ) -> dict[int, Detections]:
        """Return the detections for each of `requests`.

        The keys of `requests` and of the result are the images' indices in the batch.
        """
        if not requests:
            return {}
        if not batch.detections:
            batch = self._with_detections(batch)
        kept = {row: _kept_rows(batch, row, request) for row, request in requests.items()}
        depth = batch.masks.boxes.shape[1]
        chosen = [
            kept[row] + row * depth
            for row, request in requests.items()
            if request.options.mask_format is MaskFormat.RLE
        ]
        rles = iter(self._rles(batch, np.concatenate(chosen)) if chosen else ())
        return {
            row: self._image_detections(batch, row, request, kept[row], rles)
            for row, request in requests.items()
        }

    def _with_detections(self, batch: PastedBatch) -> PastedBatch:
        """Return the batch with its detections copied from the device to the field `detections`."""
        *detections, _ = batch.inferred.outputs._replace(boxes=batch.masks.boxes)
        with by_any_thread(self._repeating):
            return batch._replace(detections=[tensor.cpu().numpy() for tensor in detections])

    def _rles(self, batch: PastedBatch, chosen: NDArray[np.intp]) -> list[bytes]:
        """Return the COCO RLE `counts` of the masks with the indices `chosen`.

        The batch has D masks per image, padding included. The mask of detection d of image i has
        the index i * D + d.
        """
        # Masks that exceed the buffers are encoded again in a separate stream, because the stream
        # for pasting may already be waiting for the inference of the next batch.
        with by_any_thread(self._repeating):
            encoded = batch.encoded.get(MaskFormat.RLE)
            if encoded is None:  # not copied yet, as the device was to serialise all RLE responses
                assert batch.rles is not None
                encoded = [tensor.cpu().numpy() for tensor in batch.rles]
            return selected_rles(batch.masks, EncodedMasks(*encoded), chosen)

    def _image_detections(
        self,
        batch: PastedBatch,
        row: int,
        request: ImageRequest,
        kept: NDArray[np.intp],
        counts: Iterator[bytes],
    ) -> Detections:
        """Return the selected detections of one image of a batch.

        `row` is the index of the image in the batch. `kept` are the indices of the selected
        detections. If RLE masks are requested, the next items of the iterator `counts` are these
        detections' COCO RLE `counts`, one per detection.
        """
        image, options, _ = request
        _, boxes, scores, labels = (array[row] for array in batch.detections)
        rles = probabilities = None
        if options.mask_format is MaskFormat.RLE:
            height, width = image.source_size
            rles = [Rle(height, width, own) for own in islice(counts, len(kept))]
        elif options.mask_format is not MaskFormat.NONE:
            probabilities = batch.encoded[MaskFormat.PROBABILITIES][0][row][kept]
        return detections_from_rows(
            boxes[kept],
            scores[kept],
            labels[kept],
            image.source_size,
            self._manifest,
            mask_format=options.mask_format,
            rles=rles,
            probabilities=probabilities,
        )


def _with_timing(
    result: ImageError | bytes | Detections, timing: Timing
) -> ImageError | TimedResponse[bytes] | Detections:
    if isinstance(result, ImageError):
        return result
    if isinstance(result, bytes):
        return TimedResponse(result, timing)
    return dataclasses.replace(result, timing=timing)


def _kept_rows(batch: PastedBatch, image: int, request: ImageRequest) -> NDArray[np.intp]:
    """Return the indices of the detections that a request selects.

    `image` is the index of the request's image in the batch.
    """
    count, _, scores, _ = (array[image] for array in batch.detections)
    return kept_rows(scores[: int(count)], request.options)


def file_for_device(image: PlannedImage) -> bytes | memoryview | None:
    """Return the encoded image if the device can decode it. None: the CPU must decode it."""
    suits = image.header.is_plain_jpeg and math.prod(image.source_size) <= _MAX_DEVICE_PIXELS
    return image.source if suits and isinstance(image.source, (bytes, memoryview)) else None


def pixels_from_host(image: PlannedImage) -> Tensor | ImageError:
    """Decode and resize an image on the CPU.

    Returns:
        [3, h, w] on the CPU, where h and w are the resized size. float32 if the resize rule is
        `torchvision`, else uint8. If the image is invalid, the error.
    """
    try:
        pixels = resized_pixels(image)
    except ImageError as error:
        return error
    # Pixels that need no resizing can lie in read-only memory, which torch does not accept.
    return torch.from_numpy(np.require(pixels, requirements="W")).permute(2, 0, 1)


def upright_pixels(image: PlannedImage, decoded: Tensor | ImageError) -> Tensor | ImageError:
    """Apply the EXIF orientation to an image that the device decoded.

    Args:
        image: Encoded image and its EXIF orientation.
        decoded: [3, h, w] uint8 on the device, or the error of the device's decoder.

    Returns:
        The rotated image on the device: [3, h, w] uint8 in source size. If the device's decoder
        failed, the output of `pixels_from_host`: the resized image on the CPU, or an error.
    """
    if isinstance(decoded, ImageError):
        _warn_once(str(decoded))
        return pixels_from_host(image)
    return apply_orientation(decoded, image.header.orientation)


@functools.lru_cache(maxsize=16)
def _warn_once(reason: str) -> None:
    """Log an error of the device's JPEG decoder as a warning, but not if it was logged before."""
    _log.warning("decoding the image on the CPU; the GPU decoder cannot: %s", reason)
