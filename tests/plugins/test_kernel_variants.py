"""What `maskrcnn kernels build` compiles is what the default model uses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = """
import torch
from maskrcnn_trt.model.config import ModelConfig
from maskrcnn_trt.model.mask_rcnn import MaskRCNN
from maskrcnn_trt.model.targets import Targets

model = MaskRCNN(ModelConfig()).cuda().to(memory_format=torch.channels_last)
images = torch.rand(1, 3, 800, 1344, device="cuda") * 255
sizes = torch.tensor([[800, 1344]], device="cuda")
boxes = torch.tensor([[[50.0, 60, 300, 400]]], device="cuda")
masks = torch.ones(1, 1, 112, 112, dtype=torch.uint8, device="cuda")
targets = Targets(boxes, torch.ones_like(sizes[:, :1]), masks)
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        with torch.no_grad():
            model.eval()(images, sizes)
        losses = model.train()(images, sizes, targets, sizes[:, 0]).means()
    losses.sum().backward()
torch.cuda.synchronize()
"""


@pytest.mark.gpu
def test_the_default_model_finds_its_kernels_compiled(tmp_path: Path) -> None:
    """In processes of their own, which have not loaded any kernel before."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    major, minor = torch.cuda.get_device_capability()
    build = "from maskrcnn_trt.plugins.commands import kernels; kernels()"
    arguments = ["build", "--architecture", str(10 * major + minor)]
    subprocess.run([sys.executable, "-c", build, *arguments], env=environment, check=True)
    built = set(tmp_path.rglob("*.cubin"))
    assert built
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)
    assert set(tmp_path.rglob("*.cubin")) == built
