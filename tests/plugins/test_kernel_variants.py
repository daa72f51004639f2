"""`maskrcnn kernels build` compiles all kernels of the default model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BUILD = """
import sys
from maskrcnn_trt.plugins.runtime.compilation import compile_kernel
from maskrcnn_trt.plugins.kernel_list import all_kernels

for kernel in all_kernels():
    compile_kernel(kernel, int(sys.argv[1]), "cubin")
"""
USE = """
import torch
from maskrcnn_trt.model.config.schema import ModelConfig
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
def test_default_model_compiles_no_further_kernel(tmp_path: Path) -> None:
    """Fresh processes have not loaded any kernel."""
    major, minor = torch.cuda.get_device_capability()
    run_program(BUILD, tmp_path, str(10 * major + minor))
    built = set(tmp_path.rglob("*.cubin"))
    assert built
    run_program(USE, tmp_path)
    assert set(tmp_path.rglob("*.cubin")) == built


def run_program(program: str, cache: Path, *arguments: str) -> None:
    paths = {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, *arguments]
    subprocess.run(command, env={**os.environ, **paths}, check=True)
