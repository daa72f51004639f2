"""The steps on the CPU, around any backend."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...model.images import ImageError
from ...model.manifest import Manifest
from ...model.spec import ShapeBucket
from ..backends.base import Backend, Outputs
from .base import MODEL_STEP, Job, Outcome, Source, Step
from .postprocessing import detections_from_outputs
from .preprocessing import resized_pixels


class _Prepared(NamedTuple):
    sources: Sequence[Source]
    bucket: ShapeBucket
    images: NDArray[np.uint8]
    """[B, 3, H, W]."""
    image_sizes: NDArray[np.int64]
    """[B, 2] height and width before padding."""


class _Inferred(NamedTuple):
    sources: Sequence[Source]
    outputs: Outputs


class HostSteps:
    """Images and masks on the CPU, and whatever backend between."""

    def __init__(self, backend: Backend, manifest: Manifest, *, threads: int) -> None:
        self._backend = backend
        self._manifest = manifest
        self.steps = (
            Step("images", self._prepare, threads),
            Step(MODEL_STEP, self._infer, backend.concurrency),
            Step("masks", self._encode, threads),
        )

    def synchronize(self) -> None:
        """Nothing to wait for: each step ends with its work done."""

    def _prepare(self, jobs: Sequence[Job]) -> _Prepared:
        bucket = jobs[0].bucket
        padded = np.zeros((len(jobs), 3, *bucket), np.uint8)
        sources: list[Source] = []
        for row, job in zip(padded, jobs, strict=True):
            try:
                pixels = resized_pixels(job.image)
            except ImageError as error:
                sources.append(error)
            else:
                height, width = job.image.size
                row[:, :height, :width] = pixels.transpose(2, 0, 1)
                sources.append(job)
        return _Prepared(sources, bucket, padded, np.array([j.image.size for j in jobs], np.int64))

    def _infer(self, batch: _Prepared) -> _Inferred:
        outputs = self._backend.infer(batch.bucket, batch.images, batch.image_sizes)
        return _Inferred(batch.sources, outputs)

    def _encode(self, batch: _Inferred) -> list[Outcome]:
        return [
            source
            if isinstance(source, ImageError)
            else detections_from_outputs(
                batch.outputs, row, source.image, self._manifest, source.options
            )
            for row, source in enumerate(batch.sources)
        ]
