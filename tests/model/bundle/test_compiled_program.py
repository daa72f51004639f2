import multiprocessing
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.utils import fresh_cache
from torch.export import Dim

from maskrcnn_trt.model.bundle.compiled_program import (
    add_kernels,
    compile_program,
    load_compiled_program,
    write_compiled_program,
)
from maskrcnn_trt.model.bundle.kernel_files import cached_kernels
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
    save_program(Detector(), path)
    return path


def save_program(model: nn.Module, path: Path) -> None:
    batch = {0: Dim("batch", min=1)}
    inputs = torch.zeros(SHAPE, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.int64)
    torch.export.save(
        torch.export.export(model.eval(), inputs, dynamic_shapes=(batch, batch)), path
    )


def compile_and_write(
    program: Path, precision: Precision, device: torch.device, path: Path
) -> None:
    arguments = program, precision, device, SHAPE, torch.uint8
    codes = [compile_program(*arguments, any_batch=any_batch) for any_batch in (False, True)]
    write_compiled_program(program, *codes, path)


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
        compile_and_write(program, precision, target, path)
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


class Transition(nn.Module):
    """Model with a CUDA kernel of this package, and a Triton kernel that torch does not store."""

    def forward(self, images: Tensor, image_sizes: Tensor) -> tuple[Tensor, ...]:
        maps = (
            images[:, :1].half().repeat(1, 64, 1, 1).contiguous(memory_format=torch.channels_last)
        )
        weight, bias = maps.new_ones(64, 64, 1, 1), maps.new_ones(64)
        output, reduced = torch.ops.maskrcnn.block_transition(
            maps, weight, bias, maps, None, None, weight, bias
        )
        return *torch.ops.maskrcnn.stable_top_k(reduced.flatten(1).float(), 5), output, image_sizes


def compiled_when_run(path: Path, folder: Path) -> set[str]:
    """Return the kernels that a compiled program compiles when it runs with empty caches."""
    os.environ |= {"XDG_CACHE_HOME": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    device = torch.device("cuda", 0)
    program = load_compiled_program(path, "fp32", device)
    loaded = cached_kernels(device).keys()
    for batch in (1, 2):
        images = torch.zeros(batch, *SHAPE[1:], dtype=torch.uint8, device=device)
        program.prepare(images, torch.full((batch, 2), 24, device=device))
    return cached_kernels(device).keys() - loaded


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_added_kernels_are_not_compiled_again(tmp_path: Path) -> None:
    program, path = tmp_path / "model.pt2", tmp_path / "model.compiled"
    device = torch.device("cuda", 0)
    save_program(Transition(), program)
    # Each step needs a new process, because kernels in a process's memory are not compiled again.
    steps = (
        (compile_and_write, program, "fp32", device, path),
        (compiled_when_run, path, tmp_path / "before"),
        (add_kernels, path, "fp32", device, SHAPE, torch.uint8),
        (compiled_when_run, path, tmp_path / "after"),
    )
    compiled = []
    for step in steps:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            compiled.append(process.submit(*step).result())
    assert {name.split("/")[0] for name in compiled[1]} == {"nvrtc", "triton"}
    assert compiled[3] == set()
