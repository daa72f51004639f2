import gc
import subprocess
import sys

import pytest

from maskrcnn_trt.plugins.tensorrt_log import messages_to, shared_logger

trt = pytest.importorskip("tensorrt_rtx", reason="needs the wheel tensorrt-rtx")

GARBAGE_WITH_A_LOGGER = """
import gc
import tensorrt_rtx as trt
from maskrcnn_trt.plugins.tensorrt_log import messages_to, shared_logger

gc.disable()
heard = []
earlier = [trt.Runtime(shared_logger(trt))]
earlier.append(earlier)
del earlier
runtime = trt.Runtime(shared_logger(trt))
gc.collect()
with messages_to(trt, lambda severity, message: heard.append(severity)):
    runtime.deserialize_cuda_engine(b"damaged")
print("ERROR" in heard)
"""


def load_damaged_engine() -> None:
    assert trt.Runtime(shared_logger(trt)).deserialize_cuda_engine(b"damaged") is None


def test_listeners_hear_what_is_said_in_their_time() -> None:
    first: list[tuple[str, str]] = []
    second: list[tuple[str, str]] = []
    with messages_to(trt, lambda *said: first.append(said)):
        with messages_to(trt, lambda *said: second.append(said)):
            load_damaged_engine()
        assert first == second
        load_damaged_engine()
    load_damaged_engine()
    assert "ERROR" in {severity for severity, _ in second}
    assert len(first) > len(second)


def test_an_older_runtime_does_not_keep_the_messages_to_itself() -> None:
    """TensorRT gives all messages to the first logger until nothing made with it is left."""
    runtime = trt.Runtime(shared_logger(trt))
    heard: list[str] = []
    with messages_to(trt, lambda severity, message: heard.append(message)):
        load_damaged_engine()
    assert heard
    del runtime
    gc.collect()


def test_what_the_collector_frees_takes_no_logger_along() -> None:
    """In a process of its own, since TensorRT would call what is freed."""
    done = subprocess.run(
        [sys.executable, "-c", GARBAGE_WITH_A_LOGGER], capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr
