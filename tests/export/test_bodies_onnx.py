"""ONNX Runtime computes what torch computes from every body and convention."""

import onnxruntime
import pytest
import torch
from bodies import HEIGHT, WIDTH, pictures, random_model, small_config

from maskrcnn_trt.export.onnx_export import onnx_from_model
from maskrcnn_trt.export.precision import fold_batch_norms, halve
from maskrcnn_trt.model.mask_rcnn import Detections
from maskrcnn_trt.model.spec import OUTPUT_NAMES, ShapeBucket

DETECTRON2 = {
    "anchors": {"convention": "detectron2"},
    "rpn": {"min_side": 0},
    "roi": {"sampling_ratio": 0, "aligned": True, "min_side": 0},
}
LEGACY = {
    "inclusive_boxes": True,
    "anchors": {"convention": "legacy"},
    "rpn": {"min_side": 0},
    "roi": {"min_side": 0},
}
V2_HEADS = {
    "rpn": {"conv_depth": 2},
    "roi": {"box_head_convs": 1, "head_norm": "bn"},
}
CASES = {
    "R-50-FPN of detectron2": ("resnet50", "fpn", "frozen_bn", DETECTRON2),
    "R-50-FPN with convolutions in the box head": ("resnet50", "fpn", "bn", V2_HEADS),
    "R-101-FPN of maskrcnn-benchmark": ("resnet101", "fpn", "frozen_bn", LEGACY),
    "R-50-C4": ("resnet50", "c4", "frozen_bn", {}),
    "R-101-C4 of maskrcnn-benchmark": ("resnet101", "c4", "bn", LEGACY),
    "R-50-C5": ("resnet50", "c5", "gn", {}),
    "R-101-C5 of detectron2": ("resnet101", "c5", "frozen_bn", DETECTRON2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_runtime_finds_what_the_model_finds(case: str) -> None:
    name, features, norm, changes = CASES[case]
    config = small_config(name, features, norm, **changes)
    model = random_model(config).eval()
    images, sizes = pictures()
    with torch.inference_mode():
        expected = model(images, sizes)
    assert expected.num_detections.min() > 0
    fold_batch_norms(model)
    found = detections_from_onnx(model, images, sizes)
    assert found.num_detections.tolist() == expected.num_detections.tolist()
    assert found.labels.tolist() == expected.labels.tolist()
    torch.testing.assert_close(found.boxes, expected.boxes, atol=1e-2, rtol=0)
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.masks, expected.masks, atol=1e-3, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("features", ["c4", "c5"])
def test_half_precision_runs(features: str) -> None:
    model = random_model(small_config("resnet50", features, "frozen_bn")).eval()
    images, sizes = pictures()
    with torch.inference_mode():
        expected = model(images, sizes)
    fold_batch_norms(model)
    halve(model)
    found = detections_from_onnx(model, images, sizes)
    # Order and number of detections may differ by those near a threshold.
    torch.testing.assert_close(found.scores[:, 0], expected.scores[:, 0], atol=2e-2, rtol=0)
    assert found.masks.shape == expected.masks.shape


def detections_from_onnx(
    model: torch.nn.Module, images: torch.Tensor, sizes: torch.Tensor
) -> Detections:
    proto = onnx_from_model(model, ShapeBucket(HEIGHT, WIDTH), torch.uint8)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    feeds = {"images": images.numpy(), "image_sizes": sizes.numpy()}
    return Detections(*map(torch.from_numpy, session.run(OUTPUT_NAMES, feeds)))
