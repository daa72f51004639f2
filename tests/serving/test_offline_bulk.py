"""Bulk detection: results do not depend on batches, threads or other images."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maskrcnn_trt.model.bundle.manifest import Manifest, read_manifest
from maskrcnn_trt.model.image_limits import ImageError
from maskrcnn_trt.model.masks import mask_from_rle
from maskrcnn_trt.serving.backends.base import Backend
from maskrcnn_trt.serving.backends.loading import load_backend
from maskrcnn_trt.serving.detections import DetectionOptions, Detections, MaskFormat
from maskrcnn_trt.serving.offline import Detector, detect_many

Encode = Callable[..., bytes]
LANDSCAPE, PORTRAIT = (60, 100), (100, 60)


@pytest.fixture(scope="module")
def manifest(bundle: Path) -> Manifest:
    return read_manifest(bundle)


@pytest.fixture(scope="module")
def backend(bundle: Path, manifest: Manifest) -> Iterator[Backend]:
    backend = load_backend(bundle, manifest, "fp32", "onnxruntime", max_batch=4)
    yield backend
    backend.close()


@pytest.fixture(autouse=True)
def _no_leaked_threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def assert_same(own: Detections | ImageError, other: Detections | ImageError) -> None:
    """Assert equality up to the rounding of batches: masks may differ in edge pixels."""
    assert isinstance(own, Detections)
    assert isinstance(other, Detections)
    assert (own.height, own.width) == (other.height, other.width)
    assert own.class_names == other.class_names
    np.testing.assert_array_equal(own.category_ids, other.category_ids)
    np.testing.assert_allclose(own.boxes, other.boxes, atol=1e-2)
    np.testing.assert_allclose(own.scores, other.scores, atol=1e-4)
    if own.rles is None or other.rles is None:
        assert own.rles is other.rles
        return
    for rle, expected in zip(own.rles, other.rles, strict=True):
        assert (mask_from_rle(rle) != mask_from_rle(expected)).mean() < 0.01


@pytest.mark.parametrize("max_batch", [1, 3, 4])
def test_batches_do_not_change_the_results(
    predictor: Detector, backend: Backend, manifest: Manifest, picture: Encode, max_batch: int
) -> None:
    sizes = [LANDSCAPE, PORTRAIT, LANDSCAPE, LANDSCAPE, (50, 50), PORTRAIT, LANDSCAPE]
    codecs = ["JPEG", "JPEG", "PNG", "JPEG", "WEBP", "JPEG", "JPEG"]
    images = [picture(n, s, c) for n, (s, c) in enumerate(zip(sizes, codecs, strict=True))]
    outcomes = list(detect_many(images, backend, manifest, max_batch=max_batch))
    assert len(outcomes) == len(images)
    for own, image in zip(outcomes, images, strict=True):
        assert_same(own, predictor.detect(image))


def test_no_images_and_no_detections(backend: Backend, manifest: Manifest, picture: Encode) -> None:
    assert list(detect_many([], backend, manifest)) == []
    options = DetectionOptions(score_threshold=1)
    (outcome,) = detect_many([picture()], backend, manifest, options)
    assert isinstance(outcome, Detections)
    assert (outcome.boxes.shape, outcome.rles) == ((0, 4), ())


@pytest.mark.parametrize("masks", [MaskFormat.PROBABILITIES, MaskFormat.NONE])
def test_mask_formats_of_bulk_detection(
    predictor: Detector, backend: Backend, manifest: Manifest, picture: Encode, masks: MaskFormat
) -> None:
    options = DetectionOptions(mask_format=masks, max_detections=3)
    images = [picture(1), picture(2)]
    for own, image in zip(detect_many(images, backend, manifest, options), images, strict=True):
        assert_same(own, predictor.detect(image, options))
        assert isinstance(own, Detections)
        assert own.rles is None
        assert (own.mask_probabilities is None) == (masks is MaskFormat.NONE)


def test_invalid_images_yield_errors_in_order(
    backend: Backend, manifest: Manifest, picture: Encode, tmp_path: Path
) -> None:
    path = tmp_path / "picture.jpg"
    path.write_bytes(whole := picture(5))
    images: list[tuple[bytes | Path, str]] = [  # with the error
        (whole, ""),
        (b"", "is empty"),
        (whole[: len(whole) * 7 // 8], "truncated or damaged"),
        (path, ""),
        (b"no image", "JPEG"),
        (tmp_path / "gone.jpg", "No such file or directory"),
        (whole, ""),
        (picture(size=(4, 9)), "at least 8"),
        (tmp_path, "Is a directory"),
    ]
    sources = [image for image, _ in images]
    outcomes = list(detect_many(sources, backend, manifest, max_batch=4))
    for outcome, (_, message) in zip(outcomes, images, strict=True):
        if message:
            assert isinstance(outcome, ImageError)
            assert message in str(outcome)
        else:
            assert_same(outcomes[0], outcome)


@pytest.mark.parametrize("codec", ["JPEG", "PNG"])
def test_exif_orientation_is_optional(
    backend: Backend, manifest: Manifest, picture: Encode, codec: str
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    rotated = picture(3, LANDSCAPE, codec, exif=exif)
    (upright,) = detect_many([rotated], backend, manifest)
    (stored,) = detect_many([rotated], backend, manifest, apply_orientation=False)
    (plain,) = detect_many([picture(3, LANDSCAPE, codec)], backend, manifest)
    assert isinstance(upright, Detections)
    assert (upright.height, upright.width) == PORTRAIT
    assert_same(stored, plain)


def test_read_ahead_is_bounded(backend: Backend, manifest: Manifest, picture: Encode) -> None:
    read = []

    def images() -> Iterator[bytes]:
        for number in range(100):
            read.append(number)
            yield b"no image" if number % 2 else picture(0, PORTRAIT)

    results = detect_many(images(), backend, manifest, max_batch=1)
    next(results)
    assert len(read) <= 10
    results.close()


def test_incomplete_batch_is_started_before_the_end(
    backend: Backend, manifest: Manifest, picture: Encode
) -> None:
    """A single portrait never fills a batch, but is finished before the last landscape."""
    landscape, portrait = picture(0, LANDSCAPE), picture(0, PORTRAIT)
    read = []

    def images() -> Iterator[bytes]:
        for number in range(60):
            read.append(number)
            yield landscape if number else portrait

    results = detect_many(images(), backend, manifest, max_batch=2)
    first = next(results)
    assert isinstance(first, Detections)
    assert (first.height, first.width) == PORTRAIT
    assert len(read) < 60
    assert sum(1 for _ in results) == 59


def test_error_of_the_images_is_raised(
    backend: Backend, manifest: Manifest, picture: Encode
) -> None:
    def images() -> Iterator[bytes]:
        yield picture()
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        list(detect_many(images(), backend, manifest))
