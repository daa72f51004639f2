from collections.abc import Callable, Sequence
from typing import Any, get_args

import grpc
import numpy as np
import pytest
import shapely
import torch
from numpy.typing import NDArray
from pycocotools import mask as coco_mask

from maskrcnn_trt.model.masks import MaskPaste, rles_from_probabilities
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.client import DetectorClient
from maskrcnn_trt.serving.detections import DetectionOptions, Detections, MaskFormat, Outlines
from maskrcnn_trt.serving.engines.postprocessing import polygons_from_probabilities
from maskrcnn_trt.serving.messages import detections_from_response, encode_detections
from maskrcnn_trt.serving.offline import Detector

Encode = Callable[..., bytes]
HEIGHT, WIDTH = 300, 400
POLYGONS = DetectionOptions(mask_format=MaskFormat.POLYGON)

pastes = pytest.mark.parametrize("paste", get_args(MaskPaste))
sides = pytest.mark.parametrize("side", [28, 56])


def disc(side: int, x: float = 0.5, y: float = 0.5, radius: float = 0.4) -> NDArray[np.float32]:
    """Return probabilities that fall from 1 to 0 at a circle; lengths in sides of the mask."""
    centres = (np.arange(side) + 0.5) / side
    distance = np.hypot(centres - x, centres[:, None] - y)
    return (1 / (1 + np.exp(30 * (distance - radius)))).astype(np.float32)


def ring(side: int) -> NDArray[np.float32]:
    return disc(side) - disc(side, radius=0.2)


def two_blobs(side: int) -> NDArray[np.float32]:
    return np.maximum(disc(side, 0.25, 0.3, 0.2), disc(side, 0.75, 0.6, 0.2))


def ones(side: int) -> NDArray[np.float32]:
    return np.ones((side, side), np.float32)


def outlines_of(
    mask: NDArray[np.float32], box: Sequence[float], paste: MaskPaste = "detectron2"
) -> Outlines:
    boxes = np.array([box], np.float32)
    (outlines,) = polygons_from_probabilities(mask[None], boxes, HEIGHT, WIDTH, paste)
    return outlines


def encoded(mask: NDArray[np.float32], box: Sequence[float], paste: MaskPaste) -> Any:
    """Return the mask as COCO RLE in the format of pycocotools."""
    boxes = np.array([box], np.float32)
    (rle,) = rles_from_probabilities(mask[None], boxes, HEIGHT, WIDTH, paste=paste)
    return {"size": [HEIGHT, WIDTH], "counts": rle.counts}


def rasterised(outlines: Outlines) -> Any:
    """Rasterise outlines with pycocotools, as COCO RLE."""
    rings = [outline.ravel().tolist() for outline in outlines]
    return coco_mask.merge(coco_mask.frPyObjects(rings, HEIGHT, WIDTH))


def overlap(left: Any, right: Any) -> float:
    """Return the intersection over union."""
    return float(coco_mask.iou([left], [right], [0])[0, 0])


@pastes
@sides
@pytest.mark.parametrize(
    "box",
    [
        (40.3, 51.7, 80.6, 90.1),
        (10.9, 20.2, 320.4, 241.7),
        (0.0, 0.0, 70.5, 60.5),
        (330.2, 230.8, 400.0, 300.0),
        (0.0, 0.0, 400.0, 300.0),
    ],
    ids=["small", "large", "first corner", "last corner", "whole image"],
)
@pytest.mark.parametrize(
    ("shape", "filled", "count"),
    [(disc, disc, 1), (ring, disc, 1), (two_blobs,) * 2 + (2,), (ones, ones, 1)],
    ids=["disc", "ring", "two blobs", "full"],
)
def test_polygons_cover_the_mask_without_holes(
    shape: Callable[[int], NDArray[np.float32]],
    filled: Callable[[int], NDArray[np.float32]],
    count: int,
    box: Sequence[float],
    side: int,
    paste: MaskPaste,
) -> None:
    outlines = outlines_of(shape(side), box, paste)
    assert len(outlines) == count
    assert overlap(rasterised(outlines), encoded(filled(side), box, paste)) > 0.95


@pytest.mark.parametrize("seed", range(3))
@pastes
def test_polygons_of_many_masks(seed: int, paste: MaskPaste) -> None:
    rng = np.random.default_rng(seed)
    masks = np.stack([disc(28, *rng.uniform(0.4, 0.6, 2), rng.uniform(0.3, 0.7)) for _ in range(8)])
    corners = rng.uniform(0, 1, (8, 2)) * [300, 200]
    boxes = np.concatenate([corners, corners + rng.uniform(40, 100, (8, 2))], 1).astype(np.float32)
    polygons = polygons_from_probabilities(masks, boxes, HEIGHT, WIDTH, paste)
    for outlines, mask, box in zip(polygons, masks, boxes, strict=True):
        assert overlap(rasterised(outlines), encoded(mask, box.tolist(), paste)) > 0.95


@sides
def test_vertices_lie_at_probability_one_half(side: int) -> None:
    mask = np.random.default_rng(0).random((side, side), dtype=np.float32)
    left, top, right, bottom = box = (20.25, 30.75, 190.5, 280.0)
    x, y = torch.from_numpy(np.concatenate(outlines_of(mask, box)).astype(np.float64)).T
    assert len(x) > side
    position = torch.stack([(x - left) / (right - left), (y - top) / (bottom - top)], dim=1)
    values = torch.nn.functional.grid_sample(
        torch.from_numpy(mask.astype(np.float64))[None, None],
        2 * position[None, None] - 1,
        align_corners=False,
    )
    np.testing.assert_allclose(values.numpy(), 0.5, atol=1e-4)


@pastes
@pytest.mark.parametrize("seed", range(3))
def test_outlines_are_simple_and_clockwise(seed: int, paste: MaskPaste) -> None:
    """Many of the outlines touch the edge of the image."""
    mask = np.random.default_rng(seed).random((28, 28), dtype=np.float32)
    outlines = outlines_of(mask, (0.0, 250.5, 60.5, 300.0), paste)
    assert len(outlines) > 3
    for outline in outlines:
        assert outline.dtype == np.float32
        assert outline.shape[1] == 2
        assert (outline != np.roll(outline, 1, axis=0)).any(axis=1).all()
        polygon = shapely.Polygon(outline)
        assert polygon.is_valid
        assert polygon.area > 0
        assert polygon.exterior.is_ccw  # with y up, which is clockwise with y down


@sides
def test_a_full_mask_is_its_box(side: int) -> None:
    box = (40.25, 50.5, 140.75, 101.0)
    (outline,) = outlines_of(ones(side), box)
    polygon = shapely.Polygon(outline)
    np.testing.assert_allclose(polygon.bounds, box, atol=1e-3)
    assert polygon.area > 0.999 * shapely.box(*box).area
    (of_whole_pixels,) = outlines_of(ones(side), box, "torchvision")
    np.testing.assert_allclose(shapely.Polygon(of_whole_pixels).bounds, box, atol=1)


@pastes
def test_outlines_are_clipped_to_the_image(paste: MaskPaste) -> None:
    (outline,) = outlines_of(ones(28), (-50.0, 100.0, 450.0, 420.0), paste)
    np.testing.assert_allclose(shapely.Polygon(outline).bounds, (0, 100, 400, 300), atol=1)
    assert outlines_of(ones(28), (500.0, 100.0, 600.0, 200.0), paste) == ()


@pastes
def test_an_empty_mask_and_an_empty_box_have_no_outline(paste: MaskPaste) -> None:
    box = (40.3, 51.7, 80.6, 90.1)
    assert outlines_of(np.zeros((28, 28), np.float32), box, paste) == ()
    assert outlines_of(np.full((28, 28), 0.5, np.float32), box, paste) == ()
    assert not coco_mask.area(encoded(np.full((28, 28), 0.5, np.float32), box, paste))
    for box in [(40.0, 50.0, 40.0, 90.0), (40.0, 50.0, 80.0, 50.0), (0.0, 0.0, 0.0, 0.0)]:
        assert outlines_of(ones(28), box) == ()
        assert not coco_mask.area(encoded(ones(28), box, "detectron2"))


@pastes
def test_a_box_of_one_pixel_is_outlined(paste: MaskPaste) -> None:
    box = (100.0, 200.0, 101.0, 201.0)
    (outline,) = outlines_of(ones(28), box, paste)
    np.testing.assert_allclose(shapely.Polygon(outline).bounds, box, atol=1)
    (exact,) = outlines_of(ones(28), box)
    np.testing.assert_allclose(shapely.Polygon(exact).bounds, box, atol=1e-3)
    assert coco_mask.toBbox(rasterised((exact,))).tolist() == [100, 200, 1, 1]


def test_a_part_within_a_hole_has_an_outline() -> None:
    target = np.maximum(ring(56), disc(56, radius=0.08))
    outlines = outlines_of(target, (100.0, 100.0, 200.0, 200.0))
    inner, outer = sorted(map(shapely.Polygon, outlines), key=lambda polygon: polygon.area)
    assert outer.contains(inner)


def test_one_sample_and_no_masks() -> None:
    (outline,) = outlines_of(np.ones((1, 1), np.float32), (10.0, 10.0, 20.0, 20.0))
    assert shapely.Polygon(outline).bounds == (10, 10, 20, 20)
    nothing = np.zeros((0, 28, 28), np.float32), np.zeros((0, 4), np.float32)
    assert polygons_from_probabilities(*nothing, HEIGHT, WIDTH) == []


def assert_equal(left: Sequence[Outlines] | None, right: Sequence[Outlines] | None) -> None:
    assert left is not None
    assert right is not None
    for own, other in zip(left, right, strict=True):
        for outline, expected in zip(own, other, strict=True):
            np.testing.assert_array_equal(outline, expected, strict=True)


def test_messages_with_any_number_of_outlines() -> None:
    box = (40.3, 51.7, 80.6, 90.1)
    polygons = (outlines_of(two_blobs(28), box), (), outlines_of(disc(28), box))
    detections = Detections(
        height=HEIGHT,
        width=WIDTH,
        boxes=np.array([box] * 3, np.float32),
        scores=np.array([0.9, 0.8, 0.7], np.float32),
        labels=np.array([1, 2, 3]),
        category_ids=np.array([3, 7, 8]),
        class_names=("disc", "box", "ring"),
        polygons=polygons,
    )
    response = pb.DetectResponse.FromString(encode_detections(detections))
    assert [d.WhichOneof("mask") for d in response.detections] == ["polygons"] * 3
    assert_equal(detections_from_response(response, MaskFormat.POLYGON).polygons, polygons)


def test_polygons_from_a_server_equal_those_of_its_probabilities(
    address: str, predictor: Detector, picture: Encode
) -> None:
    images = [picture(n, size) for n, size in enumerate([(120, 200), (640, 480), (8, 9)])]
    with DetectorClient(address) as client:
        responses: list[Any] = list(client.detect_many(images, POLYGONS))
        streamed: dict[int, Any] = dict(client.stream(images, POLYGONS))
        nothing = DetectionOptions(score_threshold=1, mask_format=MaskFormat.POLYGON)
        assert client.detect(images[0], nothing).polygons == ()
    for index, (image, own) in enumerate(zip(images, responses, strict=True)):
        assert_equal(streamed[index].polygons, own.polygons)
        assert_equal(predictor.detect(image, POLYGONS).polygons, own.polygons)
        soft = predictor.detect(image, DetectionOptions(mask_format=MaskFormat.PROBABILITIES))
        assert soft.mask_probabilities is not None
        size, paste = (soft.height, soft.width), predictor.manifest.mask_paste
        expected = polygons_from_probabilities(soft.mask_probabilities, soft.boxes, *size, paste)
        assert_equal(expected, own.polygons)
        assert any(own.polygons)
        assert own.rles is None
        assert own.mask_probabilities is None


def test_unknown_mask_format(address: str, picture: Encode) -> None:
    request = pb.DetectRequest(image=picture(), mask_format=9)  # type: ignore[arg-type]
    with grpc.insecure_channel(address) as channel:
        stub: Any = DetectorStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Detect(request, timeout=30)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    message = caught.value.details() or ""
    assert message.startswith("mask_format is 9; it must be one of ")
    for name, number in pb.MaskFormat.items():
        assert f"{name} ({number})" in message
