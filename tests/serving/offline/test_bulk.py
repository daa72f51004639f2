"""Detection in many images: what is found does not depend on batches, threads or neighbours."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maskrcnn_trt.model.images import ImageError
from maskrcnn_trt.model.manifest import Manifest, read_manifest
from maskrcnn_trt.model.masks import mask_from_rle
from maskrcnn_trt.serving.backends.base import Backend
from maskrcnn_trt.serving.backends.loading import load_backend
from maskrcnn_trt.serving.detections import DetectionOptions, Detections, MaskFormat
from maskrcnn_trt.serving.offline.bulk import detect_many
from maskrcnn_trt.serving.offline.predictor import Predictor

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
def _no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def assert_same(own: Detections | ImageError, other: Detections | ImageError) -> None:
    """Equal but for how a batch rounds: masks may differ in pixels on their edge."""
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
def test_each_image_gets_what_it_gets_alone(
    bundle: Path, backend: Backend, manifest: Manifest, picture: Encode, max_batch: int
) -> None:
    sizes = [LANDSCAPE, PORTRAIT, LANDSCAPE, LANDSCAPE, (50, 50), PORTRAIT, LANDSCAPE]
    codecs = ["JPEG", "JPEG", "PNG", "JPEG", "WEBP", "JPEG", "JPEG"]
    images = [picture(n, s, c) for n, (s, c) in enumerate(zip(sizes, codecs, strict=True))]
    predictor = Predictor(bundle)
    found = list(detect_many(images, backend, manifest, max_batch=max_batch))
    assert len(found) == len(images)
    for own, image in zip(found, images, strict=True):
        assert_same(own, predictor.detect(image))


def test_nothing_comes_of_nothing(backend: Backend, manifest: Manifest) -> None:
    assert list(detect_many([], backend, manifest)) == []


def test_no_detection_is_an_answer(backend: Backend, manifest: Manifest, picture: Encode) -> None:
    options = DetectionOptions(score_threshold=1)
    (found,) = detect_many([picture()], backend, manifest, options)
    assert isinstance(found, Detections)
    assert len(found) == 0
    assert found.rles == ()


@pytest.mark.parametrize("masks", [MaskFormat.PROBABILITIES, MaskFormat.NONE])
def test_masks_have_the_form_asked_for(
    bundle: Path, backend: Backend, manifest: Manifest, picture: Encode, masks: MaskFormat
) -> None:
    options = DetectionOptions(mask_format=masks, max_detections=3)
    images = [picture(1), picture(2)]
    for own, image in zip(detect_many(images, backend, manifest, options), images, strict=True):
        other = Predictor(bundle).detect(image, options)
        assert_same(own, other)
        assert isinstance(own, Detections)
        assert own.rles is None
        assert (own.mask_probabilities is None) == (masks is MaskFormat.NONE)


def test_damaged_images_are_named_in_their_place(
    backend: Backend, manifest: Manifest, picture: Encode
) -> None:
    whole = picture(5)
    images = [
        whole,
        b"",
        whole[: len(whole) * 7 // 8],
        whole,
        b"no image",
        whole,
        picture(size=(4, 9)),
    ]
    found = list(detect_many(images, backend, manifest, max_batch=4))
    assert [isinstance(outcome, ImageError) for outcome in found] == [
        False, True, True, False, True, False, True
    ]  # fmt: skip
    for place, sentence in (
        (1, "is empty"),
        (2, "truncated or damaged"),
        (4, "no JPEG"),
        (6, "at least 8"),
    ):
        assert sentence in str(found[place])
    assert_same(found[0], found[3])
    assert_same(found[0], found[5])


def test_files_are_read_and_those_that_cannot_be_are_named_in_their_place(
    backend: Backend, manifest: Manifest, picture: Encode, tmp_path: Path
) -> None:
    path = tmp_path / "picture.jpg"
    path.write_bytes(picture())
    sources = [path, tmp_path / "gone.jpg", picture(), tmp_path]
    first, gone, second, folder = detect_many(sources, backend, manifest, max_batch=4)
    assert_same(first, second)
    for outcome, reason in ((gone, "No such file or directory"), (folder, "Is a directory")):
        assert isinstance(outcome, ImageError)
        assert str(outcome) == f"the file cannot be read ({reason})"


def test_large_images_are_refused_by_their_header(
    backend: Backend, manifest: Manifest, picture: Encode
) -> None:
    (found,) = detect_many([picture()], backend, manifest, max_pixels=1000)
    assert isinstance(found, ImageError)
    assert "more than the 1000 pixels allowed" in str(found)


@pytest.mark.parametrize("codec", ["JPEG", "PNG"])
def test_orientation_is_obeyed_or_not(
    backend: Backend, manifest: Manifest, picture: Encode, codec: str
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = picture(3, LANDSCAPE, codec, exif=exif)
    (upright,) = detect_many([turned], backend, manifest)
    (stored,) = detect_many([turned], backend, manifest, apply_orientation=False)
    (plain,) = detect_many([picture(3, LANDSCAPE, codec)], backend, manifest)
    assert isinstance(upright, Detections)
    assert (upright.height, upright.width) == PORTRAIT
    assert_same(stored, plain)


def test_images_are_taken_as_results_are(
    backend: Backend, manifest: Manifest, picture: Encode
) -> None:
    taken = []

    def images() -> Iterator[bytes]:
        for number in range(100):
            taken.append(number)
            yield b"no image" if number % 2 else picture(0, PORTRAIT)

    results = detect_many(images(), backend, manifest, max_batch=1)
    next(results)
    assert len(taken) <= 10
    results.close()


def test_rare_sizes_hold_nobody_up_for_good(
    backend: Backend, manifest: Manifest, picture: Encode
) -> None:
    """The one portrait never fills a batch, and comes out while there are landscapes to come."""
    landscape, portrait = picture(0, LANDSCAPE), picture(0, PORTRAIT)
    taken = []

    def images() -> Iterator[bytes]:
        for number in range(60):
            taken.append(number)
            yield landscape if number else portrait

    results = detect_many(images(), backend, manifest, max_batch=2)
    first = next(results)
    assert isinstance(first, Detections)
    assert (first.height, first.width) == PORTRAIT
    assert len(taken) < 60
    assert sum(1 for _ in results) == 59


def test_faults_of_the_source_of_images_are_its_own(
    backend: Backend, manifest: Manifest, picture: Encode
) -> None:
    def images() -> Iterator[bytes]:
        yield picture()
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        list(detect_many(images(), backend, manifest))
