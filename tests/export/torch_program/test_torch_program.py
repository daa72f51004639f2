import os
from collections import Counter
from pathlib import Path

import pytest
import torch
import torchvision
from shared_exports import cached_exports
from torch.export import ExportedProgram
from torch.nn import functional as F

from maskrcnn_trt.export.bundle import bundle_from_checkpoint, model_for_export
from maskrcnn_trt.export.errors import EngineError
from maskrcnn_trt.export.torch_program.fused_graph import (
    fuse_blocks,
    fuse_convolutions,
    fuse_middle_convolutions,
)
from maskrcnn_trt.export.torch_program.fused_modules import optimize_for_gpu
from maskrcnn_trt.export.torch_program.program import Compilation, compile_programs, write_program
from maskrcnn_trt.model.bundle.manifest import BundleError, read_manifest
from maskrcnn_trt.model.bundle.program import load_exported_program, program_from_exported
from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.model.checkpoint import load_checkpoint

BUCKET = ShapeBucket(96, 160)


def operations_in(program: ExportedProgram) -> Counter[str]:
    return Counter(str(node.target) for node in program.graph.nodes if node.op == "call_function")


def test_optimized_model_keeps_its_detections(tiny_checkpoint: Path) -> None:
    checkpoint = load_checkpoint(tiny_checkpoint)
    model = model_for_export(checkpoint, "fp32")
    images = torch.randint(0, 256, (2, 3, *BUCKET), generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([list(BUCKET), [80, 140]])
    with torch.inference_mode():
        expected = model.detect(images, sizes)
        optimize_for_gpu(model)
        actual = model.detect(images, sizes)
    assert expected.num_detections.min() > 0
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


@pytest.fixture(scope="module")
def programs(
    tiny_checkpoint: Path, shared_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Bundle of the tiny model with programs in tf32 and bf16 for inputs of 96x160."""
    path = tmp_path_factory.mktemp("programs") / "bundle"
    with cached_exports(shared_folder):
        bundle_from_checkpoint(
            tiny_checkpoint, path, precisions=("tf32", "bf16"), buckets=[BUCKET], with_programs=True
        )
    return path


@pytest.mark.slow
def test_manifest_lists_programs(programs: Path) -> None:
    listed = [(a.kind, a.precision, a.path) for a in read_manifest(programs).artifacts]
    assert listed == [
        ("onnx", "tf32", "model-fp32-96x160.onnx"),
        ("torch", "tf32", "model-fp32-96x160.pt2"),
        ("torch", "bf16", "model-bf16-96x160.pt2"),
    ]


@pytest.mark.slow
def test_program_reproduces_the_checkpoint(tiny_checkpoint: Path, programs: Path) -> None:
    cpu = torch.device("cpu")
    exported = load_exported_program(programs / "model-fp32-96x160.pt2", cpu)
    program = program_from_exported(exported, "fp32", cpu)
    own = load_checkpoint(tiny_checkpoint).build_model()
    for batch in (1, 2, 5):
        seed = torch.Generator().manual_seed(batch)
        images = torch.randint(0, 256, (batch, 3, *BUCKET), dtype=torch.uint8, generator=seed)
        sizes = torch.tensor([list(BUCKET)]).repeat(batch, 1)
        with torch.inference_mode():
            expected = own.detect(images, sizes)
        torch.testing.assert_close(program(images, sizes), tuple(expected), rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_convolutions_are_fused(programs: Path) -> None:
    single, half = (
        operations_in(torch.export.load(programs / f"model-{types}-96x160.pt2"))
        for types in ("fp32", "bf16")
    )
    # The stem, two per block of ResNet-10, the RPN's hidden map at five levels, two for masks.
    assert single["maskrcnn.convolution_relu.default"] == 1 + 8 + 5 + 2
    # Shortcuts, two per level of the pyramid, the RPN's output at five levels.
    assert single["aten.conv2d.default"] == 3 + 8 + 5
    assert single["aten.add.Tensor"] < 8
    # The pyramid's narrow lateral convolutions with their additions, the RPN's output.
    assert half["maskrcnn.pointwise_convolution.default"] == 4 + 5
    # Two layers of the box head.
    assert half["maskrcnn.gemm_convolution.default"] == 2
    # Like `convolution_relu` in fp32, but without the stem, and without the last ones of blocks,
    # which add a residual map. Shortcuts, and the pyramid's outputs.
    assert half["maskrcnn.cudnn_convolution.default"] == 4 + 5 + 2 + 3 + 4
    assert half["maskrcnn.convolution_relu.default"] == 4
    assert not half["aten.conv2d.default"]
    assert not half["aten.upsample_nearest2d.vec"]
    assert half["maskrcnn.resnet_stem.default"] == 1
    assert half["maskrcnn.upsampled_class_logits.default"] == 1


class _Branching(torch.nn.Module):
    """Module whose additions must not be fused: a shared sum, and upsampling by another factor."""

    def forward(self, images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor):  # type: ignore[no-untyped-def]
        shared = F.conv2d(images, weight, bias)
        coarse = F.interpolate(images[:, :, :3, :5], images.shape[2:], mode="nearest")
        return shared + images, shared.relu(), F.conv2d(images, weight, bias) + coarse


@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")  # raised by torch itself
def test_shared_values_are_not_fused() -> None:
    images, weight = torch.randn(2, 4, 9, 15).half(), torch.randn(4, 4, 1, 1).half()
    arguments = images, weight, torch.randn(4).half()
    program = torch.export.export(_Branching(), arguments).run_decompositions({})
    expected = program.module()(*arguments)
    fuse_convolutions(program)
    found = operations_in(program)
    assert found["maskrcnn.pointwise_convolution.default"] == 2
    assert found["aten.relu.default"] == 1
    assert found["aten.upsample_nearest2d.vec"] == 1
    torch.testing.assert_close(program.module()(*arguments), expected, rtol=1e-2, atol=1e-2)


class _Blocks(torch.nn.Module):
    """Residual blocks: reduction and expansion of 256 channels, in half precision."""

    def __init__(self) -> None:
        super().__init__()
        stages = torchvision.models.resnet50(weights=None, norm_layer=torch.nn.Identity)
        self.blocks = stages.layer1.half()
        for conv in self.modules():
            if isinstance(conv, torch.nn.Conv2d):
                conv.bias = torch.nn.Parameter(torch.randn(conv.out_channels).half() / 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.blocks(images)
        return output


@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")  # raised by torch itself
def test_blocks_are_fused_with_the_next_ones() -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 64, 9, 15).half()
    program = torch.export.export(_Blocks().eval(), (images,)).run_decompositions({})
    expected = program.module()(images)
    fuse_convolutions(program)
    fuse_blocks(program)
    # Nothing follows the last of the three blocks. The first one has a convolution in its shortcut.
    found = operations_in(program)
    assert found["maskrcnn.block_transition.default"] == 2
    # The first convolution of the first block, and the last one of the last block.
    assert found["maskrcnn.gemm_convolution.default"] == 2
    assert not found["maskrcnn.pointwise_convolution.default"]
    torch.testing.assert_close(program.module()(images), expected, rtol=1e-2, atol=1e-2)
    # Both transitions follow a 3x3 convolution.
    assert found["maskrcnn.cudnn_convolution.default"] == 3
    fuse_middle_convolutions(program)
    found = operations_in(program)
    assert found["maskrcnn.block_transition.default"] == 2
    assert found["maskrcnn.cudnn_convolution.default"] == 1
    torch.testing.assert_close(program.module()(images), expected, rtol=1e-2, atol=1e-2)


def test_bf16_for_onnxruntime_raises(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"bf16.*--engine torch"):
        bundle_from_checkpoint(tiny_checkpoint, tmp_path / "bundle", precisions=("bf16",))
    assert not (tmp_path / "bundle").exists()


def test_full_disk_raises(tmp_path: Path) -> None:
    (tmp_path / "model.pt2").symlink_to("/dev/full")
    program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    with pytest.raises(OSError, match="No space left"):
        write_program(program, tmp_path / "model.pt2")


def die(compilation: Compilation, _: bool) -> None:
    compilation.path.touch()
    os._exit(3)


def test_killed_compilation_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CC", "gcc")
    monkeypatch.setattr("maskrcnn_trt.export.torch_program.program._compile", die)
    path = tmp_path / "model.pt2"
    with pytest.raises(EngineError, match="memory ran out"):
        compile_programs([Compilation(path, "fp32", BUCKET, torch.uint8)])
    assert path.exists(), "the process has died earlier"


def test_gpu_without_a_c_compiler_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    compilation = Compilation(tmp_path / "model.pt2", "fp32", BUCKET, torch.uint8)
    with pytest.raises(EngineError, match=r"C compiler.*gcc"):
        compile_programs([compilation])
