import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.utils import fresh_cache
from torch.export import Dim

from maskrcnn_trt.model.bundle.compiled_program import load_compiled_program, write_compiled_program
from maskrcnn_trt.model.bundle.manifest import Precision
from maskrcnn_trt.model.bundle.program import load_exported_program, program_from_exported

SHAPE = torch.Size((2, 3, 24, 40))


class Detector(nn.Module):
    """Model with parameters, buffers, constants, custom operations and batch-sized outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.block = nn.Conv2d(4, 4, 3)
        # With small weights, the blocks do not amplify rounding errors.
        nn.init.normal_(self.block.weight, std=1e-4)
        self.register_buffer("mean", torch.tensor([0.5]))
        self.order = torch.tensor([1, 0])

    def forward(self, images: Tensor, image_sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        maps = self.convolution(images.float() / 255 - self.mean)
        maps = maps.contiguous(memory_format=torch.channels_last)
        weights, window = (self.block.weight, self.block.bias), ([1, 1], [1, 1], [1, 1])
        for _ in range(33):  # as many residual blocks as in an R-101
            maps = torch.ops.maskrcnn.convolution_relu(maps, *weights, maps, *window)
        maps = maps + torch.ops.maskrcnn.cudnn_convolution(maps, *weights, *window, False)
        scores, indices = torch.ops.maskrcnn.stable_top_k(maps.flatten(1), 5)
        return scores, indices, image_sizes[:, self.order].repeat(2, 1)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "model.pt2"
    torch.manual_seed(0)
    batch = {0: Dim("batch", min=1)}
    inputs = torch.zeros(SHAPE, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.int64)
    torch.export.save(
        torch.export.export(Detector().eval(), inputs, dynamic_shapes=(batch, batch)), path
    )
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "precision"),
    [
        pytest.param(
            "cpu",
            "fp32",
            marks=pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler"),
        ),
        pytest.param("cuda:0", "fp32", marks=pytest.mark.gpu),
        pytest.param("cuda:0", "tf32", marks=pytest.mark.gpu),
    ],
)
# Code without vector instructions needs no test programs, and one thread no further processes.
@config.patch({"cpp.vec_isa_ok": False, "compile_threads": 1})
@pytest.mark.timeout(600)
def test_compiled_program_equals_the_interpreted_one(
    program: Path, tmp_path: Path, device: str, precision: Precision
) -> None:
    path = tmp_path / "model.compiled"
    target = torch.device(device)
    with fresh_cache():  # otherwise torch may reuse the code of an earlier run
        write_compiled_program(program, precision, target, SHAPE, torch.uint8, path)
    compiled = load_compiled_program(path, precision, target)
    cpu = torch.device("cpu")
    interpreted = program_from_exported(load_exported_program(program, cpu), "fp32", cpu)
    for batch in (1, 2, 5, 1):
        images = torch.randint(0, 256, (batch, *SHAPE[1:]), dtype=torch.uint8)
        sizes = torch.randint(1, 41, (batch, 2))
        expected = interpreted(images, sizes)
        actual = compiled(images.to(target), sizes.to(target))
        torch.testing.assert_close(
            [output.cpu() for output in actual], list(expected), rtol=1e-3, atol=1e-3
        )
