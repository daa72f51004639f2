"""Error messages that quote long strings from the client are truncated."""

from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from triton_requests import MODEL, infer_request

from maskrcnn_trt.protos.inference import open_inference_pb2 as inference
from maskrcnn_trt.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub


def many_inputs() -> inference.ModelInferRequest:
    request = infer_request(MODEL, b"image")
    for number in range(4000):
        request.inputs.add(name=f"input{number}", datatype="BYTES", shape=[1])
    return request


def unknown_output(name: str) -> inference.ModelInferRequest:
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
    address: str, request_: Any, status: grpc.StatusCode
) -> None:
    with grpc.insecure_channel(address) as channel:
        method: Any = (
            HealthStub(channel).Check
            if isinstance(request_, HealthCheckRequest)
            else GRPCInferenceServiceStub(channel).ModelInfer
        )
        with pytest.raises(grpc.RpcError) as caught:
            method(request_, timeout=60)
    assert caught.value.code() is status
    assert caught.value.details().endswith("...")


def test_short_error_messages_are_not_truncated(address: str) -> None:
    name = "é" * 300
    with grpc.insecure_channel(address) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(unknown_output(name), timeout=60)
    assert name in caught.value.details()
    assert not caught.value.details().endswith("...")
