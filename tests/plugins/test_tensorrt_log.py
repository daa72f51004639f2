import os
import subprocess
import sys

import pytest
from onnx import TensorProto, helper

from maskrcnn_trt.plugins.tensorrt.log import messages_to, shared_logger

trt = pytest.importorskip("tensorrt_rtx", reason="needs the wheel tensorrt-rtx")

GARBAGE_DURING_A_PARSE = """
import gc
import sys
import tensorrt_rtx as trt
from maskrcnn_trt.plugins.tensorrt.log import messages_to, shared_logger

def parser():
    builder = trt.Builder(shared_logger(trt))
    network = builder.create_network(0)
    return builder, network, trt.OnnxParser(network, shared_logger(trt))

gc.disable()
model = sys.stdin.buffer.read()
earlier = [parser()]
earlier.append(earlier)
earlier[0][2].parse(model)
del earlier
builder, network, later = parser()
gc.collect()
heard = []
with messages_to(trt, lambda severity, message: heard.append(severity)):
    later.parse(model)
print(len(heard) > 0)
"""


def model_with_build_error() -> bytes:
    """Return a RoIAlign model: without a GPU, TensorRT itself, not its parser, logs an error."""
    node = helper.make_node("RoiAlign", ["maps", "rois", "images"], ["pooled"])
    shapes = {"maps": (2, 3, 8, 8), "rois": (5, 4), "images": (5,), "pooled": None}
    *inputs, output = (
        helper.make_tensor_value_info(
            name, TensorProto.INT64 if name == "images" else TensorProto.FLOAT, shape
        )
        for name, shape in shapes.items()
    )
    graph = helper.make_graph([node], "one", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    return bytes(model.SerializeToString())


def load_damaged_engine() -> None:
    assert trt.Runtime(shared_logger(trt)).deserialize_cuda_engine(b"damaged") is None


def test_listeners_receive_messages_while_registered() -> None:
    """An older runtime exists: TensorRT sends all messages to the first logger it was given."""
    runtime = trt.Runtime(shared_logger(trt))
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
    del runtime


def test_garbage_collection_keeps_the_logger() -> None:
    """A separate process is used, because TensorRT would call freed memory and crash."""
    done = subprocess.run(
        [sys.executable, "-c", GARBAGE_DURING_A_PARSE],
        input=model_with_build_error(),
        capture_output=True,
        env={**os.environ, "MALLOC_PERTURB_": "165"},
    )
    assert (done.stdout, done.returncode) == (b"True\n", 0), done.stderr
