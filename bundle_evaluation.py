"""Average precision of a bundle: a whole data set through a serving backend."""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from rich.progress import Progress

from .model.images import ImageError
from .model.manifest import Manifest, Precision, read_manifest
from .serving.backends.base import Backend
from .serving.backends.loading import load_backend, served_precision
from .serving.config import BackendName
from .serving.detections import Detections
from .serving.offline.bulk import detect_many
from .serving.steps.base import Outcome
from .training.classes import check_categories
from .training.config import DatasetConfig, EvaluationConfig
from .training.data.coco import CocoDataset, DataError, ImageRecord
from .training.detections import ImageDetections
from .training.distributed import Worker
from .training.evaluation import CocoEvaluator
from .training.terminal import shown_on_terminal

logger = logging.getLogger(__name__)

_DetectMany = Callable[..., Iterator[Outcome]]


class ValidationSet(NamedTuple):
    """What a bundle is measured on, and how."""

    dataset: DatasetConfig
    settings: EvaluationConfig = EvaluationConfig()
    """Its early stops and periods are of training, and not read."""
    on_broken: Literal["skip", "refuse"] = "skip"
    """Unreadable images and annotations: leave out, named and counted, or stop."""


@dataclass(frozen=True, kw_only=True)
class BundleEvaluation:
    """What was measured, and with what."""

    metrics: dict[str, float]
    """What `coco_metrics` returns for boxes and for masks; none where it was not asked for."""
    images: int
    """Images that were detected in."""
    left_out: int
    """Images of the annotation file that could not be used."""
    seconds: float
    """From the first image's file to the last one's detections; the model was warm."""
    backend: str
    device: Literal["cpu", "cuda"]
    precision: Precision
    max_batch: int

    @property
    def images_per_second(self) -> float:
        """Rate of detection."""
        return self.images / self.seconds


def evaluate_bundle(
    bundle: Path,
    data: ValidationSet,
    *,
    backend: BackendName = "auto",
    precision: Precision | None = None,
    output: Path | None = None,
) -> BundleEvaluation:
    """Measure a bundle as it is served, but for orientation, which is that of the annotations.

    Args:
        bundle: folder of the bundle.
        data: what it is measured on.
        backend: what computes it.
        precision: which of its precisions; none, the backend's first in the bundle.
        output: folder for the files of the evaluation; none, they are not written.

    Raises:
        BackendError: the backend does not run here.
        BundleError: the bundle is damaged or lacks the precision.
        ConfigError: the data set has categories that the bundle does not know.
        DataError: the data set cannot be used, none of its images can, or one cannot where that is
            refused.
    """
    manifest = read_manifest(bundle)
    precision = precision or served_precision(manifest, backend)
    max_batch = data.settings.images_per_batch
    own = Worker(0, 1, torch.device("cpu"))
    with shown_on_terminal(own) as progress:
        dataset = CocoDataset(data.dataset, data.on_broken)
        check_categories(dataset, manifest.categories)
        evaluator = CocoEvaluator(dataset, manifest.categories, own, data.settings.evaluator)
        engine = load_backend(bundle, manifest, precision, backend, max_batch)
        with closing(engine):
            engine.warm_up(max_batch)
            start = time.perf_counter()
            with closing(_found_in(dataset.records, engine, manifest, max_batch)) as found:
                followed = _followed(found, len(dataset), progress)
                left_out = _collect(followed, evaluator, data.on_broken)
            seconds = time.perf_counter() - start
        if left_out == len(dataset):
            raise DataError(f"none of the images of {dataset.name} can be used; the log says why")
        metrics = evaluator.evaluate(output, measure=not data.settings.skip_eval)
    return BundleEvaluation(
        metrics=metrics,
        images=len(dataset) - left_out,
        left_out=left_out + dataset.left_out,
        seconds=seconds,
        backend=engine.name,
        device=engine.device,
        precision=precision,
        max_batch=max_batch,
    )


def _found_in(
    records: Sequence[ImageRecord], engine: Backend, manifest: Manifest, max_batch: int
) -> Generator[tuple[ImageRecord, Outcome], None, None]:
    """What is found in each image, in the orientation that was annotated."""
    detect = partial(detect_many, backend=engine, manifest=manifest, max_batch=max_batch)
    turned = []
    for record, found in _pairs(records, partial(detect, apply_orientation=False)):
        if isinstance(found, Detections) and not _is_as_annotated(found, record):
            turned.append(record)
        else:
            yield record, found
    # Annotation tools differ in whether they obey a camera's orientation tag; the annotated size
    # tells which did.
    for record, found in _pairs(turned, partial(detect, apply_orientation=True)):
        if isinstance(found, Detections) and not _is_as_annotated(found, record):
            found = ImageError(
                f"the image is {found.height}x{found.width} pixels, but annotated as "
                f"{record.height}x{record.width}"
            )
        yield record, found


def _pairs(
    records: Sequence[ImageRecord], detect: _DetectMany
) -> Iterator[tuple[ImageRecord, Outcome]]:
    return zip(records, detect(record.path for record in records), strict=True)


def _is_as_annotated(found: Detections, record: ImageRecord) -> bool:
    return (found.height, found.width) == (record.height, record.width)


def _followed(
    found: Iterator[tuple[ImageRecord, Outcome]], total: int, progress: Progress
) -> Iterator[tuple[ImageRecord, Outcome]]:
    task = progress.add_task("detecting", total=total, note="")
    for pair in found:
        yield pair
        progress.advance(task)
    progress.remove_task(task)


def _collect(
    found: Iterable[tuple[ImageRecord, Outcome]],
    evaluator: CocoEvaluator,
    on_broken: Literal["skip", "refuse"],
) -> int:
    """Give an evaluator what was found; how many images could not be used."""
    left_out = 0
    for record, detections in found:
        if isinstance(detections, Detections):
            evaluator.add(record.id, _image_detections_from(detections))
            continue
        if on_broken == "refuse":
            raise DataError(
                f"{record.path}: {detections}; data.on_broken=skip leaves such files out"
            )
        left_out += 1
        logger.warning(
            "left out %s: %s (broken files so far: %d)", record.path, detections, left_out
        )
    return left_out


def _image_detections_from(found: Detections) -> ImageDetections:
    return ImageDetections(found.boxes, found.scores, found.labels, list(found.rles or ()))
