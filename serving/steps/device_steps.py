"""The steps on a GPU: files go there, encoded masks come back.

A batch is decoded, padded, computed and pasted in four streams, so that the steps of successive
batches overlap. What it holds on the device is let go of when its last step is done, by which time
no stream uses it any more; but for decoded images, which may be large, and go when they are padded.
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

from ...model.device_images import decode_jpegs, tensor_from_bytes
from ...model.images import ImageError
from ...model.manifest import Manifest
from ...model.masks import Rle
from ...model.spec import ShapeBucket
from ...plugins.resize_pad import resize_pad
from ..backends.torch import TorchBackend
from ..backends.torch_batches import DeviceOutputs
from ..detections import Detections, MaskFormat, Timing
from .base import MODEL_STEP, Job, Outcome, Source, Step
from .device_files import file_for_device, pixels_from_host, upright_pixels
from .device_marks import Mark
from .device_masks import (
    Masks,
    MaskStrings,
    boxes_in_sources,
    chosen_strings,
    scales_and_limits,
    strings_of_masks,
)
from .postprocessing import detections_from_rows, kept_rows

_RUN_CAPACITY: Final = 1 << 12
"""Runs of a mask that there is room for at first: two in each column of an image 2048 pixels wide,
which is what a convex object needs."""

_CHARACTERS_A_RUN: Final = 2
"""Of a mask's string, on the average, that there is room for at first."""


class _Read(NamedTuple):
    jobs: Sequence[Job]
    files: Sequence[Tensor]
    """[bytes] uint8 each, of those that the device decodes."""
    from_host: Sequence[Tensor | ImageError | None]
    """[3, h, w] uint8 of each of the others, None of those."""


class _Decoded(NamedTuple):
    jobs: Sequence[Job]
    pixels: Sequence[Tensor | ImageError]
    """[3, h, w] uint8 of each, upright: on the device of any size, or on the host resized."""
    begin: Mark
    ready: Mark


class _Prepared(NamedTuple):
    bucket: ShapeBucket
    sources: Sequence[Source]
    images: Tensor
    """[B, 3, H, W] uint8."""
    sizes: Tensor
    """[B, 2] int64, height and width before padding."""
    source_sizes: Tensor
    """[B, 2] int64, height and width of the source images."""
    scales: Tensor
    """[B, 1, 4] float32, what takes boxes to the source images."""
    limits: Tensor
    """[B, 1, 4] float32, of boxes there."""
    begin: Mark
    ready: Mark
    """After which the tensors can be used."""


class _Inferred(NamedTuple):
    prepared: _Prepared
    outputs: DeviceOutputs
    ready: Mark


class _Pasted(NamedTuple):
    inferred: _Inferred
    masks: Masks
    found: Sequence[NDArray[Any]]
    """Number, boxes, scores and labels of detections; boxes in source pixels."""
    encoded: Mapping[MaskFormat, Sequence[NDArray[Any]]]
    """Strings and their lengths, probabilities, as they are wanted."""
    ready: Mark
    """After which what is on the host can be used."""


class DeviceSteps:
    """Images, model and masks on the backend's device."""

    def __init__(
        self,
        backend: TorchBackend,
        manifest: Manifest,
        *,
        threads: int,
        run_capacity: int = _RUN_CAPACITY,
    ) -> None:
        """Prepare streams.

        Args:
            backend: Computes the model.
            manifest: Of the bundle that the backend was loaded from.
            threads: Batches that the CPU works at, at once, before and after the device.
            run_capacity: Runs of a mask that there is room for at first.
        """
        self._backend = backend
        self._manifest = manifest
        self._run_capacity = run_capacity
        self._device = torch.device(backend.device)
        # For the CPU this module has streams and events too, which do nothing.
        self._module = torch.get_device_module(self._device)
        self._on_gpu = self._device.type == "cuda"
        # The short kernels that resize and paste would wait for the model's long ones.
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
        """Wait for the device."""
        self._module.synchronize()

    def _read(self, jobs: Sequence[Job]) -> _Read:
        files = [file_for_device(job.image) for job in jobs]
        return _Read(
            jobs,
            [tensor_from_bytes(file) for file in files if file is not None],
            [
                pixels_from_host(job.image) if file is None else None
                for job, file in zip(jobs, files, strict=True)
            ],
        )

    def _decode(self, batch: _Read) -> _Decoded:
        with self._module.stream(self._decoding):
            begin = Mark(self._device)
            decoded = iter(decode_jpegs(batch.files, self._device))
            pixels = [
                upright_pixels(job.image, next(decoded)) if own is None else own
                for job, own in zip(batch.jobs, batch.from_host, strict=True)
            ]
            return _Decoded(batch.jobs, pixels, begin, Mark(self._device))

    def _prepare(self, batch: _Decoded) -> _Prepared:
        images = [job.image for job in batch.jobs]
        with self._module.stream(self._padding):
            batch.ready.hold_back(self._padding)
            padded = self._padded(batch)
            host_sizes = np.array([[i.size for i in images], [i.source_size for i in images]])
            sizes, source_sizes = self._sent(host_sizes)
            scales, limits = self._sent(scales_and_limits(*host_sizes))
            sources = [
                own if isinstance(own, ImageError) else job
                for job, own in zip(batch.jobs, batch.pixels, strict=True)
            ]
            return _Prepared(
                batch.jobs[0].bucket,
                sources,
                padded,
                sizes,
                source_sizes,
                scales,
                limits,
                batch.begin,
                Mark(self._device),
            )

    def _padded(self, batch: _Decoded) -> Tensor:
        """[B, 3, H, W] uint8: images as the model takes them, black where there is none."""
        none = torch.empty(3, 0, 0, dtype=torch.uint8)
        images = [none if isinstance(own, ImageError) else own for own in batch.pixels]
        for image in images:
            if image.is_cuda:  # or the next images could be decoded into its memory too soon
                image.record_stream(self._padding)
        on_device = [image.to(self._device) for image in images]
        sizes = [side for job in batch.jobs for side in job.image.size]
        padded: Tensor = resize_pad(on_device, sizes, *batch.jobs[0].bucket)
        return padded

    def _infer(self, batch: _Prepared) -> _Inferred:
        with self._module.stream(self._computing):
            batch.ready.hold_back(self._computing)
            outputs = self._backend.infer_on_device(batch.bucket, batch.images, batch.sizes)
            return _Inferred(batch, outputs, Mark(self._device))

    def _paste(self, batch: _Inferred) -> _Pasted:
        prepared, outputs, ready = batch
        with self._module.stream(self._pasting):
            ready.hold_back(self._pasting)
            boxes = boxes_in_sources(outputs.boxes, prepared.scales, prepared.limits)
            masks = Masks(outputs.masks, boxes, prepared.source_sizes, self._manifest.mask_paste)
            wanted = {s.options.mask_format for s in prepared.sources if isinstance(s, Job)}
            encoded: dict[MaskFormat, Sequence[Tensor]] = {}
            if MaskFormat.RLE in wanted:
                encoded[MaskFormat.RLE] = strings_of_masks(
                    masks, self._run_capacity, _CHARACTERS_A_RUN * self._run_capacity
                )
            if wanted & {MaskFormat.PROBABILITIES, MaskFormat.POLYGON}:
                encoded[MaskFormat.PROBABILITIES] = (outputs.masks,)
            found = (outputs.num_detections, boxes, outputs.scores, outputs.labels)
            return _Pasted(
                batch,
                masks,
                self._fetched(found),
                {form: self._fetched(tensors) for form, tensors in encoded.items()},
                Mark(self._device),
            )

    def _encode(self, batch: _Pasted) -> list[Outcome]:
        with self._waiting:  # one batch after the other, for each wait takes a core
            batch.ready.wait()
        start = time.perf_counter()
        sources = batch.inferred.prepared.sources
        with self._module.stream(self._pasting):  # where masks without room are pasted again
            outcomes: list[Outcome] = [
                source if isinstance(source, ImageError) else self._detections(batch, place, source)
                for place, source in enumerate(sources)
            ]
        timing = _timing_of(batch, time.perf_counter() - start)
        return [
            outcome
            if isinstance(outcome, ImageError)
            else dataclasses.replace(outcome, timing=timing)
            for outcome in outcomes
        ]

    def _detections(self, batch: _Pasted, place: int, job: Job) -> Detections:
        image, options = job
        count, boxes, scores, labels = (array[place] for array in batch.found)
        kept = kept_rows(scores[: int(count)], options)
        rles = probabilities = None
        if options.mask_format is MaskFormat.RLE:
            encoded = MaskStrings(*batch.encoded[MaskFormat.RLE])
            strings = chosen_strings(batch.masks, encoded, self._run_capacity, place, kept)
            rles = [Rle(*image.source_size, string) for string in strings]
        elif options.mask_format is not MaskFormat.NONE:
            probabilities = batch.encoded[MaskFormat.PROBABILITIES][0][place][kept]
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

    def _sent(self, array: NDArray[Any]) -> Tensor:
        """A copy on the device, which is there when the current stream is done."""
        host = torch.from_numpy(array)
        if self._on_gpu:
            host = host.pin_memory()
        return host.to(self._device, non_blocking=True)

    def _fetched(self, tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
        """Copies on the host, which are there when the current stream is done."""
        hosts = [torch.empty(t.shape, dtype=t.dtype, pin_memory=self._on_gpu) for t in tensors]
        for host, tensor in zip(hosts, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        return [host.numpy() for host in hosts]


def _timing_of(batch: _Pasted, host_s: float) -> Timing:
    """Where the time of a batch went, at the end of which the host worked for so long."""
    inferred = batch.inferred
    prepared = inferred.prepared
    return Timing(
        decode_us=round(1e6 * prepared.ready.seconds_since(prepared.begin)),
        infer_us=round(1e6 * inferred.ready.seconds_since(prepared.ready)),
        encode_us=round(1e6 * (batch.ready.seconds_since(inferred.ready) + host_s)),
        batch_size=len(prepared.sources),
    )
