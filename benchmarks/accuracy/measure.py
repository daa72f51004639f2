"""Evaluation of a bundle on a COCO validation set, with a serving backend."""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from ...model.bundle.manifest import Precision, read_manifest
from ...model.image_limits import ImageError
from ...serving.backends.loading import load_backend, served_precision
from ...serving.config import BackendName
from ...serving.detections import Detections
from ...serving.engines.base import Outcome
from ...serving.offline import detect_many
from ...training.config import EvaluationConfig
from ...training.data.coco.categories import with_ids_of
from ...training.data.coco.dataset import CocoDataset, DataError, ImageRecord
from ...training.distributed import Worker
from ...training.evaluation.detections import ImageDetections
from ...training.evaluation.evaluator import CocoEvaluator
from ...training.reporting import with_progress
from ...training.terminal import terminal_progress

logger = logging.getLogger(__name__)


class ValidationSet(NamedTuple):
    """Data set on which a bundle is evaluated, and settings of the evaluation."""

    dataset: CocoDataset
    # Settings of the evaluation. Keys that matter only in training, such as early stopping, are
    # ignored.
    settings: EvaluationConfig = EvaluationConfig()
    # Whether to skip and log unreadable images, or to raise an error.
    on_broken: Literal["skip", "refuse"] = "skip"
    # Whether to apply an image's EXIF orientation, if its annotated size fits both orientations.
    exif_orientation: Literal["apply", "ignore"] = "apply"


@dataclass(frozen=True, kw_only=True)
class BundleEvaluation:
    """COCO metrics and throughput of a bundle (exported model) on a data set."""

    # Result of `coco_metrics` for boxes and masks. Empty if the metrics were not requested.
    metrics: dict[str, float]
    # Number of images that the bundle processed.
    images: int
    # Number of images of the annotation file that were skipped.
    left_out: int
    # Time from reading the first image file to the last image's detections, without warm-up.
    seconds: float
    backend: str
    device: Literal["cpu", "cuda"]
    precision: Precision
    max_batch: int

    @property
    def images_per_second(self) -> float:
        """Processed images per second."""
        return self.images / self.seconds


def evaluate_bundle(
    bundle: Path,
    data: ValidationSet,
    *,
    backend: BackendName = "auto",
    precision: Precision | None = None,
    output: Path | None = None,
    report: Path | None = None,
) -> BundleEvaluation:
    """Measure accuracy and speed of a bundle, with the backends and processing steps of the server.

    The EXIF orientation of an image is applied or ignored so that the image has its annotated size,
    as in training.

    Args:
        bundle: Folder of the bundle.
        data: Validation set.
        backend: Inference backend.
        precision: Precision to evaluate. None: the server's default precision.
        output: Folder for the result files. None: write no result files.
        report: HTML file for a report. None: write no report.

    Raises:
        BackendError: the backend does not run on this machine.
        BundleError: the bundle is damaged or lacks the precision.
        ConfigError: the data set has categories that the bundle does not know.
        DataError: no image is valid, or one image is invalid and `data.on_broken` is `refuse`.
    """
    manifest = read_manifest(bundle)
    precision = precision or served_precision(manifest, backend)
    max_batch = data.settings.images_per_batch
    worker = Worker(0, 1, torch.device("cpu"))
    with terminal_progress(worker) as progress:
        dataset = data.dataset
        categories = with_ids_of(dataset, manifest.categories)
        evaluator = CocoEvaluator(dataset, categories, worker, data.settings.evaluator)
        engine = load_backend(bundle, manifest, precision, backend, max_batch)
        with closing(engine):
            engine.warm_up(max_batch)
            start = time.perf_counter()
            detect = partial(detect_many, backend=engine, manifest=manifest, max_batch=max_batch)
            upright_first = data.exif_orientation == "apply"
            with closing(_detect(dataset.records, detect, upright_first)) as outcomes:
                shown = with_progress(outcomes, len(dataset), progress, "detecting")
                left_out = _add_detections(shown, evaluator, data.on_broken)
            seconds = time.perf_counter() - start
        if left_out == len(dataset):
            raise DataError(f"no image of {dataset.name} is valid; the log has the reasons")
        measure = not data.settings.skip_eval
        metrics = evaluator.evaluate(output, measure=measure, report=report)
    return BundleEvaluation(
        metrics=metrics,
        images=len(dataset) - left_out,
        left_out=left_out + dataset.skipped_images,
        seconds=seconds,
        backend=engine.name,
        device=engine.device,
        precision=precision,
        max_batch=max_batch,
    )


def _detect(
    records: Sequence[ImageRecord], detect: Callable[..., Iterator[Outcome]], upright_first: bool
) -> Generator[tuple[ImageRecord, Outcome], None, None]:
    """Yield each image's record with its detections, or with an error if the image is invalid.

    Detections are in the orientation in which the image was annotated.

    Args:
        records: images to process.
        detect: function that takes image paths and the argument `apply_orientation`, and yields
            detections or an error per image. `apply_orientation` states whether to rotate images
            according to their EXIF data.
        upright_first: value of `apply_orientation` in the first attempt. If the image then does
            not have its annotated size, it is processed again with the opposite value.
    """
    others = []
    for record, outcome in _pairs(records, partial(detect, apply_orientation=upright_first)):
        if isinstance(outcome, Detections) and not _has_annotated_size(outcome, record):
            others.append(record)
        else:
            yield record, outcome
    # Only some annotation tools apply the EXIF orientation. If the size is not the annotated one,
    # try the other orientation.
    for record, outcome in _pairs(others, partial(detect, apply_orientation=not upright_first)):
        if isinstance(outcome, Detections) and not _has_annotated_size(outcome, record):
            outcome = ImageError(
                f"the image is {outcome.height}x{outcome.width} pixels, but annotated as "
                f"{record.height}x{record.width}"
            )
        yield record, outcome


def _pairs(
    records: Sequence[ImageRecord], detect: Callable[..., Iterator[Outcome]]
) -> Iterator[tuple[ImageRecord, Outcome]]:
    return zip(records, detect(record.path for record in records), strict=True)


def _has_annotated_size(detections: Detections, record: ImageRecord) -> bool:
    return (detections.height, detections.width) == (record.height, record.width)


def _add_detections(
    outcomes: Iterable[tuple[ImageRecord, Outcome]],
    evaluator: CocoEvaluator,
    on_broken: Literal["skip", "refuse"],
) -> int:
    """Add detections to an evaluator, and return the number of invalid images.

    An invalid image is logged if `on_broken` is `skip`, and raises `DataError` if it is `refuse`.
    """
    invalid = 0
    for record, outcome in outcomes:
        if isinstance(outcome, Detections):
            evaluator.add(record.id, _image_detections_from(outcome))
            continue
        if on_broken == "refuse":
            raise DataError(
                f"cannot evaluate {record.path}: {outcome}; repair the file, or skip such files "
                "with data.on_broken=skip"
            )
        invalid += 1
        logger.warning("skipped %s: %s (invalid files so far: %d)", record.path, outcome, invalid)
    return invalid


def _image_detections_from(detections: Detections) -> ImageDetections:
    return ImageDetections(
        detections.boxes, detections.scores, detections.labels, list(detections.rles or ())
    )
