from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from bundle_copies import linked_copy
from many_requests import NO_LISTS, kind_of
from numpy.typing import NDArray
from PIL import Image
from pycocotools import mask as coco_mask
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.models.detection.transform import resize_boxes
from torchvision.ops import clip_boxes_to_image

from maskrcnn_trt.model.bundle.manifest import BundleError, read_manifest, write_manifest
from maskrcnn_trt.model.image_limits import ImageError
from maskrcnn_trt.serving.detections import DetectionOptions, SchedulingOptions
from maskrcnn_trt.serving.errors import BackendError, InvalidRequestError
from maskrcnn_trt.serving.offline import Detector

Encode = Callable[..., bytes]


@pytest.mark.parametrize(("height", "width"), [(120, 200), (333, 250), (50, 400)])
def test_detections_equal_torchvisions_postprocessing(
    bundle: Path, predictor: Detector, picture: Encode, height: int, width: int
) -> None:
    data = picture(size=(height, width), codec="PNG")
    scale = min(96 / min(height, width), 160 / max(height, width))
    resized = int(height * scale), int(width * scale)
    bucket = (96, 160) if resized[1] > resized[0] else (160, 96)
    images = np.zeros((1, 3, *bucket), np.uint8)
    pixels = Image.open(BytesIO(data)).resize(resized[::-1], Image.Resampling.BILINEAR)
    images[0, :, : resized[0], : resized[1]] = np.array(pixels).transpose(2, 0, 1)
    (artifact,) = (a for a in read_manifest(bundle).artifacts if a.bucket == bucket)
    session = onnxruntime.InferenceSession(
        bundle / artifact.path, providers=["CPUExecutionProvider"]
    )
    names = ["num_detections", "boxes", "scores", "labels", "masks"]
    num_detections, boxes, scores, labels, masks = (
        torch.from_numpy(output)
        for output in session.run(
            names, {"images": images, "image_sizes": np.array([resized], np.int64)}
        )
    )
    count = int(num_detections[0])
    assert count > 0
    boxes = resize_boxes(boxes[0, :count], list(resized), [height, width])
    boxes = clip_boxes_to_image(boxes, (height, width))
    pasted = paste_masks_in_image(masks[0, :count, None], boxes, (height, width)) > 0.5

    detections = predictor.detect(data)
    np.testing.assert_array_equal(detections.boxes, boxes.numpy())
    np.testing.assert_array_equal(detections.scores, scores[0, :count].numpy())
    np.testing.assert_array_equal(detections.labels, labels[0, :count].numpy())
    assert detections.rles is not None
    assert [rle.counts for rle in detections.rles] == [
        coco_mask.encode(np.asfortranarray(mask[0].numpy().astype(np.uint8)))["counts"]
        for mask in pasted
    ]


def test_manifest_of_another_model_is_refused(
    bundle: Path, tmp_path: Path, picture: Encode
) -> None:
    copy = linked_copy(bundle, tmp_path / "bundle")
    (copy / "manifest.json").unlink()
    write_manifest(copy, read_manifest(bundle).model_copy(update={"mask_side": 14}))
    with (
        Detector(copy) as other,
        pytest.raises(BundleError, match=r"mask_side.*export"),
    ):
        other([picture()])


def test_pixel_limit(predictor: Detector, picture: Encode) -> None:
    with pytest.raises(ImageError, match="1000 pixels"):
        predictor.detect(picture(), max_pixels=1000)
    # Too large to be copied.
    pixels = np.broadcast_to(np.uint8(3), (2**20, 2**20, 3))
    with pytest.raises(ImageError, match="1048576x1048576 pixels"):
        predictor.detect(pixels)
    with pytest.raises(ImageError, match="1048576x1048576 pixels"):
        predictor([pixels])


def test_missing_bundle_and_precision(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"manifest\.json"):
        Detector(tmp_path)
    with pytest.raises(BundleError, match="no fp16 onnx artifact, only fp32 onnx"):
        Detector(bundle, "fp16")


def test_modified_artefact_is_rejected(bundle: Path, tmp_path: Path) -> None:
    for path in bundle.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    artifact = read_manifest(bundle).artifacts[-1]
    with (tmp_path / artifact.path).open("ab") as file:
        file.write(b"\0")
    with pytest.raises(BundleError, match=r"\.onnx"):
        Detector(tmp_path)


def test_several_images_are_detected_in_one_call(
    bundle: Path, predictor: Detector, picture: Encode, tmp_path: Path
) -> None:
    first, second = (picture(size=size) for size in ((120, 200), (90, 60)))
    path = tmp_path / "second.jpg"
    path.write_bytes(second)
    expected = [predictor.detect(data) for data in (first, second, second)]
    found = predictor([first, path, str(path)])
    assert [d.rles for d in found] == [d.rles for d in expected]
    assert predictor.detect(str(path)).rles == expected[1].rles
    assert sum(len(d.scores) for d in found) > 0
    path.write_bytes(second[:200])
    invalid = {
        "image 1: .*damaged": second[:200],
        f"{path}: .*damaged": path,
        "no/a.jpg: ": "no/a.jpg",
    }
    for message, source in invalid.items():
        with pytest.raises(ImageError, match=message):
            predictor(iter([first, source]))


def test_closed_detector_raises(bundle: Path, picture: Encode) -> None:
    with Detector(bundle) as closed:
        late = closed.detect_many([picture()])
        closed.close()
    for detect in (lambda: closed.detect(picture()), lambda: closed([picture()]), late.__next__):
        with pytest.raises(BackendError, match="detector is closed"):
            detect()


@pytest.mark.parametrize("image", NO_LISTS, ids=kind_of)
def test_one_image_is_no_list(predictor: Detector, image: Any) -> None:
    for detect in (predictor, predictor.detect_many):
        with pytest.raises(TypeError, match=f"images must be a list.* {kind_of(image)}"):
            detect(image)


def test_one_array_may_hold_all_images_in_turn(predictor: Detector) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 120, 200, 3), np.uint8)
    frame = np.empty_like(pixels[0])

    def frames() -> Iterator[NDArray[np.uint8]]:
        for frame[:] in pixels:
            yield frame

    expected = [predictor.detect(image).rles for image in pixels]
    assert [d.rles for d in predictor(frames())] == expected


def test_failing_iteration_keeps_the_results_before_it(
    predictor: Detector, picture: Encode
) -> None:
    def images() -> Iterator[bytes]:
        yield from [picture()] * 2
        raise KeyError

    sources: list[tuple[Any, type[Exception]]] = [
        (images(), KeyError),
        ([picture(), picture(), None, picture()], TypeError),
    ]
    for source, error in sources:
        outcomes = predictor.detect_many(source)
        assert [len(next(outcomes)) > 0 for _ in range(2)] == [True, True]
        with pytest.raises(error):
            next(outcomes)


def test_closing_during_the_iteration_ends_it(bundle: Path, picture: Encode) -> None:
    with Detector(bundle) as closed:

        def images() -> Iterator[bytes]:
            yield picture()
            closed.close()
            yield picture()

        with pytest.raises(BackendError, match="detector is closed"):
            list(closed.detect_many(images()))


def test_images_that_were_read_before_closing_raise(bundle: Path, picture: Encode) -> None:
    with Detector(bundle) as closed:
        outcomes = closed.detect_many([picture()] * 4)  # all are read before the first outcome
        next(outcomes)
        closed.close()
        with pytest.raises(BackendError, match="detector is closed"):
            list(outcomes)


@pytest.mark.parametrize(
    ("image", "error", "reason"),
    [
        (None, TypeError, "a uint8 array.*, not NoneType"),
        (bytearray(b"content"), TypeError, "not bytearray"),
        (np.zeros((8, 8, 3), np.float32), TypeError, "not array of float32"),
        (np.zeros((8, 8), np.uint8), ImageError, r"shape \[8, 8\]"),
        (Path("a\0b.jpg"), ImageError, "the path is invalid.* null"),
    ],
    ids=["None", "bytearray", "float32", "shape", "NUL"],
)
def test_invalid_images(
    predictor: Detector, image: Any, error: type[Exception], reason: str
) -> None:
    for detect in (lambda: predictor.detect(image), lambda: predictor([image])):
        with pytest.raises(error, match=reason):
            detect()


def test_invalid_arguments(bundle: Path) -> None:
    unknown: Any = "tensorflow"
    with pytest.raises(BackendError, match=r"'tensorflow'.*onnxruntime"):
        Detector(bundle, backend=unknown)
    numbers: list[Any] = [0, 1.5, np.nan, None, True, "8"]
    for number in numbers:
        with pytest.raises(ValueError, match=f"max_batch is {number!r}"):
            Detector(bundle, max_batch=number)
    with pytest.raises(BundleError, match="not a path"):
        Detector("a\0b")


def test_mask_format_by_its_value(predictor: Detector, picture: Encode) -> None:
    options: Any = {"mask_format": "polygon"}
    assert predictor.detect(picture(), DetectionOptions(**options)).polygons
    with pytest.raises(InvalidRequestError, match=r"mask_format is 'polygons'.* polygon"):
        DetectionOptions(**options | {"mask_format": "polygons"})


@pytest.mark.parametrize("invalid", [None, {"score_threshold": 0.5}, SchedulingOptions()])
def test_options_of_another_class(predictor: Detector, picture: Encode, invalid: Any) -> None:
    detect: Callable[[], Any]
    for detect in (
        lambda: predictor.detect(picture(), invalid),
        lambda: predictor.detect_many([picture()], invalid),
    ):
        with pytest.raises(TypeError, match=f"DetectionOptions, not {type(invalid).__name__}"):
            detect()


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        (DetectionOptions, "max_detections", 1.5),
        (DetectionOptions, "score_threshold", "0.5"),
        (SchedulingOptions, "timeout_s", "3"),
        (SchedulingOptions, "precision", 3),
        (SchedulingOptions, "priority", 1.0),
        (SchedulingOptions, "model", None),
    ],
)
def test_types_of_options(options: Any, name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} is {value!r}; it must be a"):
        options(**{name: value})


def test_options_may_be_numpy_numbers() -> None:
    numbers: Any = {"score_threshold": np.float32(0.25), "max_detections": np.int64(2)}
    options = DetectionOptions(score_threshold=0.25, max_detections=2)
    assert DetectionOptions(**numbers) == options
