"""The steps on a GPU: files go there, encoded masks come back.

A batch is decoded, computed and pasted in three streams, so that the steps of successive batches
overlap. What it holds on the device is let go of when its last step is done, by which time no
stream uses it any more.
"""

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..model.device_images import decode_jpegs, resize_pixels, tensor_from_bytes, turn_upright
from ..model.images import ImageError
from ..model.manifest import Manifest
from ..model.masks import Rle
from ..model.spec import ShapeBucket
from .backends.torch import TorchBackend
from .backends.torch_batches import DeviceOutputs
from .backends.waiting import wait_until
from .detections import DetectionOptions, Detections, MaskFormat
from .device_masks import (
    Masks,
    MaskStrings,
    boxes_in_sources,
    chosen_strings,
    strings_of_masks,
)
from .postprocessing import detections_from_rows, kept_rows
from .preprocessing import EncodedImage, resized_pixels
from .steps import MODEL_STEP, Outcome, Source, Step

_MAX_DEVICE_PIXELS: Final = 1 << 24
"""Larger images are decoded by the CPU, since a batch of them would take gigabytes of a GPU."""

_MAX_RUN_CAPACITY: Final = 1 << 12
"""Runs of a mask that there is room for at first, however wide its image."""


_CHARACTERS_A_RUN: Final = 2
"""Of a mask's string, on the average, that there is room for at first."""


class _Read(NamedTuple):
    images: Sequence[EncodedImage]
    files: Sequence[Tensor]
    """[bytes] uint8 each, of those that the device decodes."""
    from_host: Sequence[Tensor | ImageError | None]
    """[3, h, w] uint8 of each of the others, None of those."""


class _Prepared(NamedTuple):
    bucket: ShapeBucket
    sources: Sequence[Source]
    images: Tensor
    """[B, 3, H, W] uint8."""
    sizes: Tensor
    """[B, 2] int64, height and width before padding."""
    source_sizes: Tensor
    """[B, 2] int64, height and width of the source images."""
    run_capacity: int
    """Runs of a mask to have room for: two a column, which a mask without holes needs."""
    ready: Any
    """Event after which the tensors can be used."""


class _Inferred(NamedTuple):
    prepared: _Prepared
    outputs: DeviceOutputs
    ready: Any


class _Pasted(NamedTuple):
    inferred: _Inferred
    masks: Masks
    found: Sequence[Tensor]
    """On the host: number, boxes, scores and labels of detections; boxes in source pixels."""
    encoded: Sequence[Tensor]
    """On the host: strings and their lengths, or probabilities, or nothing."""
    ready: Any
    """Event after which what is on the host can be used."""


class DeviceSteps:
    """Images, model and masks on the backend's device."""

    def __init__(
        self,
        backend: TorchBackend,
        manifest: Manifest,
        options: DetectionOptions,
        *,
        threads: int,
        max_run_capacity: int = _MAX_RUN_CAPACITY,
    ) -> None:
        """Prepare streams.

        Args:
            backend: Computes the model.
            manifest: Of the bundle that the backend was loaded from.
            options: Which detections to keep, and the form of their masks.
            threads: Batches that the CPU works at, at once, before and after the device.
            max_run_capacity: Runs of a mask that there is room for at first, at most.
        """
        self._backend = backend
        self._manifest = manifest
        self._options = options
        self._max_run_capacity = max_run_capacity
        self._device = torch.device(backend.device)
        # For the CPU this module has streams and events too, which do nothing.
        self._module = torch.get_device_module(self._device)
        self._decoding, self._computing, self._pasting = (self._module.Stream() for _ in range(3))
        self.steps = (
            Step("files", self._read, threads),
            Step("images", self._prepare, 1),
            Step(MODEL_STEP, self._infer, 1),
            Step("masks", self._paste, 1),
            Step("strings", self._encode, threads),
        )

    def synchronize(self) -> None:
        """Wait for the device."""
        self._module.synchronize()

    def _read(self, images: Sequence[EncodedImage]) -> _Read:
        return _Read(
            images,
            [tensor_from_bytes(image.data) for image in images if _suits_device(image)],
            [None if _suits_device(image) else _pixels_from_host(image) for image in images],
        )

    def _prepare(self, batch: _Read) -> _Prepared:
        images, bucket = batch.images, batch.images[0].bucket
        with self._module.stream(self._decoding):
            pixels = self._pixels_of(batch)
            padded = torch.zeros(len(images), 3, *bucket, dtype=torch.uint8, device=self._device)
            for row, own in zip(padded, pixels, strict=True):
                if isinstance(own, Tensor):
                    row[:, : own.shape[1], : own.shape[2]] = own
            all_sizes = torch.tensor([[i.size for i in images], [i.source_size for i in images]])
            sizes, source_sizes = all_sizes.to(self._device)
            sources = [
                own if isinstance(own, ImageError) else image
                for image, own in zip(images, pixels, strict=True)
            ]
            widest = max(width for _, width in (image.source_size for image in images))
            capacity = min(2 * widest + 1, self._max_run_capacity)
            return _Prepared(bucket, sources, padded, sizes, source_sizes, capacity, self._record())

    def _pixels_of(self, batch: _Read) -> list[Tensor | ImageError]:
        """[3, h, w] uint8 of each image, at the size that the model wants."""
        decoded = iter(decode_jpegs(batch.files, self._device))
        return [
            _pixels_from_device(image, next(decoded)) if own is None else own
            for image, own in zip(batch.images, batch.from_host, strict=True)
        ]

    def _infer(self, batch: _Prepared) -> _Inferred:
        with self._module.stream(self._computing):
            self._computing.wait_event(batch.ready)
            outputs = self._backend.infer_on_device(batch.bucket, batch.images, batch.sizes)
            return _Inferred(batch, outputs, self._record())

    def _paste(self, batch: _Inferred) -> _Pasted:
        prepared, outputs, ready = batch
        with self._module.stream(self._pasting):
            self._pasting.wait_event(ready)
            boxes = boxes_in_sources(outputs.boxes, prepared.sizes, prepared.source_sizes)
            masks = Masks(outputs.masks, boxes, prepared.source_sizes, self._manifest.mask_paste)
            encoded: tuple[Tensor, ...] = ()
            if self._options.mask_format is MaskFormat.RLE:
                encoded = strings_of_masks(
                    masks, prepared.run_capacity, _CHARACTERS_A_RUN * prepared.run_capacity
                )
            elif self._options.mask_format is MaskFormat.PROBABILITIES:
                encoded = (outputs.masks,)
            found = (outputs.num_detections, boxes, outputs.scores, outputs.labels)
            on_host = [list(map(self._fetched, tensors)) for tensors in (found, encoded)]
            return _Pasted(batch, masks, on_host[0], on_host[1], self._record())

    def _encode(self, batch: _Pasted) -> list[Outcome]:
        wait_until(batch.ready.query)
        return [
            source if isinstance(source, ImageError) else self._detections(batch, place, source)
            for place, source in enumerate(batch.inferred.prepared.sources)
        ]

    def _detections(self, batch: _Pasted, place: int, image: EncodedImage) -> Detections:
        count, boxes, scores, labels = (tensor[place].numpy() for tensor in batch.found)
        kept = kept_rows(scores[: int(count)], self._options)
        rles = probabilities = None
        if self._options.mask_format is MaskFormat.RLE:
            strings = chosen_strings(batch.masks, MaskStrings(*batch.encoded), place, kept)
            rles = [Rle(*image.source_size, string) for string in strings]
        elif self._options.mask_format is MaskFormat.PROBABILITIES:
            probabilities = batch.encoded[0][place].numpy()[kept]
        return detections_from_rows(
            boxes[kept],
            scores[kept],
            labels[kept],
            image.source_size,
            self._manifest,
            rles=rles,
            probabilities=probabilities,
        )

    def _fetched(self, tensor: Tensor) -> Tensor:
        """A copy on the host, which is there when the current stream is done."""
        on_gpu = self._device.type == "cuda"
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        return host.copy_(tensor, non_blocking=True)

    def _record(self) -> Any:
        """An event in the current stream."""
        event = self._module.Event()
        event.record()
        return event


def _suits_device(image: EncodedImage) -> bool:
    return image.header.is_plain_jpeg and math.prod(image.source_size) <= _MAX_DEVICE_PIXELS


def _pixels_from_host(image: EncodedImage) -> Tensor | ImageError:
    """[3, h, w] uint8 on the host."""
    try:
        return torch.from_numpy(resized_pixels(image)).permute(2, 0, 1)
    except ImageError as error:
        return error


def _pixels_from_device(image: EncodedImage, decoded: Tensor | ImageError) -> Tensor | ImageError:
    """[3, h, w] uint8 of what the device decoded; what it could not, the host may."""
    if isinstance(decoded, ImageError):
        return _pixels_from_host(image)
    return resize_pixels(turn_upright(decoded, image.header.orientation), image.size)
