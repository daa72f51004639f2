from dataclasses import replace
from pathlib import Path

import onnx
import onnx.parser
import pytest
import torch
from shared_exports import made_once
from torch import Tensor
from torch.nn import functional as F

from maskrcnn_trt.model.bundle.manifest import read_manifest
from maskrcnn_trt.model.checkpoint import load_checkpoint, save_checkpoint

SIZES = ((96, 160), (70, 160), (96, 33), (50, 50)) * 2


@pytest.fixture(scope="session")
def smooth_noise() -> tuple[Tensor, Tensor]:
    """Smooth noise images [8, 3, 96, 160] uint8, and heights and widths before padding [8, 2]."""
    coarse = torch.rand(8, 3, 6, 10, generator=torch.Generator().manual_seed(0)) * 255
    images = F.interpolate(coarse, SIZES[0], mode="bilinear").to(torch.uint8)
    return images, torch.tensor(SIZES)


@pytest.fixture(scope="session")
def strict_checkpoint(
    tiny_checkpoint: Path, shared_folder: Path, smooth_noise: tuple[Tensor, Tensor]
) -> Path:
    """Tiny model with a score threshold at which some of `smooth_noise` have no detections."""
    tiny = load_checkpoint(tiny_checkpoint)
    with torch.inference_mode():
        best = tiny.build_model().detect(*smooth_noise).scores[:, 0].sort().values
    gap = best[1:5].diff().argmax() + 1
    config = tiny.model_config
    threshold = {"score_threshold": float(best[gap] + best[gap + 1]) / 2}
    roi = config.roi.model_copy(update=threshold)
    strict = replace(tiny, model_config=config.model_copy(update={"roi": roi}))
    return made_once(shared_folder / "strict.pth", lambda path: save_checkpoint(path, strict))


@pytest.fixture(scope="session")
def convolution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ONNX file of a single convolution in fp32, for tests that need no complete model."""
    path = tmp_path_factory.mktemp("convolution") / "model.onnx"
    text = (
        '<ir_version: 8, opset_import: ["": 18]>'
        "one (float[batch, 1, 8, 8] x) => (float[batch, 1, 8, 8] y)"
        "<float[1, 1, 1, 1] weight = {2.0}> { y = Conv(x, weight) }"
    )
    onnx.save(onnx.parser.parse_model(text), path)
    return path


@pytest.fixture
def quick_graphs(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the ONNX exporter return the graph of `bundle` instead of exporting one."""
    proto = onnx.load(bundle / read_manifest(bundle).artifacts[0].path)
    monkeypatch.setattr("maskrcnn_trt.export.bundle.onnx_from_model", lambda *_: proto)
