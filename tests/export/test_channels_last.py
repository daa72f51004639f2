"""ONNX Runtime may lay our graphs out channels-last, as its CUDA provider does."""

import onnx
import onnx.inliner
import onnxruntime
import pytest
import torch
from bodies import HEIGHT, WIDTH, pictures, random_model, small_config
from onnx import NodeProto, helper

from maskrcnn_trt.export.onnx_export import onnx_from_model
from maskrcnn_trt.model.spec import OUTPUT_NAMES, ShapeBucket

NEEDING_A_LAYOUT = {"Conv", "ConvTranspose", "GridSample", "MaxPool"}


def channels_last(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with what the CUDA provider's layout puts around nodes, for the CPU's.

    An Einsum that does nothing stands for the node that computes channels-last: no transposition is
    moved past it, so that all are moved to the nodes between.
    """
    model = onnx.inliner.inline_local_functions(proto)
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for node in nodes:
        if node.op_type not in NEEDING_A_LAYOUT:
            model.graph.node.append(node)
            continue
        source, result = node.input[0], node.output[0]
        node.input[0], node.output[0] = f"{result}/input", f"{result}/output"
        model.graph.node.extend(there_and_back(source, node.input[0]))
        model.graph.node.append(node)
        model.graph.node.extend(there_and_back(node.output[0], result))
    return model


def there_and_back(source: str, result: str) -> list[NodeProto]:
    last, same = f"{result}/last", f"{result}/same"
    return [
        helper.make_node("Transpose", [source], [last], perm=[0, 2, 3, 1]),
        helper.make_node("Einsum", [last], [same], equation="abcd->abcd"),
        helper.make_node("Transpose", [same], [result], perm=[0, 3, 1, 2]),
    ]


@pytest.mark.slow
def test_transpositions_may_be_moved_past_every_node() -> None:
    model = random_model(small_config("resnet50", "fpn", "frozen_bn")).eval()
    images, sizes = pictures()
    with torch.inference_mode():
        expected = model(images, sizes)
    assert expected.num_detections.min() > 0
    proto = onnx_from_model(model, ShapeBucket(HEIGHT, WIDTH), torch.uint8)
    session = onnxruntime.InferenceSession(channels_last(proto).SerializeToString())
    feeds = {"images": images.numpy(), "image_sizes": sizes.numpy()}
    found = dict(zip(OUTPUT_NAMES, session.run(OUTPUT_NAMES, feeds), strict=True))
    assert found["num_detections"].tolist() == expected.num_detections.tolist()
    torch.testing.assert_close(torch.from_numpy(found["masks"]), expected.masks, atol=1e-3, rtol=0)
    torch.testing.assert_close(torch.from_numpy(found["boxes"]), expected.boxes, atol=1e-2, rtol=0)
