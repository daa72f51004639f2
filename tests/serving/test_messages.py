"""Serialised responses equal those that protobuf writes."""

import numpy as np
import pytest

from maskrcnn_trt.model.masks import Rle
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.serving.detections import Detections, TimedResponse, Timing
from maskrcnn_trt.serving.messages import encode_detections, response_bytes, stream_response_bytes

TIMING = Timing(decode_us=1, queue_us=300, infer_us=70_000, encode_us=5_000_000_000, batch_size=8)


def detections(count: int, counts_bytes: int = 3) -> Detections:
    rng = np.random.default_rng(count)
    return Detections(
        height=480,
        width=640,
        boxes=rng.random((count, 4), np.float32),
        scores=rng.random(count, np.float32),
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
    encoded = encode_detections(detections(*size))
    message = pb.DetectResponse.FromString(encoded)
    message.id = request_id
    message.timing.CopyFrom(pb.Timing(**vars(timing)))
    response = response_bytes(TimedResponse(encoded, timing), request_id)
    assert response == message.SerializeToString()
    stream_message = pb.DetectStreamResponse(id=request_id, response=message)
    assert stream_response_bytes(response, request_id) == stream_message.SerializeToString()


def test_an_empty_response_is_present_in_its_stream_message() -> None:
    message = pb.DetectStreamResponse(response=pb.DetectResponse())
    assert stream_response_bytes(b"", "") == message.SerializeToString()
