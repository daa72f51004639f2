"""Loading of models through torch.hub from a renamed folder, without installation."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SCRIPT = """
import sys, torch
sys.meta_path = [f for f in sys.meta_path if "editable" not in str(f)]
repository, weights = sys.argv[1:]
model = torch.hub.load(repository, "maskrcnn_resnet50_c4", source="local", num_classes=3)
assert not model.training
assert model.roi_heads.box_predictor.cls_score.out_features == 4
assert sys.modules["maskrcnn_trt"].__file__.startswith(repository)
model = torch.hub.load(repository, "maskrcnn_resnet50_fpn", source="local", num_classes=3)
torch.save(model.state_dict(), weights)
again = torch.hub.load(repository, "maskrcnn_resnet50_fpn", source="local", weights=weights)
for name, tensor in model.state_dict().items():
    assert torch.equal(again.state_dict()[name], tensor), name
try:
    torch.hub.load(repository, "maskrcnn_resnet101_fpn", source="local", weights=weights)
except Exception as error:
    print(error)
try:
    torch.hub.load(repository, "maskrcnn_resnet50_fpn", source="local", num_classes=0)
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_torch_hub_loads_models_from_a_renamed_folder(tmp_path: Path) -> None:
    repository, weights = tmp_path / "user_maskrcnn_main", tmp_path / "model.pth"
    left_out = shutil.ignore_patterns(".*", "tests", "build", "runs", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, repository, ignore=left_out)
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, repository, weights],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    for fact in (
        str(weights),
        "resnet50 fpn",
        "resnet101 fpn",
        "maskrcnn_resnet50_fpn",
        "num_classes is 0; ",
    ):
        assert fact in result.stdout
