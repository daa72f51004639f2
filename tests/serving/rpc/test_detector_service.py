from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from PIL import Image

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.rpc.health import LIVENESS

Encode = Callable[..., bytes]


@pytest.fixture
def channel(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> Any:
    return DetectorStub(channel)


def error_of(stub: Any, request: pb.DetectRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Detect(request, timeout=30)
    return caught.value.code(), caught.value.details() or ""


@pytest.mark.parametrize(
    ("codec", "mode"),
    [("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "RGBA"), ("PNG", "P"), ("WEBP", "RGB")],
)
def test_image_formats_and_modes(stub: Any, picture: Encode, codec: str, mode: str) -> None:
    request = pb.DetectRequest(id="7", image=picture(codec=codec, mode=mode))
    response = stub.Detect(request, timeout=30)
    assert response.id == "7"
    assert (response.height, response.width) == (120, 200)
    assert response.detections
    assert response.timing.batch_size == 1


def test_exif_orientation_is_applied(stub: Any, picture: Encode) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    rotated = stub.Detect(pb.DetectRequest(image=picture(codec="PNG", exif=exif)), timeout=30)
    assert (rotated.height, rotated.width) == (200, 120)
    pixels = np.rot90(np.array(Image.open(BytesIO(picture(codec="PNG")))), -1)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    upright = stub.Detect(pb.DetectRequest(image=file.getvalue()), timeout=30)
    assert rotated.detections == upright.detections


def test_boxes_and_masks_lie_within_the_image(stub: Any, picture: Encode) -> None:
    response = stub.Detect(pb.DetectRequest(image=picture(size=(97, 301))), timeout=30)
    scores = [detection.score for detection in response.detections]
    assert scores == sorted(scores, reverse=True)
    names = {1: (3, "disc"), 2: (7, "box"), 3: (8, "ring")}
    for detection in response.detections:
        box = detection.box
        assert 0 <= box.x_min <= box.x_max <= 301
        assert 0 <= box.y_min <= box.y_max <= 97
        assert (detection.rle.height, detection.rle.width) == (97, 301)
        assert (detection.category_id, detection.class_name) == names[detection.label]


def test_invalid_images_are_rejected(stub: Any, picture: Encode) -> None:
    huge = BytesIO()
    Image.new("1", (20000, 20000)).save(huge, "PNG")
    cases = {
        picture()[:-500]: "truncated",
        b"Dear server,\nhow are you?\n": "not a JPEG, PNG or WebP",
        picture(size=(1, 1), codec="PNG"): "1x1 pixels",
        huge.getvalue(): "20000x20000 pixels",
        b"": "empty",
    }
    for data, words in cases.items():
        code, message = error_of(stub, pb.DetectRequest(image=data))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert words in message
        assert stub.Detect(pb.DetectRequest(image=picture()), timeout=30).detections


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "fp16"}, "choose from fp32"),
        ({"score_threshold": 1.5}, "score_threshold is 1.5"),
        ({"score_threshold": float("nan")}, "score_threshold is nan"),
        ({"max_detections": 0}, "max_detections is 0"),
        ({"mask_format": 9}, "mask_format is 9"),
    ],
)
def test_invalid_options_are_rejected(
    stub: Any, picture: Encode, options: dict[str, Any], words: str
) -> None:
    code, message = error_of(stub, pb.DetectRequest(image=picture(), **options))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in message


def test_requested_precision(stub: Any, picture: Encode) -> None:
    request = pb.DetectRequest(image=picture(), precision="fp32")
    assert stub.Detect(request, timeout=30).detections


def test_large_messages_are_rejected(stub: Any, picture: Encode) -> None:
    code, _ = error_of(stub, pb.DetectRequest(image=bytes(3 << 20)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert stub.Detect(pb.DetectRequest(image=picture()), timeout=30).detections


@pytest.mark.parametrize("service", ["", "maskrcnn.v1.Detector", LIVENESS])
def test_health_of_a_ready_server(channel: grpc.Channel, service: str) -> None:
    response = HealthStub(channel).Check(HealthCheckRequest(service=service), timeout=30)
    assert response.status == HealthCheckResponse.SERVING


def test_health_of_unknown_services(channel: grpc.Channel) -> None:
    request = HealthCheckRequest(service="maskrcnn.v2.Detector")
    with pytest.raises(grpc.RpcError) as caught:
        HealthStub(channel).Check(request, timeout=30)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = HealthStub(channel).Watch(request, timeout=30)
    assert next(watch).status == HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()
