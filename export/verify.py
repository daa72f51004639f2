"""Comparing a bundle's ONNX files and programs of torch with their checkpoint, output by output."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..model.checkpoint import Checkpoint
from ..model.compiled_program import artifact_program
from ..model.images import decode_image, pad_to_bucket, resize_image, resized_size, smallest_bucket
from ..model.manifest import Artifact, Manifest, Precision, verified_path
from ..model.mask_rcnn import Detections, MaskRCNN
from ..model.spec import INPUT_NAMES, OUTPUT_NAMES, ShapeBucket
from ..plugins.box_iou import box_iou

_BATCH_SIZE = 4

_Input = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""A padded image [3, H, W], and its height and width before padding."""


class VerificationError(Exception):
    """An artefact does not compute what its checkpoint computes."""


class Tolerance(NamedTuple):
    """How far an artefact may be from the checkpoint in fp32."""

    boxes: float
    """Largest difference of a coordinate, in input pixels."""
    scores: float
    """Largest difference of a score."""
    masks: float
    """Largest mean difference of a mask's probabilities."""
    share: float
    """Share of the detections that may miss any of these."""


TOLERANCES: dict[Precision, Tolerance] = {
    "fp32": Tolerance(boxes=1e-2, scores=1e-4, masks=1e-3, share=0.0),
    "tf32": Tolerance(boxes=1.0, scores=2e-2, masks=2e-2, share=0.05),
    "fp16": Tolerance(boxes=1.0, scores=2e-2, masks=2e-2, share=0.05),
    "bf16": Tolerance(boxes=4.0, scores=5e-2, masks=5e-2, share=0.1),
}


@dataclass
class Comparison:
    """An artefact against its checkpoint over some images."""

    artifact: Artifact
    tolerance: Tolerance
    images: int = 0
    detections: int = 0
    missed: int = 0
    """Detections of the checkpoint that the artefact lacks, or has outside the tolerance."""
    boxes: float = 0.0
    """Largest differences among the detections that both have."""
    scores: float = 0.0
    masks: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the artefact is as close as its precision promises."""
        return self.missed <= self.tolerance.share * self.detections


def verify_bundle(
    bundle: Path, manifest: Manifest, checkpoint: Checkpoint, images: Sequence[Path]
) -> list[Comparison]:
    """Run checkpoint and artefacts on the same images, in batches of up to four.

    Args:
        bundle: folder of the artefacts.
        manifest: its manifest.
        checkpoint: what the bundle was exported from.
        images: encoded pictures; smooth noise stands in for an input size that none has.

    Returns:
        a comparison an ONNX file or program of torch; look at `passed`.

    Raises:
        ImageError: a picture cannot be read.
    """
    runs = expected_runs(checkpoint, manifest, images)
    comparisons = []
    for artifact in manifest.artifacts:
        runner = {"onnx": _session_runner, "torch": _program_runner}.get(artifact.kind)
        if runner is not None:
            infer = runner(bundle, artifact)
            comparisons.append(compare_artifact(artifact, runs[artifact.bucket], infer))
    return comparisons


class Run(NamedTuple):
    """A batch, and what the checkpoint finds in it."""

    images: NDArray[np.uint8]
    """[B, 3, H, W]."""
    image_sizes: NDArray[np.int64]
    """[B, 2] height and width before padding."""
    expected: Detections
    threshold: float
    """Score that a detection must exceed."""


Infer = Callable[[NDArray[np.uint8], NDArray[np.int64]], Sequence[NDArray[Any]]]
"""From images and their sizes to the outputs, in the order of `OUTPUT_NAMES`."""


def expected_runs(
    checkpoint: Checkpoint, manifest: Manifest, images: Sequence[Path]
) -> dict[ShapeBucket, list[Run]]:
    """Run the checkpoint on the CPU, bucket by bucket, in batches of up to four.

    Args:
        checkpoint: what to run.
        manifest: of a bundle that was exported from it.
        images: encoded pictures; smooth noise stands in for an input size that none has.

    Raises:
        ImageError: a picture cannot be read.
    """
    model = checkpoint.build_model()
    inputs = _inputs_from(images, manifest)
    return {bucket: list(_runs_of(model, own)) for bucket, own in inputs.items()}


def _runs_of(model: MaskRCNN, inputs: Sequence[_Input]) -> Iterator[Run]:
    for start in range(0, len(inputs), _BATCH_SIZE):
        batch = zip(*inputs[start : start + _BATCH_SIZE], strict=True)
        images, sizes = (np.stack(part) for part in batch)
        with torch.inference_mode():
            expected = model.detect(torch.from_numpy(images), torch.from_numpy(sizes))
        yield Run(images, sizes, expected, model.config.roi.score_threshold)


def compare_artifact(artifact: Artifact, runs: Sequence[Run], infer: Infer) -> Comparison:
    """Run an artefact on the images of the checkpoint's runs, and compare.

    Args:
        artifact: whose precision decides the tolerance.
        runs: those of its bucket.
        infer: runs the artefact.
    """
    comparison = Comparison(artifact, TOLERANCES[artifact.precision])
    for run in runs:
        outputs = infer(run.images, run.image_sizes)
        actual = Detections(*map(torch.from_numpy, outputs))
        floor = run.threshold + comparison.tolerance.scores
        for index in range(len(run.images)):
            comparison.images += 1
            rows = _rows_of(run.expected, index), _rows_of(actual, index)
            _compare_image(comparison, *rows, floor)
    return comparison


def _session_runner(bundle: Path, artifact: Artifact) -> Infer:
    session = onnxruntime.InferenceSession(verified_path(bundle, artifact))

    def infer(images: NDArray[np.uint8], image_sizes: NDArray[np.int64]) -> Sequence[NDArray[Any]]:
        arrays = images.astype(artifact.input_dtype), image_sizes
        outputs: Sequence[NDArray[Any]] = session.run(
            OUTPUT_NAMES, dict(zip(INPUT_NAMES, arrays, strict=True))
        )
        return outputs

    return infer


def _program_runner(bundle: Path, artifact: Artifact) -> Infer:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    program = artifact_program(bundle, artifact, device)

    def infer(images: NDArray[np.uint8], image_sizes: NDArray[np.int64]) -> Sequence[NDArray[Any]]:
        arrays = images.astype(artifact.input_dtype), image_sizes
        outputs = program(*(torch.from_numpy(array).to(device) for array in arrays))
        return [output.cpu().numpy() for output in outputs]

    return infer


class _Rows(NamedTuple):
    is_full: bool
    boxes: Tensor
    scores: Tensor
    labels: Tensor
    masks: Tensor


def _rows_of(detections: Detections, index: int) -> _Rows:
    count = int(detections.num_detections[index])
    parts = (part[index, :count] for part in detections[1:])
    return _Rows(count == detections.scores.shape[1], *parts)


def _compare_image(comparison: Comparison, expected: _Rows, actual: _Rows, floor: float) -> None:
    """Find every detection of the checkpoint again: same label, nearest box."""
    tolerance = comparison.tolerance
    if expected.is_full:
        floor = max(floor, float(expected.scores[-1]) + tolerance.scores)
    # Near the threshold, or the last place, rounding decides what is in and what is not.
    certain = (expected.scores > floor).nonzero()[:, 0].tolist()
    comparison.detections += len(certain)
    (overlaps,) = box_iou(expected.boxes[None], actual.boxes[None])
    overlaps = torch.where(expected.labels[:, None] == actual.labels, overlaps, -1.0)
    for row in certain:
        if actual.labels.numel() == 0 or overlaps[row].max() < 0:
            comparison.missed += 1
            continue
        match = int(overlaps[row].argmax())
        boxes = float((expected.boxes[row] - actual.boxes[match]).abs().max())
        scores = float((expected.scores[row] - actual.scores[match]).abs())
        masks = float((expected.masks[row] - actual.masks[match]).abs().mean())
        if boxes > tolerance.boxes or scores > tolerance.scores or masks > tolerance.masks:
            comparison.missed += 1
        comparison.boxes = max(comparison.boxes, boxes)
        comparison.scores = max(comparison.scores, scores)
        comparison.masks = max(comparison.masks, masks)


def _inputs_from(paths: Sequence[Path], manifest: Manifest) -> dict[ShapeBucket, list[_Input]]:
    """Padded images and their sizes by bucket; noise for a bucket that no picture falls into."""
    buckets = list(dict.fromkeys(artifact.bucket for artifact in manifest.artifacts))
    inputs: dict[ShapeBucket, list[_Input]] = {bucket: [] for bucket in buckets}
    for path in paths:
        picture = decode_image(path.read_bytes())
        preprocessing = manifest.preprocessing
        height, width = resized_size(
            picture.shape[0], picture.shape[1], preprocessing.min_size, preprocessing.max_size
        )
        bucket = smallest_bucket(height, width, buckets)
        padded = pad_to_bucket(resize_image(picture, height, width), bucket)
        inputs[bucket].append((padded, np.array((height, width), np.int64)))
    for bucket, own in inputs.items():
        if not own:
            noise = (_smooth_noise(seed, bucket) for seed in range(2))
            own.extend((pad_to_bucket(image, bucket), np.array(bucket)) for image in noise)
    return inputs


def _smooth_noise(seed: int, bucket: ShapeBucket) -> NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (8, 8, 3), np.uint8)
    return resize_image(coarse, *bucket)
