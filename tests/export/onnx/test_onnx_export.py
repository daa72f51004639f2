"""Equality of ONNX Runtime on the exported file and torch on the model."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from shared_exports import cached_exports
from small_models import assert_same, detections_from_session
from torch import Tensor

from maskrcnn_trt.export import bundle
from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.model.checkpoint import load_checkpoint
from maskrcnn_trt.model.mask_rcnn import MaskRCNN

pytestmark = pytest.mark.slow

BUCKET = ShapeBucket(96, 160)
Images = tuple[Tensor, Tensor]


@pytest.fixture(scope="module")
def model(strict_checkpoint: Path) -> MaskRCNN:
    return load_checkpoint(strict_checkpoint).build_model()


@pytest.fixture(scope="module")
def proto(model: MaskRCNN, shared_folder: Path) -> onnx.ModelProto:
    with cached_exports(shared_folder):
        return bundle.onnx_from_model(model, BUCKET, torch.float32)


@pytest.fixture(scope="module")
def session(proto: onnx.ModelProto) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(proto.SerializeToString())


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_runtime_reproduces_the_model(
    session: onnxruntime.InferenceSession, model: MaskRCNN, smooth_noise: Images, batch: int
) -> None:
    images, sizes = (part[-batch:] for part in smooth_noise)
    with torch.inference_mode():
        expected = model.detect(images, sizes)
    found = detections_from_session(session, images.float(), sizes)
    if batch == 8:
        assert expected.num_detections.min() == 0
        assert expected.num_detections.max() > 0
    assert_same(found, expected)


def test_batch_without_any_detection(
    session: onnxruntime.InferenceSession, model: MaskRCNN, smooth_noise: Images
) -> None:
    images, sizes = smooth_noise
    with torch.inference_mode():
        empty = model.detect(images, sizes).num_detections == 0
    found = detections_from_session(session, images[empty].float(), sizes[empty])
    assert not any(part.any() for part in found)


def test_top_k_inputs_are_finite(proto: onnx.ModelProto, smooth_noise: Images) -> None:
    """Levels with few anchors are padded with -inf, which would rank below the padding of ONNX
    Runtime's TopK on CUDA."""
    probe = onnx.ModelProto()
    probe.CopyFrom(proto)
    names = [node.input[0] for node in probe.graph.node if node.op_type == "TopK"]
    probe.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    images, sizes = (tensor[:2].numpy() for tensor in smooth_noise)
    feeds = {"images": images.astype(np.float32), "image_sizes": sizes}
    session = onnxruntime.InferenceSession(probe.SerializeToString())
    found = session.run(names, feeds)
    assert len(names) >= 3
    assert all(np.isfinite(values).all() for values in found)
    assert min(values.min() for values in found) < -1e37


def test_graph_has_custom_nodes_and_their_bodies(proto: onnx.ModelProto) -> None:
    onnx.checker.check_model(proto)
    nodes = [node.op_type for node in proto.graph.node if node.domain == "maskrcnn"]
    # Decoding and NMS of proposals and of detections; pooling for boxes and for masks.
    expected = ["DecodeBoxes", "NmsKeep", "PyramidRoIAlign"]
    assert sorted(nodes) == sorted(2 * expected)
    bodies = {function.name for function in proto.functions if function.domain == "maskrcnn"}
    assert bodies == {*expected}
    # TensorRT would lose the attributes of a call within a body.
    assert not any(node.domain for function in proto.functions for node in function.node)
    assert {o.domain: o.version for o in proto.opset_import} == {"": 18, "maskrcnn": 1}


def test_convolutions_read_pooled_features_directly(proto: onnx.ModelProto) -> None:
    """TensorRT would make them linear for a Reshape between."""
    nodes = proto.graph.node
    pooled = {node.output[0] for node in nodes if node.op_type == "PyramidRoIAlign"}
    readers = [node.op_type for node in nodes if pooled.intersection(node.input)]
    assert readers == ["Reshape", "Conv"]  # of the box head, which needs vectors, and mask head


def test_only_the_batch_is_dynamic(session: onnxruntime.InferenceSession) -> None:
    values = (*session.get_inputs(), *session.get_outputs())
    assert {value.name: value.shape for value in values} == {
        "images": ["batch", 3, 96, 160],
        "image_sizes": ["batch", 2],
        "num_detections": ["batch"],
        "boxes": ["batch", 20, 4],
        "scores": ["batch", 20],
        "labels": ["batch", 20],
        "masks": ["batch", 20, 28, 28],
    }
