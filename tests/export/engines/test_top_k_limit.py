from dataclasses import replace
from pathlib import Path

import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from maskrcnn_trt.export.bundle import bundle_from_checkpoint
from maskrcnn_trt.export.engines.build import builder_for, limited_checkpoint
from maskrcnn_trt.export.engines.build_log import BuildLog
from maskrcnn_trt.export.engines.options import EngineOptions
from maskrcnn_trt.export.errors import EngineError
from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.model.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from maskrcnn_trt.model.mask_rcnn import MaskRCNN


def with_candidates(checkpoint: Checkpoint, proposals: int, detections: int) -> Checkpoint:
    config = checkpoint.model_config
    rpn = config.rpn.model_copy(update={"pre_nms_top_n_test": proposals})
    roi = config.roi.model_copy(update={"nms_candidates": detections})
    return replace(checkpoint, model_config=config.model_copy(update={"rpn": rpn, "roi": roi}))


def test_config_over_the_limit_is_reduced(tiny_checkpoint: Path) -> None:
    tiny = load_checkpoint(tiny_checkpoint)
    for counts in ((1000, 2000), (3840, 3840)):
        kept = with_candidates(tiny, *counts)
        limited, changes = limited_checkpoint(kept)
        assert (limited.model_config, changes) == (kept.model_config, "")
    checkpoint = with_candidates(tiny, 6000, 4000)
    limited, changes = limited_checkpoint(checkpoint)
    assert limited.model_config == with_candidates(checkpoint, 3840, 3840).model_config
    assert changes == (
        "rpn.pre_nms_top_n_test=3840 instead of 6000, roi.nms_candidates=3840 instead of 4000"
    )
    assert checkpoint.model_config.rpn.pre_nms_top_n_test == 6000


def graph_with_top_k(model: MaskRCNN, *_: object) -> onnx.ModelProto:
    """Return an ONNX graph of a convolution and a TopK with the k of the model's configuration."""
    k = model.config.rpn.pre_nms_top_n_test
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]>'
        "one (float[batch, 1, 1, 6720] scores) => (float[batch, 1, 1, best] values)"
        f"<float[1, 1, 1, 1] weight = {{1.0}}, int64[1] k = {{{k}}}>"
        "{ maps = Conv(scores, weight) values, indices = TopK(maps, k) }"
    )


def test_engine_has_a_smaller_k_than_its_onnx_file(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT cannot build an engine from the bundle's ONNX file, whose k is 6000."""
    pytest.importorskip("tensorrt_rtx", reason="needs the wheel tensorrt-rtx")
    monkeypatch.setattr("maskrcnn_trt.export.bundle.onnx_from_model", graph_with_top_k)
    checkpoint = with_candidates(load_checkpoint(tiny_checkpoint), 6000, 200)
    save_checkpoint(tmp_path / "many.pth", checkpoint)
    options = EngineOptions(batches=(1,), compute_capabilities=("8.9",))
    builder = builder_for("tensorrt-rtx", options, BuildLog(tmp_path / "build.log"))
    reports: list[str] = []
    bundle = tmp_path / "bundle"
    manifest = bundle_from_checkpoint(
        tmp_path / "many.pth", bundle, precisions=("fp32",), buckets=(ShapeBucket(96, 160),),
        builders=(builder,), report=reports.append,
    )  # fmt: skip
    graph, engine = (bundle / artifact.path for artifact in manifest.artifacts)
    assert engine.is_file()
    assert numpy_helper.to_array(onnx.load(graph).graph.initializer[1]) == [6000]
    assert any("rpn.pre_nms_top_n_test=3840 instead of 6000" in sentence for sentence in reports)
    with pytest.raises(EngineError, match=r"ITopKLayer .* maximum value allowed \(3840\)"):
        builder.build(graph, tmp_path / "x.rtx", "fp32")
