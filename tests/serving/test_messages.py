"""Serialised responses equal those that protobuf writes, and requests hold any options."""

import numpy as np
import pytest

from maskrcnn_trt.model.masks import Rle
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.serving.detections import (
    DetectionOptions,
    Detections,
    MaskFormat,
    SchedulingOptions,
    TimedResponse,
    Timing,
)
from maskrcnn_trt.serving.messages import (
    detections_from_response,
    encode_detections,
    request_from_options,
    response_bytes,
    stream_response_bytes,
)

TIMING = Timing(decode_us=1, queue_us=300, infer_us=70_000, encode_us=5_000_000_000, batch_size=8)


def detections(count: int, counts_bytes: int = 3) -> Detections:
    rng = np.random.default_rng(count)
    boxes, scores = rng.random((count, 4), np.float32), rng.random(count, np.float32)
    boxes[1:2], boxes[2:3, 0], scores[3:4] = 0, 0, 0
    return Detections(
        height=480,
        width=640,
        boxes=boxes,
        scores=scores,
        labels=np.arange(1, count + 1),
        category_ids=np.arange(count) - 1,
        class_names=tuple(f"class {n}" for n in range(count)),
        rles=tuple(Rle(480, 640, bytes(counts_bytes)) for _ in range(count)),
    )


@pytest.mark.parametrize("request_id", ["", "7", "ä" * 100])
@pytest.mark.parametrize("timing", [TIMING, Timing(batch_size=0)])
@pytest.mark.parametrize("size", [(0, 3), (1, 3), (2, 100), (5, 5_000), (20, 200_000)])
def test_responses_are_the_bytes_of_protobuf(
    request_id: str, timing: Timing, size: tuple[int, int]
) -> None:
    sent = detections(*size)
    encoded = encode_detections(sent)
    message = pb.DetectResponse.FromString(encoded)
    received = detections_from_response(message, MaskFormat.RLE)
    for name in ("boxes", "scores", "labels", "category_ids", "class_names"):
        np.testing.assert_array_equal(getattr(received, name), getattr(sent, name))
    assert (received.rles, received.height, received.width) == (sent.rles, 480, 640)
    message.id = request_id
    message.timing.CopyFrom(pb.Timing(**vars(timing)))
    response = response_bytes(TimedResponse(encoded, timing), request_id)
    assert response == message.SerializeToString()
    stream_message = pb.DetectStreamResponse(id=request_id, response=message)
    assert stream_response_bytes(response, request_id) == stream_message.SerializeToString()


def test_huge_options_fit_into_a_request() -> None:
    options = DetectionOptions(max_detections=2**64)
    for timeout_s in (1e308, 10**400):
        scheduling = SchedulingOptions(timeout_s=timeout_s)
        request = request_from_options(b"image", options, scheduling, "id")
        assert request.max_detections == 2**32 - 1
        assert request.timeout_us == 10**15


def test_an_empty_response_is_present_in_its_stream_message() -> None:
    message = pb.DetectStreamResponse(response=pb.DetectResponse())
    assert stream_response_bytes(b"", "") == message.SerializeToString()
