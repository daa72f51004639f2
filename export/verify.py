"""Comparison of detections of a checkpoint and of its exported ONNX files and torch programs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..model.bundle.compiled_program import load_artifact
from ..model.bundle.manifest import Artifact, Manifest, Precision, verified_path
from ..model.bundle.spec import INPUT_NAMES, OUTPUT_NAMES, ShapeBucket
from ..model.checkpoint import Checkpoint
from ..model.image_files import read_resized_image
from ..model.image_limits import ImageError
from ..model.mask_rcnn import BatchDetections, MaskRCNN
from ..model.resizing import Pixels, pad_to_bucket, resize_image, smallest_bucket
from ..plugins.box_iou import box_iou

# Images per batch of the comparison.
_BATCH_SIZE = 4

# A padded image [3, H, W], and its height and width before padding.
_Input = tuple[Pixels, NDArray[np.int64]]


class Tolerance(NamedTuple):
    """Largest allowed differences between detections of an exported model and of its checkpoint."""

    # Difference of a box coordinate, in input pixels.
    boxes: float
    # Difference of a score.
    scores: float
    # Mean difference of a mask's probabilities.
    masks: float
    # Fraction of the detections that may exceed one of the above limits or be missing.
    share: float


# TF32 and fp16 have equal limits, because both have mantissas of 10 bits. bf16 has 7 bits.
TOLERANCES: dict[Precision, Tolerance] = {
    "fp32": Tolerance(boxes=1e-2, scores=1e-4, masks=1e-3, share=0.0),
    "tf32": Tolerance(boxes=1.0, scores=2e-2, masks=2e-2, share=0.05),
    "fp16": Tolerance(boxes=1.0, scores=2e-2, masks=2e-2, share=0.05),
    "bf16": Tolerance(boxes=4.0, scores=5e-2, masks=5e-2, share=0.1),
    "int8": Tolerance(boxes=8.0, scores=0.1, masks=0.1, share=0.2),
    "fp8": Tolerance(boxes=8.0, scores=0.1, masks=0.1, share=0.2),
}


@dataclass
class Comparison:
    """Differences between detections of a checkpoint and an exported model on the same images."""

    artifact: Artifact
    tolerance: Tolerance
    images: int = 0
    detections: int = 0
    # Number of the checkpoint's detections that the artifact misses, or reproduces outside the
    # tolerance, plus the number of additional detections of the artifact.
    missed: int = 0
    # Largest differences over the matched detections, in the units of `Tolerance`. NaN: an output
    # is not finite.
    boxes: float = 0.0
    scores: float = 0.0
    masks: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether outputs are finite, and at most `tolerance.share` of the detections failed."""
        differences = (self.boxes, self.scores, self.masks)
        return bool(np.isfinite(differences).all()) and (
            self.missed <= self.tolerance.share * self.detections
        )


def verify_bundle(
    bundle: Path, manifest: Manifest, checkpoint: Checkpoint, images: Sequence[Path]
) -> list[Comparison]:
    """Compare detections of a checkpoint and of its exported ONNX files and torch programs.

    Args:
        bundle: folder of the exported files.
        manifest: manifest of the bundle.
        checkpoint: checkpoint from which the bundle was exported.
        images: image files. Each image is resized as the manifest states, and used for the smallest
            input size into which it fits. For input sizes without an image, smooth noise is used.

    Returns:
        one comparison per ONNX file and torch program.

    Raises:
        BundleError: an exported file is missing or damaged.
        ImageError: an image cannot be read, or fits no input size.
    """
    batches = reference_batches(checkpoint, manifest, images)
    comparisons = []
    for artifact in manifest.artifacts:
        runner = {"onnx": _session_runner, "torch": _program_runner}.get(artifact.kind)
        if runner is not None:
            infer = runner(bundle, artifact)
            comparisons.append(compare_artifact(artifact, batches[artifact.bucket], infer))
    return comparisons


class ReferenceBatch(NamedTuple):
    """Batch of images, and the checkpoint's detections that an exported model should reproduce."""

    # [B, 3, H, W], zero-padded.
    images: Pixels
    # [B, 2]: height and width before padding.
    image_sizes: NDArray[np.int64]
    expected: BatchDetections
    # Minimum score of the model's detections.
    threshold: float


# Function that takes a batch of images, in the model's input type, and their sizes. It returns the
# model's outputs in the order of `OUTPUT_NAMES`.
Infer = Callable[[NDArray[Any], NDArray[np.int64]], Sequence[NDArray[Any]]]


def reference_batches(
    checkpoint: Checkpoint, manifest: Manifest, images: Sequence[Path]
) -> dict[ShapeBucket, list[ReferenceBatch]]:
    """Run a checkpoint's model on images, on the CPU, and return the images and detections.

    Args:
        checkpoint: model to run.
        manifest: manifest of a bundle exported from the checkpoint.
        images: image files. Each image is used for the smallest input size into which it fits. For
            input sizes without an image, smooth noise is used.

    Returns:
        Batches of up to four images each, by input size (bucket).

    Raises:
        ImageError: an image cannot be read, or fits no input size.
    """
    model = checkpoint.build_model()
    inputs = _inputs_from(images, manifest)
    return {bucket: list(_detect_in_batches(model, own)) for bucket, own in inputs.items()}


def _detect_in_batches(model: MaskRCNN, inputs: Sequence[_Input]) -> Iterator[ReferenceBatch]:
    for start in range(0, len(inputs), _BATCH_SIZE):
        batch = zip(*inputs[start : start + _BATCH_SIZE], strict=True)
        images, sizes = (np.stack(part) for part in batch)
        with torch.inference_mode():
            expected = model.detect(torch.from_numpy(images), torch.from_numpy(sizes))
        yield ReferenceBatch(images, sizes, expected, model.config.roi.score_threshold)


def compare_artifact(
    artifact: Artifact, batches: Sequence[ReferenceBatch], infer: Infer
) -> Comparison:
    """Run an exported model on batches, and compare its detections with the checkpoint's.

    Args:
        artifact: manifest entry of the model. Its precision selects the tolerance.
        batches: images of the model's input size, with the checkpoint's detections.
        infer: function that runs the model on images and their sizes, and returns its outputs.
    """
    comparison = Comparison(artifact, TOLERANCES[artifact.precision])
    for batch in batches:
        outputs = infer(batch.images.astype(artifact.input_dtype), batch.image_sizes)
        actual = BatchDetections(*map(torch.from_numpy, outputs))
        floor = batch.threshold + comparison.tolerance.scores
        for index in range(len(batch.images)):
            comparison.images += 1
            rows = _detections_of_image(batch.expected, index), _detections_of_image(actual, index)
            _compare_image(comparison, *rows, floor)
    return comparison


def _session_runner(bundle: Path, artifact: Artifact) -> Infer:
    session = onnxruntime.InferenceSession(verified_path(bundle, artifact))
    return lambda *inputs: session.run(OUTPUT_NAMES, dict(zip(INPUT_NAMES, inputs, strict=True)))


def _program_runner(bundle: Path, artifact: Artifact) -> Infer:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    program = load_artifact(bundle, artifact, device)

    def infer(*inputs: NDArray[Any]) -> Sequence[NDArray[Any]]:
        outputs = program(*(torch.from_numpy(array).to(device) for array in inputs))
        return [output.cpu().numpy() for output in outputs]

    return infer


class _DetectionsOfImage(NamedTuple):
    # Whether the image has as many detections as the model can return.
    is_full: bool
    boxes: Tensor
    scores: Tensor
    labels: Tensor
    masks: Tensor


def _detections_of_image(detections: BatchDetections, index: int) -> _DetectionsOfImage:
    count = int(detections.num_detections[index])
    parts = (part[index, :count] for part in detections[1:])
    return _DetectionsOfImage(count == detections.scores.shape[1], *parts)


def _compare_image(
    comparison: Comparison, expected: _DetectionsOfImage, actual: _DetectionsOfImage, floor: float
) -> None:
    """Compare each expected detection with the actual one of the same label that overlaps most.

    Only detections with scores above `floor` count. `comparison.missed` increases by one for each
    expected detection without a match within the tolerance, and for each actual detection that
    matches no expected one.

    Args:
        comparison: result to update.
        expected: the checkpoint's detections.
        actual: the exported model's detections.
        floor: score threshold. If `expected` has the maximum number of detections, the threshold is
            at least the lowest expected score plus the score tolerance.
    """
    tolerance = comparison.tolerance
    if expected.is_full:
        floor = max(floor, float(expected.scores[-1]) + tolerance.scores)
    # An output that is not finite is a fault, even if no expected detection matches it.
    for name in ("boxes", "scores", "masks"):
        if not getattr(actual, name).isfinite().all():
            setattr(comparison, name, float("nan"))
    # Compare only detections above the floor, because rounding decides whether a detection near the
    # model's threshold, or at the end of a full list, appears.
    certain = (expected.scores > floor).nonzero()[:, 0].tolist()
    comparison.detections += len(certain)
    (overlaps,) = box_iou(expected.boxes[None], actual.boxes[None])
    overlaps = torch.where(expected.labels[:, None] == actual.labels, overlaps, -1.0)
    # Not `max() >= 0`, which is false for NaN.
    matches = [int(own.argmax()) if len(own) and not own.max() < 0 else None for own in overlaps]
    additional = {*(actual.scores > floor).nonzero()[:, 0].tolist()}.difference(matches)
    comparison.missed += len(additional)
    for row in certain:
        match = matches[row]
        if match is None:
            comparison.missed += 1
            continue
        boxes = float((expected.boxes[row] - actual.boxes[match]).abs().max())
        scores = float((expected.scores[row] - actual.scores[match]).abs())
        masks = float((expected.masks[row] - actual.masks[match]).abs().mean())
        differences = np.array([boxes, scores, masks])
        # Not `differences > limits`, which is false for NaN.
        if not (differences <= tolerance[:3]).all():
            comparison.missed += 1
        # np.maximum returns NaN if one of its arguments is NaN, unlike max.
        largest = np.maximum([comparison.boxes, comparison.scores, comparison.masks], differences)
        comparison.boxes, comparison.scores, comparison.masks = largest.tolist()


def _inputs_from(paths: Sequence[Path], manifest: Manifest) -> dict[ShapeBucket, list[_Input]]:
    """Return padded images and their sizes before padding, by input size (bucket).

    Each image is resized as the manifest states, and used for the manifest's smallest input size
    into which it fits. If an input size has no image, it gets two images of smooth noise.

    Raises:
        ImageError: an image cannot be read, or fits no input size.
    """
    buckets = list(dict.fromkeys(artifact.bucket for artifact in manifest.artifacts))
    inputs: dict[ShapeBucket, list[_Input]] = {bucket: [] for bucket in buckets}
    for path in paths:
        image = read_resized_image(path, manifest.preprocessing)
        height, width, _ = image.shape
        try:
            bucket = smallest_bucket(height, width, buckets)
        except ImageError as error:
            raise ImageError(
                f"{path}: {error}; leave the image out, or export with a larger --shape"
            ) from error
        size = np.array([height, width], np.int64)
        inputs[bucket].append((pad_to_bucket(image, bucket), size))
    for bucket, own in inputs.items():
        if not own:
            noise = (_smooth_noise(seed, bucket) for seed in range(2))
            own.extend((pad_to_bucket(image, bucket), np.array(bucket)) for image in noise)
    return inputs


def _smooth_noise(seed: int, bucket: ShapeBucket) -> Pixels:
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (8, 8, 3), np.uint8)
    return resize_image(coarse, *bucket)
