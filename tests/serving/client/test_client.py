import socket
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image

from maskrcnn_trt.model.masks import mask_from_rle
from maskrcnn_trt.serving.client import AsyncDetectorClient, DetectorClient
from maskrcnn_trt.serving.detections import (
    DetectionOptions,
    Detections,
    MaskFormat,
    SchedulingOptions,
)
from maskrcnn_trt.serving.errors import DeadlineError, RefusedError, UnreachableError
from maskrcnn_trt.serving.offline import Detector

Encode = Callable[..., bytes]


@pytest.fixture
def client(address: str) -> Iterator[DetectorClient]:
    with DetectorClient(address) as client:
        yield client


def assert_equal(left: Any, right: Any) -> None:
    """Assert that detections are equal bit for bit, except for the timing."""
    assert isinstance(left, Detections)
    assert isinstance(right, Detections)
    assert (left.height, left.width) == (right.height, right.width)
    for name in ("boxes", "scores", "labels", "category_ids"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), strict=True)
    assert left.class_names == right.class_names
    assert left.rles == right.rles


@pytest.mark.parametrize("size", [(120, 200), (200, 120), (96, 160), (640, 480), (8, 9)])
def test_server_and_predictor_agree(
    client: DetectorClient, predictor: Detector, picture: Encode, size: tuple[int, int]
) -> None:
    data = picture(size=size)
    detections = client.detect(data)
    assert_equal(detections, predictor.detect(data))
    assert (detections.height, detections.width) == size
    assert len(detections) > 0
    assert detections.timing.infer_us > 0


def test_sources_of_an_image_are_equal(
    client: DetectorClient, predictor: Detector, picture: Encode, tmp_path: Path
) -> None:
    data = picture(codec="PNG")
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    pixels = np.array(Image.open(BytesIO(data)))
    expected = client.detect(data)
    scan = tmp_path / "picture.tif"
    Image.fromarray(pixels).save(scan)
    for source in (path, scan, pixels):
        assert_equal(client.detect(source), expected)
        assert_equal(predictor.detect(source), expected)
    scan.write_bytes(scan.read_bytes()[:100])
    with pytest.raises(RefusedError, match="damaged"):
        client.detect(scan)


def test_options_choose_detections_and_masks(client: DetectorClient, picture: Encode) -> None:
    everything = client.detect(picture())
    assert everything.rles is not None
    threshold = float(everything.scores[3])
    best = client.detect(picture(), DetectionOptions(score_threshold=threshold))
    assert len(best) == (everything.scores > threshold).sum() < len(everything)
    assert best.rles == everything.rles[: len(best)]
    two = client.detect(picture(), DetectionOptions(max_detections=2))
    assert two.rles == everything.rles[:2]
    none = client.detect(picture(), DetectionOptions(score_threshold=1))
    assert len(none) == 0
    assert none.boxes.shape == (0, 4)


def test_mask_formats(client: DetectorClient, predictor: Detector, picture: Encode) -> None:
    bare = client.detect(picture(), DetectionOptions(mask_format=MaskFormat.NONE))
    assert bare.rles is None
    assert bare.mask_probabilities is None
    options = DetectionOptions(mask_format=MaskFormat.PROBABILITIES)
    soft = client.detect(picture(), options)
    expected = predictor.detect(picture(), options)
    assert soft.mask_probabilities is not None
    assert soft.mask_probabilities.shape == (len(soft), 28, 28)
    np.testing.assert_array_equal(soft.mask_probabilities, expected.mask_probabilities, strict=True)
    nothing = DetectionOptions(score_threshold=1, mask_format=MaskFormat.PROBABILITIES)
    assert len(client.detect(picture(), nothing)) == 0


def test_masks_lie_in_their_boxes(client: DetectorClient, picture: Encode) -> None:
    detections = client.detect(picture(size=(300, 400)))
    assert detections.rles is not None
    for box, rle in zip(detections.boxes, detections.rles, strict=True):
        rows, columns = np.nonzero(mask_from_rle(rle))
        if len(rows):
            margin = 2 + max(box[2] - box[0], box[3] - box[1]) / 28
            assert box[0] - margin <= columns.min() <= columns.max() <= box[2] + margin
            assert box[1] - margin <= rows.min() <= rows.max() <= box[3] + margin


def test_detect_many_keeps_the_order_and_shares_batches(
    client: DetectorClient, predictor: Detector, picture: Encode
) -> None:
    images = [picture(i, (120, 200) if i % 2 else (200, 120)) for i in range(24)]
    images[5] = b"no image"
    outcomes = list(client.detect_many(images, concurrency=12))
    refused = outcomes.pop(5)
    assert isinstance(refused, RefusedError)
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    for data, outcome in zip(images[:5] + images[6:], outcomes, strict=True):
        assert_equal(outcome, predictor.detect(data))
    batches = [o.timing.batch_size for o in outcomes if isinstance(o, Detections)]
    assert 1 < max(batches) <= 4


def test_abandoned_results_are_cancelled(client: DetectorClient, picture: Encode) -> None:
    results = client.detect_many([picture(i) for i in range(9)])
    assert isinstance(next(results), Detections)
    del results
    assert len(client.detect(picture())) > 0


async def test_streams_and_async_clients_agree(
    address: str, client: DetectorClient, picture: Encode
) -> None:
    images = [picture(i) for i in range(6)]
    images[2] = b""
    expected = list(client.detect_many(images))
    async with AsyncDetectorClient(address) as other:
        assert_equal(await other.detect(images[0]), expected[0])
        many = [outcome async for outcome in other.detect_many(images, concurrency=4)]
        streamed = {index: outcome async for index, outcome in other.stream(images)}
        assert (await other.model()).name == client.model().name
        assert [outcome async for outcome in other.detect_many([])] == []
    assert list(client.detect_many([])) == list(client.stream([])) == []
    for outcomes in (dict(enumerate(many)), streamed, dict(client.stream(images))):
        assert set(outcomes) == set(range(6))
        refused, cause = outcomes.pop(2), expected[2]
        assert isinstance(refused, RefusedError)
        assert isinstance(cause, RefusedError)
        assert (refused.code, str(refused)) == (grpc.StatusCode.INVALID_ARGUMENT, str(cause))
        assert "empty" in str(refused)
        for index, outcome in outcomes.items():
            assert_equal(outcome, expected[index])


def test_a_precision_that_is_not_served_ends_the_run(
    client: DetectorClient, picture: Encode
) -> None:
    scheduling = SchedulingOptions(precision="fp16")
    with pytest.raises(RefusedError, match="fp32") as caught:
        next(client.detect_many([picture()] * 2, scheduling=scheduling))
    assert caught.value.code is grpc.StatusCode.NOT_FOUND


def test_model_describes_the_bundle(client: DetectorClient, predictor: Detector) -> None:
    model, manifest = client.model(), predictor.manifest
    assert model.name == manifest.model_name
    assert [(c.id, c.name) for c in model.categories] == [
        (c.id, c.name) for c in manifest.categories
    ]
    assert {(b.height, b.width) for b in model.buckets} == {(96, 160), (160, 96)}
    assert list(model.precisions) == ["fp32"]
    assert model.provenance.checkpoint_sha256 == manifest.provenance.checkpoint_sha256
    assert model.max_detections == 20
    assert model.limits.max_batch == 4


async def test_unreachable_server_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    message = f"{address}.*maskrcnn serve"
    with DetectorClient(address, retries=0) as client:
        with pytest.raises(UnreachableError, match=message):
            client.detect(b"image")
        with pytest.raises(UnreachableError, match=message):
            list(client.stream([b"image"]))
        with pytest.raises(UnreachableError, match=message):
            client.model()

    async with AsyncDetectorClient(address, retries=0) as other:
        with pytest.raises(UnreachableError, match=message):
            await other.detect(b"image")


def test_deadline_is_reported(address: str, client: DetectorClient, picture: Encode) -> None:
    with (
        DetectorClient(address, timeout_s=1e-4) as hasty,
        pytest.raises(DeadlineError, match=f"{address} within 0.0001 s"),
    ):
        hasty.detect(picture())
    assert len(client.detect(picture())) > 0
