import contextlib
import gc
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.model.image_decoding import ImageHeader
from maskrcnn_trt.serving.detections import TimedResponse, Timing
from maskrcnn_trt.serving.engines.base import PlannedImage
from maskrcnn_trt.serving.engines.worker_main import Channel

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Ends:
    return Channel.pair()


def send_and_receive(ends: Ends, message: Any) -> Any:
    ends[0].send(message)
    return ends[1].receive(copy=True)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=np.int64).reshape(2, 3, 4),
        np.zeros((0, 4), np.float32),
        np.array(7.5),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(24).reshape(4, 6)[::2, 1:3],
        np.random.default_rng(0).integers(0, 256, (3, 500, 700), np.uint8),
    ],
    ids=["small", "empty", "scalar", "fortran", "strided", "megabyte"],
)
def test_arrays_are_transferred_unchanged(ends: Ends, array: np.ndarray) -> None:
    got = send_and_receive(ends, ("name", [array, array + 1], {"bytes": b"\0" * 10**5}))
    assert got[0] == "name"
    np.testing.assert_array_equal(got[1][0], array, strict=True)
    np.testing.assert_array_equal(got[1][1], array + 1, strict=True)
    assert got[2] == {"bytes": b"\0" * 10**5}


def test_encoded_responses_are_transferred_unchanged(ends: Ends) -> None:
    timing = Timing(infer_us=7, batch_size=2)
    values = [np.random.default_rng(0).bytes(10**5), b"", {"boxes": np.arange(8)}]
    got = send_and_receive(ends, [TimedResponse(value, timing) for value in values])
    ends[0].send(b"another message in the same memory" * 10**4)
    assert [response.value for response in got[:2]] == values[:2]
    np.testing.assert_array_equal(got[2].value["boxes"], np.arange(8))
    assert {response.timing for response in got} == {timing}
    for protocol in range(2, 6):
        response = TimedResponse(values[0], timing)
        assert pickle.loads(pickle.dumps(response, protocol)) == response


@pytest.mark.parametrize("copy", [True, False])
def test_files_of_images_are_transferred_as_shared_memory(ends: Ends, copy: bool) -> None:
    file = np.random.default_rng(0).bytes(10**5)
    image = PlannedImage(file, ImageHeader((30, 40), 1, True), ShapeBucket(64, 64), (48, 64))
    ends[0].send([image, image._replace(source=np.ones((2, 3, 3), np.uint8))])
    encoded, pixels = ends[1].receive(copy=copy)
    assert isinstance(encoded.source, memoryview) or copy
    assert bytes(encoded.source) == file
    assert encoded[1:] == image[1:]
    assert pixels.source.shape == (2, 3, 3)
    for protocol in range(2, 6):
        assert pickle.loads(pickle.dumps(image, protocol)) == image


def test_messages_of_any_size_in_both_directions(ends: Ends) -> None:
    here, there = ends
    for size in (10, 10**6, 0, 1000, 10**7, 3):
        assert (send_and_receive((here, there), np.full(size, size)) == np.full(size, size)).all()
        assert (send_and_receive((there, here), np.full(size, 1)) == np.full(size, 1)).all()


def test_copies_survive_the_next_message(ends: Ends) -> None:
    here, there = ends
    here.send(np.zeros(1000))
    shared = there.receive(copy=False)
    copied = send_and_receive(ends, np.ones(1000))
    assert (shared == 1).all()
    send_and_receive(ends, np.full(1000, 2.0))
    assert (copied == 1).all()


def test_a_closed_end_is_detected() -> None:
    here, there = Channel.pair()
    assert not here.poll(0)
    del there
    assert here.poll(None)
    with pytest.raises(EOFError):
        here.receive(copy=True)
    with pytest.raises(BrokenPipeError):
        here.send(1)


def open_handles() -> set[tuple[str, str]]:
    """Return number and target of each file descriptor, so that a reused number is noticed."""
    handles = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing
            handles.add((path.name, os.readlink(path)))
    return handles


def test_channels_leak_no_file_descriptors() -> None:
    gc.collect()
    handles = open_handles()
    for size in (0, 10**6):
        send_and_receive(Channel.pair(), np.ones(size))
        ends = Channel.pair()
        send_and_receive(ends, np.ones(size))
        for end in (*ends, *ends):
            end.close()
        assert open_handles() <= handles
        for message in (1, np.ones(10**7)):
            with pytest.raises(OSError, match=r"closed|Bad file descriptor"):
                ends[0].send(message)
