"""ONNX Runtime can run our graphs channels-last, as its CUDA provider does."""

from pathlib import Path

import onnx
import onnx.inliner
import onnxruntime
import torch
from onnx import NodeProto, helper
from small_models import HEIGHT, WIDTH, assert_same, detections_from_session, noise_images

from maskrcnn_trt.model.checkpoint import load_checkpoint

LAYOUT_SENSITIVE = {"Conv", "ConvTranspose", "GridSample", "MaxPool"}


def channels_last(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Add the Transpose nodes that the CUDA provider's layout adds, to run on the CPU provider.

    An identity Einsum replaces the channels-last computation. ONNX Runtime moves no Transpose past
    it, so that all of them are moved to the nodes in between.
    """
    model = onnx.inliner.inline_local_functions(proto)
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for node in nodes:
        if node.op_type not in LAYOUT_SENSITIVE:
            model.graph.node.append(node)
            continue
        source, result = node.input[0], node.output[0]
        node.input[0], node.output[0] = f"{result}/input", f"{result}/output"
        model.graph.node.extend(transposed_twice(source, node.input[0]))
        model.graph.node.append(node)
        model.graph.node.extend(transposed_twice(node.output[0], result))
    return model


def transposed_twice(source: str, result: str) -> list[NodeProto]:
    last, same = f"{result}/last", f"{result}/same"
    return [
        helper.make_node("Transpose", [source], [last], perm=[0, 2, 3, 1]),
        helper.make_node("Einsum", [last], [same], equation="abcd->abcd"),
        helper.make_node("Transpose", [same], [result], perm=[0, 3, 1, 2]),
    ]


def test_transposes_can_move_past_every_node(tiny_checkpoint: Path, bundle: Path) -> None:
    images, sizes = noise_images()
    padded = torch.zeros(2, 3, 96, 160, dtype=torch.uint8)
    padded[:, :, :HEIGHT, :WIDTH] = images
    with torch.inference_mode():
        expected = load_checkpoint(tiny_checkpoint).build_model().detect(padded, sizes)
    assert expected.num_detections.min() > 0
    proto = onnx.load(bundle / "model-fp32-96x160.onnx")
    session = onnxruntime.InferenceSession(channels_last(proto).SerializeToString())
    assert_same(detections_from_session(session, padded, sizes), expected)
