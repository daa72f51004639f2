"""Limits on the requests and images per second of a client."""

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from in_process_server import connected, served, status_of
from triton_requests import MODEL, infer_request

from maskrcnn_trt.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.serving.errors import RateLimitError
from maskrcnn_trt.serving.pipeline.shared_resources import RateLimits, current_client


def test_each_client_has_one_second_of_requests_and_images() -> None:
    now = 0.0
    limits = RateLimits(2, 10, clock=lambda: now)

    def accepted(client: str, images: int) -> bool:
        current_client.set(client)
        try:
            limits.charge(images)
        except RateLimitError:
            return False
        return True

    assert [accepted("a", 1) for _ in range(3)] == [True, True, False]
    assert accepted("b", 30)  # more than a second's worth, if nothing was sent before
    now = 1.0
    assert [accepted("a", 1) for _ in range(3)] == [True, True, False]
    assert not accepted("b", 1)
    now = 2.5
    assert accepted("b", 1)
    current_client.set("")


@pytest.mark.parametrize(("rate", "pause"), [(100, "0.1 s"), (0.8, "1.3 s")])
def test_the_pause_in_the_message_suffices(rate: float, pause: str) -> None:
    limits = RateLimits(None, rate, clock=lambda: 0.0)
    limits.charge(max(1, int(rate)))
    with pytest.raises(RateLimitError, match=f"try again in {pause}"):
        limits.charge(1)


def test_no_limits_by_default() -> None:
    for _ in range(1000):
        RateLimits(None, None).charge(100)


async def test_limits_apply_by_token_and_host_to_both_services(
    wide_bundle: Path, picture: Callable[..., bytes], tmp_path: Path
) -> None:
    request = pb.DetectRequest(image=picture())
    file = tmp_path / "tokens"
    file.write_text("one\ntwo\n")
    slow = {"max_images_per_s": 0.001}  # one image, then none for a quarter of an hour
    async with served(wide_bundle, token_file=file, **slow) as address, connected(address) as stub:
        for token in ("one", "two"):
            metadata = (("authorization", f"Bearer {token}"),)
            assert await stub.Detect(request, metadata=metadata)
            for _ in range(2):
                code, message = await status_of(stub.Detect(request, metadata=metadata))
                assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "max_images_per_s" in message
    async with served(wide_bundle, **slow) as address, connected(address) as first:
        assert await first.Detect(request)
        async with connected(address, GRPCInferenceServiceStub) as second:  # from the same host
            code, _ = await status_of(second.ModelInfer(infer_request(MODEL, picture())))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
