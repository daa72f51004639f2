"""Equality of ONNX Runtime and torch for every kind of backbone and convention."""

from dataclasses import replace
from io import BytesIO
from pathlib import Path

import onnxruntime
import pytest
import torch
from PIL import Image
from small_models import (
    CONVENTIONS,
    HEIGHT,
    SHORT_RESNET50,
    WIDTH,
    assert_same,
    detections_from_session,
    noise_images,
    random_model,
    small_config,
)
from torchvision.models import resnet

from maskrcnn_trt.export.bundle import bundle_from_checkpoint
from maskrcnn_trt.export.onnx.export import onnx_from_model
from maskrcnn_trt.export.onnx.precision import fold_batch_norms
from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.model.checkpoint import load_checkpoint, save_checkpoint
from maskrcnn_trt.model.masks import mask_from_rle
from maskrcnn_trt.serving.offline import Detector

DETECTRON2, LEGACY = CONVENTIONS["detectron2"], CONVENTIONS["maskrcnn-benchmark"]
DETECTRON2_V2_HEADS = {
    **DETECTRON2,
    "rpn": {"min_side": 0, "conv_depth": 2},
    "roi": {**DETECTRON2["roi"], "box_head_convs": 1, "head_norm": "bn"},
}
# Each export takes six seconds, so that the cases combine backbones, norms and conventions.
CASES = {
    "R-10-FPN with detectron2's V2 heads": ("resnet10", "fpn", "gn", DETECTRON2_V2_HEADS),
    "R-10-C4 of maskrcnn-benchmark": ("resnet10", "c4", "bn", LEGACY),
    "C5 of detectron2": ("resnet50", "c5", "frozen_bn", DETECTRON2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_runtime_reproduces_the_model_for_every_body(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resnet, "resnet50", SHORT_RESNET50)
    name, features, norm, changes = CASES[case]
    config = small_config(name, features, norm, **changes)
    model = random_model(config).eval()
    images, sizes = noise_images()
    with torch.inference_mode():
        expected = model(images, sizes)
    assert expected.num_detections.min() > 0
    fold_batch_norms(model)
    proto = onnx_from_model(model, ShapeBucket(HEIGHT, WIDTH), torch.uint8)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    assert_same(detections_from_session(session, images, sizes), expected)


@pytest.mark.slow
def test_c4_bundle_runs_in_half_precision(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = small_config("resnet10", "c4", "frozen_bn", mask_paste="detectron2")
    model = random_model(config).eval()
    tiny = load_checkpoint(tiny_checkpoint)
    sizes = {"min_size": HEIGHT, "max_size": WIDTH}
    checkpoint = replace(
        tiny,
        model_config=config,
        weights=model.state_dict(),
        preprocessing=tiny.preprocessing.model_copy(update=sizes),
        buckets=(ShapeBucket(HEIGHT, WIDTH),),
    )
    save_checkpoint(tmp_path / "c4.pth", checkpoint)
    manifest = bundle_from_checkpoint(
        tmp_path / "c4.pth", tmp_path / "bundle", precisions=("fp16",)
    )
    assert (manifest.model_name, manifest.mask_side) == ("maskrcnn_resnet10_c4", 14)
    assert manifest.mask_paste == "detectron2"
    images, sizes = (part[:1] for part in noise_images())
    png = BytesIO()
    Image.fromarray(images[0].permute(1, 2, 0).numpy()).save(png, "PNG")
    predictor = Detector(tmp_path / "bundle")
    found = predictor.detect(png.getvalue())
    predictor.close()
    assert len(found.rles) == len(found.scores) > 0
    assert any(mask_from_rle(rle).any() for rle in found.rles)
    with torch.inference_mode():
        expected = model.detect(images, sizes)
    # Lower scores may differ, because rounding decides near a threshold.
    assert found.scores[0] == pytest.approx(float(expected.scores[0, 0]), abs=2e-2)
