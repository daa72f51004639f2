from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from PIL import Image
from triton_requests import MODEL, infer_request

from maskrcnn_trt.protos.inference.open_inference_pb2 import ModelInferRequest
from maskrcnn_trt.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.rpc.services import LIVENESS

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
    request = pb.DetectRequest(id="7", image=picture(codec=codec, mode=mode), precision="fp32")
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
        ({"precision": "fp16", "model": f"{MODEL}-fp32"}, "leave out precision, or the suffix"),
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


def test_a_precision_that_is_not_served_is_rejected(stub: Any, picture: Encode) -> None:
    code, message = error_of(stub, pb.DetectRequest(image=picture(), precision="fp16"))
    assert code is grpc.StatusCode.NOT_FOUND
    assert "choose from fp32" in message


def test_health_of_known_and_unknown_services(channel: grpc.Channel) -> None:
    health = HealthStub(channel)
    for service in ("", "maskrcnn.v1.Detector", LIVENESS):
        response = health.Check(HealthCheckRequest(service=service), timeout=30)
        assert response.status == HealthCheckResponse.SERVING
    request = HealthCheckRequest(service="maskrcnn.v2.Detector")
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(request, timeout=30)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = health.Watch(request, timeout=30)
    assert next(watch).status == HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


def many_inputs() -> ModelInferRequest:
    request = infer_request(MODEL, b"image")
    for number in range(4000):
        request.inputs.add(name=f"input{number}", datatype="BYTES", shape=[1])
    return request


def unknown_output(name: str) -> ModelInferRequest:
    request = infer_request(MODEL, b"image")
    request.outputs.add(name=name)
    return request


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (infer_request("x" * 20_000, b"image"), grpc.StatusCode.NOT_FOUND),
        (many_inputs(), grpc.StatusCode.INVALID_ARGUMENT),
        (unknown_output("é" * 3000), grpc.StatusCode.INVALID_ARGUMENT),
        (unknown_output("%" * 3000), grpc.StatusCode.INVALID_ARGUMENT),
        (HealthCheckRequest(service="x" * 30_000), grpc.StatusCode.NOT_FOUND),
    ],
    ids=["model", "inputs", "output", "escaped", "health"],
)
def test_long_error_messages_are_truncated(
    channel: grpc.Channel, request_: Any, status: grpc.StatusCode
) -> None:
    method: Any = (
        HealthStub(channel).Check
        if isinstance(request_, HealthCheckRequest)
        else GRPCInferenceServiceStub(channel).ModelInfer
    )
    with pytest.raises(grpc.RpcError) as caught:
        method(request_, timeout=60)
    assert caught.value.code() is status
    assert caught.value.details().endswith("...")


def test_short_error_messages_are_not_truncated(channel: grpc.Channel) -> None:
    name = "é" * 300
    inference: Any = GRPCInferenceServiceStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        inference.ModelInfer(unknown_output(name), timeout=60)
    assert name in caught.value.details()
    assert not caught.value.details().endswith("...")
