"""Processing of batches on the GPU: image files in, encoded masks out.

A batch is decoded, padded, computed and pasted in four CUDA streams, so that steps of successive
batches overlap. Its tensors are freed after its last step, when no stream uses them. Decoded images
can be large, so they are freed as soon as they are padded.
"""

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...model.bundle.manifest import Manifest
from ...model.bundle.spec import ShapeBucket
from ...model.device_images import decode_jpegs, resize_pixels, tensor_from_bytes
from ...model.images import ImageError
from ...model.masks import Rle
from ...plugins.resize_pad import resize_pad
from ..backends.base import DeviceBackend, ModelOutputs
from ..detections import Detections, MaskFormat, Timing
from .base import MODEL_STEP, BatchEntry, ImageRequest, Outcome, Step
from .device_masks import (
    EncodedMasks,
    MaskBatch,
    boxes_in_sources,
    encode_masks,
    scales_and_limits,
    selected_rles,
)
from .device_transfers import (
    StreamEvent,
    copy_to_device,
    copy_to_host,
    file_for_device,
    pixels_from_host,
    upright_pixels,
)
from .postprocessing import detections_from_rows, kept_rows

# Buffer size in runs per mask: two runs in each column of an image 2048 pixels wide, which suffices
# for a convex object. Masks with more runs are encoded again in larger buffers.
_RUN_CAPACITY: Final = 1 << 12

# Buffer size in RLE characters per run.
_CHARACTERS_PER_RUN: Final = 2


class _Read(NamedTuple):
    requests: Sequence[ImageRequest]
    # Contents of the files that the device decodes, each [bytes] uint8.
    files: Sequence[Tensor]
    # For each request, [3, h, w] decoded and resized on the CPU. None: the device decodes it.
    from_host: Sequence[Tensor | ImageError | None]


class _Decoded(NamedTuple):
    requests: Sequence[ImageRequest]
    # For each request, the upright image [3, h, w]: uint8 in source size on the device, or already
    # resized on the host.
    pixels: Sequence[Tensor | ImageError]
    # Events before and after decoding.
    begin: StreamEvent
    ready: StreamEvent


class _Prepared(NamedTuple):
    bucket: ShapeBucket
    entries: Sequence[BatchEntry]
    # [B, 3, H, W] uint8, or float32 with the resize rule `torchvision`.
    images: Tensor
    # [B, 2] int64, height and width before padding.
    sizes: Tensor
    # [B, 2] int64, height and width of the source images.
    source_sizes: Tensor
    # [B, 1, 4] float32 each, from `scales_and_limits`.
    scales: Tensor
    limits: Tensor
    # Event before decoding.
    begin: StreamEvent
    # The tensors are valid after this event.
    ready: StreamEvent


class _Inferred(NamedTuple):
    prepared: _Prepared
    outputs: ModelOutputs[Tensor]
    ready: StreamEvent


class _Pasted(NamedTuple):
    inferred: _Inferred
    masks: MaskBatch
    # Host arrays as in `ModelOutputs`, without masks; boxes in pixels of the source images.
    detections: Sequence[NDArray[Any]]
    # Host arrays by mask format. RLE: the fields of `EncodedMasks`. PROBABILITIES: the masks.
    encoded: Mapping[MaskFormat, Sequence[NDArray[Any]]]
    # The arrays on the host are valid after this event.
    ready: StreamEvent


class DeviceSteps:
    """Steps that decode images, compute the model and encode masks on the backend's device."""

    def __init__(
        self,
        backend: DeviceBackend[Tensor],
        manifest: Manifest,
        *,
        threads: int,
        run_capacity: int = _RUN_CAPACITY,
    ) -> None:
        """Create the steps and their CUDA streams.

        Args:
            backend: Backend that computes the model.
            manifest: Manifest of the backend's bundle.
            threads: Number of batches that may be in the first step at once, and in the last.
            run_capacity: Buffer size in runs per mask; see `_RUN_CAPACITY`.
        """
        self._backend = backend
        self._manifest = manifest
        self._run_capacity = run_capacity
        self._device = torch.device(backend.device)
        # torch.cuda or torch.cpu. The streams of torch.cpu do nothing.
        self._module = torch.get_device_module(self._device)
        # High priority: the short kernels must not wait for the model's long ones.
        self._decoding, self._padding, self._pasting = (
            self._module.Stream(priority=-1) for _ in range(3)
        )
        self._computing = self._module.Stream()
        self._waiting = threading.Lock()
        self.steps = (
            Step("files", self._read, threads),
            Step("pixels", self._decode, 1),
            Step("images", self._prepare, 1),
            Step(MODEL_STEP, self._infer, 1),
            Step("masks", self._paste, 1),
            Step("strings", self._encode, threads),
        )

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        self._module.synchronize()

    def _read(self, requests: Sequence[ImageRequest]) -> _Read:
        files = [file_for_device(request.image) for request in requests]
        return _Read(
            requests,
            [tensor_from_bytes(file) for file in files if file is not None],
            [
                pixels_from_host(request.image) if file is None else None
                for request, file in zip(requests, files, strict=True)
            ],
        )

    def _decode(self, batch: _Read) -> _Decoded:
        with self._module.stream(self._decoding):
            begin = StreamEvent(self._device)
            decoded = iter(decode_jpegs(batch.files, self._device))
            pixels = [
                upright_pixels(request.image, next(decoded)) if own is None else own
                for request, own in zip(batch.requests, batch.from_host, strict=True)
            ]
            return _Decoded(batch.requests, pixels, begin, StreamEvent(self._device))

    def _prepare(self, batch: _Decoded) -> _Prepared:
        images = [request.image for request in batch.requests]
        with self._module.stream(self._padding):
            batch.ready.block(self._padding)
            padded = self._padded(batch)
            host_sizes = np.array([[i.size for i in images], [i.source_size for i in images]])
            sizes, source_sizes = copy_to_device(host_sizes, self._device)
            scales, limits = copy_to_device(scales_and_limits(*host_sizes), self._device)
            entries = [
                own if isinstance(own, ImageError) else request
                for request, own in zip(batch.requests, batch.pixels, strict=True)
            ]
            return _Prepared(
                batch.requests[0].bucket,
                entries,
                padded,
                sizes,
                source_sizes,
                scales,
                limits,
                batch.begin,
                StreamEvent(self._device),
            )

    def _padded(self, batch: _Decoded) -> Tensor:
        """Resize and pad to [B, 3, H, W]. Rows of invalid images are black."""
        empty = torch.empty(3, 0, 0, dtype=torch.uint8)
        images = [empty if isinstance(own, ImageError) else own for own in batch.pixels]
        for image in images:
            if image.is_cuda:  # else its memory could be reused before it is padded
                image.record_stream(self._padding)
        on_device = [image.to(self._device) for image in images]
        bucket, rule = batch.requests[0].bucket, self._manifest.preprocessing.resize
        if rule == "torchvision":
            rows = torch.zeros(len(images), 3, *bucket, device=self._device)
            for row, image, request in zip(rows, on_device, batch.requests, strict=True):
                if image.numel():
                    height, width = request.image.size
                    row[:, :height, :width] = resize_pixels(image, request.image.size, rule)
            return rows
        sizes = [side for request in batch.requests for side in request.image.size]
        padded: Tensor = resize_pad(on_device, sizes, *bucket)
        return padded

    def _infer(self, batch: _Prepared) -> _Inferred:
        with self._module.stream(self._computing):
            batch.ready.block(self._computing)
            outputs = self._backend.infer_on_device(batch.bucket, batch.images, batch.sizes)
            return _Inferred(batch, outputs, StreamEvent(self._device))

    def _paste(self, batch: _Inferred) -> _Pasted:
        prepared, outputs, ready = batch
        with self._module.stream(self._pasting):
            ready.block(self._pasting)
            boxes = boxes_in_sources(outputs.boxes, prepared.scales, prepared.limits)
            masks = MaskBatch(
                outputs.masks, boxes, prepared.source_sizes, self._manifest.mask_paste
            )
            requests = (e for e in prepared.entries if isinstance(e, ImageRequest))
            wanted = {request.options.mask_format for request in requests}
            encoded: dict[MaskFormat, Sequence[Tensor]] = {}
            if MaskFormat.RLE in wanted:
                encoded[MaskFormat.RLE] = encode_masks(
                    masks, self._run_capacity, _CHARACTERS_PER_RUN * self._run_capacity
                )
            if wanted & {MaskFormat.PROBABILITIES, MaskFormat.POLYGON}:
                encoded[MaskFormat.PROBABILITIES] = (outputs.masks,)
            detections = (outputs.num_detections, boxes, outputs.scores, outputs.labels)
            return _Pasted(
                batch,
                masks,
                copy_to_host(detections),
                {mask_format: copy_to_host(own) for mask_format, own in encoded.items()},
                StreamEvent(self._device),
            )

    def _encode(self, batch: _Pasted) -> list[Outcome]:
        with self._waiting:  # one batch at a time, because each wait occupies a core
            batch.ready.wait()
        start = time.perf_counter()
        entries = batch.inferred.prepared.entries
        with self._module.stream(self._pasting):  # masks beyond `_run_capacity` are pasted again
            outcomes: list[Outcome] = [
                entry if isinstance(entry, ImageError) else self._detections(batch, row, entry)
                for row, entry in enumerate(entries)
            ]
        timing = _timing_of(batch, time.perf_counter() - start)
        return [
            outcome
            if isinstance(outcome, ImageError)
            else dataclasses.replace(outcome, timing=timing)
            for outcome in outcomes
        ]

    def _detections(self, batch: _Pasted, row: int, request: ImageRequest) -> Detections:
        image, options = request
        count, boxes, scores, labels = (array[row] for array in batch.detections)
        kept = kept_rows(scores[: int(count)], options)
        rles = probabilities = None
        if options.mask_format is MaskFormat.RLE:
            encoded = EncodedMasks(*batch.encoded[MaskFormat.RLE])
            counts = selected_rles(batch.masks, encoded, self._run_capacity, row, kept)
            rles = [Rle(*image.source_size, own) for own in counts]
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


def _timing_of(batch: _Pasted, host_s: float) -> Timing:
    """Return the timing of a batch. `host_s`: seconds of CPU work after the device was done."""
    inferred = batch.inferred
    prepared = inferred.prepared
    return Timing(
        decode_us=round(1e6 * prepared.ready.seconds_since(prepared.begin)),
        infer_us=round(1e6 * inferred.ready.seconds_since(prepared.ready)),
        encode_us=round(1e6 * (batch.ready.seconds_since(inferred.ready) + host_s)),
        batch_size=len(prepared.entries),
    )
