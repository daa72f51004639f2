"""Random requests from Hypothesis to one server, none of which may cause an internal error."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from request_strategies import Likely, messages
from server_load import server_process
from triton_requests import MODEL

from maskrcnn_trt.protos.inference import open_inference_pb2
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2

_SERVICES = (
    detector_pb2.DESCRIPTOR.services_by_name["Detector"],
    open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
)
# Slow methods that affect the requests of other tests.
_EXCLUDED = {"RepositoryModelLoad", "RepositoryModelUnload"}
_METHODS = {m.full_name: m for s in _SERVICES for m in s.methods if m.name not in _EXCLUDED}
_REJECTIONS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
_REPEATABLE = settings(
    derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class Server(NamedTuple):
    """Server process, and strategies for plausible values."""

    channel: grpc.Channel
    likely: Likely

    def responses(self, method: MethodDescriptor, requests: list[bytes]) -> list[Message] | None:
        """Return the responses of a method. None: it rejected the requests as invalid."""
        path = f"/{method.containing_service.full_name}/{method.name}"
        rejection: Any = None
        try:
            if method.client_streaming:
                call: Any = self.channel.stream_stream(path)
                responses = list(call(iter(requests), timeout=60))
            else:
                responses = [self.channel.unary_unary(path)(requests[0], timeout=60)]
        except grpc.RpcError as error:
            rejection = error
        if rejection is not None:
            assert rejection.code() in _REJECTIONS, rejection
            assert rejection.details(), rejection
            return None
        return [GetMessageClass(method.output_type).FromString(item) for item in responses]


@pytest.fixture(scope="module")
def server(
    wide_bundle: Path, tmp_path_factory: pytest.TempPathFactory, picture: Callable[..., bytes]
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("fuzzing") / "log"
    with (
        server_process(wide_bundle, log, "--max-delay-ms", "0") as (process, address),
        grpc.insecure_channel(address) as channel,
    ):
        yield Server(channel, likely_values([picture(), picture(codec="PNG"), picture()[:300]]))
        assert process.poll() is None
    assert "Traceback" not in log.read_text()


def likely_values(images: list[bytes]) -> Likely:
    """Return strategies for values of valid and almost valid requests."""
    strings = [len(image).to_bytes(4, "little") + image for image in images]
    pixels = bytes(8 * 8 * 3)
    number = open_inference_pb2.InferParameter
    parameters = {
        "score_threshold": st.floats(0, 1).map(lambda value: number(double_param=value)),
        "max_detections": st.integers(1, 30).map(lambda value: number(int64_param=value)),
        "priority": st.integers(1, 3).map(lambda value: number(uint64_param=value)),
        "timeout": st.just(number(int64_param=10_000_000)),
    }
    likely = {
        "image": st.sampled_from(images),
        "score_threshold": st.floats(0, 1),
        "mask_format": st.integers(0, 4),
        "precision": st.just("fp32"),
        "priority": st.integers(1, 3),
        "timeout_us": st.just(10_000_000),
        "model_name": st.sampled_from([MODEL, f"{MODEL}-fp32"]),
        "model_version": st.sampled_from(["", "1"]),
        "name": st.just("images"),
        "datatype": st.sampled_from(["BYTES", "UINT8", "FP32"]),
        "shape": st.sampled_from([[1], [1, 1], [2], [1, 8, 8, 3]]),
        "raw_input_contents": st.sampled_from([[], [pixels], *([s] for s in strings)]),
        "bytes_contents": st.sampled_from([[image] for image in images]),
        "inference.ModelInferRequest.parameters": st.fixed_dictionaries({}, optional=parameters),
    }
    tensor = open_inference_pb2.ModelInferRequest.InferInputTensor.DESCRIPTOR
    likely["inputs"] = st.lists(messages(tensor, likely), min_size=1, max_size=1)
    output = open_inference_pb2.ModelInferRequest.InferRequestedOutputTensor
    outputs = [output(name=name) for name in ("boxes", "masks", "mask_probabilities")]
    likely["outputs"] = st.lists(st.sampled_from(outputs), max_size=2)
    return likely


def request_of(method: MethodDescriptor, server: Server) -> st.SearchStrategy[bytes]:
    return messages(method.input_type, server.likely).map(lambda m: m.SerializeToString())


@pytest.mark.slow
@settings(_REPEATABLE, max_examples=300)
@given(st.data())
def test_calls(server: Server, data: st.DataObject) -> None:
    names = ["maskrcnn.v1.Detector.Detect", "inference.GRPCInferenceService.ModelInfer"]
    method = _METHODS[data.draw(st.sampled_from(names))]
    request = data.draw(request_of(method, server))
    responses = server.responses(method, [request])
    if responses is not None:
        sent: Any = GetMessageClass(method.input_type).FromString(request)
        (response,) = responses
        assert response.id == sent.id  # type: ignore[attr-defined]


@settings(_REPEATABLE, max_examples=100)
@given(st.data())
def test_streams(server: Server, data: st.DataObject) -> None:
    streaming = [method for method in _METHODS.values() if method.client_streaming]
    method = data.draw(st.sampled_from(streaming))
    requests = data.draw(st.lists(request_of(method, server), max_size=4))
    responses = server.responses(method, requests)
    assert responses is not None
    assert len(responses) == len(requests)


@settings(_REPEATABLE, max_examples=200)
@given(st.data())
def test_valid_and_damaged_messages_of_all_methods(server: Server, data: st.DataObject) -> None:
    method = data.draw(st.sampled_from(list(_METHODS.values())))
    request = data.draw(st.one_of(st.binary(max_size=64), request_of(method, server)))
    start = data.draw(st.integers(0, len(request)))
    damage = data.draw(st.binary(max_size=4))
    server.responses(method, [request[:start] + damage + request[start + len(damage) :]])
