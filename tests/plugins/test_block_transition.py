import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from cuda_graphs import replayed
from torch import Tensor
from torch.nn import functional as F

from maskrcnn_trt.plugins.fused_convolution import block_transition, fastest
from maskrcnn_trt.plugins.fused_convolution.block_transition import (
    can_fuse_middle,
    can_fuse_transition,
)
from maskrcnn_trt.plugins.fused_convolution.fastest import Choices

# Rows and columns; the channels of input, shortcut's convolution (0: none), output and next block;
# and the size of the middle convolution (0: none).
SIZES = {
    "first block": ((20, 28), (64, 64, 256, 64), 0),
    "middle block": ((20, 28), (64, 0, 256, 64), 0),
    "unequal": ((7, 9), (128, 64, 64, 128), 0),
    "last block of res2": ((10, 14), (64, 0, 256, 128), 0),
    "block of res3": ((10, 14), (128, 0, 512, 128), 0),
    "last block of res3": ((10, 14), (128, 0, 512, 256), 0),
    "few pixels": ((1, 1), (64, 0, 64, 64), 0),
    "many pixels": ((170, 230), (64, 64, 256, 64), 0),
    "middle of the first block": ((20, 28), (64, 64, 256, 64), 3),
    "middle of the second block": ((19, 33), (64, 0, 256, 64), 3),
    "middle of the last block": ((10, 14), (64, 0, 256, 128), 3),
    "few pixels in the middle": ((1, 1), (64, 0, 64, 64), 3),
    "middle of res3": ((10, 14), (128, 0, 512, 128), 3),
    "middle of the last block of res3": ((9, 37), (128, 0, 512, 256), 3),
    "many pixels in the middle": ((101, 115), (64, 0, 256, 64), 3),
}


def random_arguments(
    sides: tuple[int, int],
    channels: tuple[int, int, int, int],
    middle: int,
    dtype: torch.dtype,
    device: str,
) -> list[Tensor | None]:
    inputs, shortcut, outputs, reduced = channels
    generator = torch.Generator().manual_seed(sum(channels))

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        values = scale * torch.randn(shape, generator=generator)
        last = torch.channels_last if len(shape) == 4 else torch.contiguous_format
        return values.to(device, dtype).contiguous(memory_format=last)

    return [
        draw(2, inputs, *sides),
        draw(outputs, inputs, 1, 1, scale=inputs**-0.5),
        draw(outputs),
        draw(2, shortcut or outputs, *sides),
        draw(outputs, shortcut, 1, 1, scale=shortcut**-0.5) if shortcut else None,
        draw(outputs) if shortcut else None,
        draw(reduced, outputs, 1, 1, scale=outputs**-0.5),
        draw(reduced),
        draw(inputs, inputs, middle, middle, scale=inputs**-0.5 / middle) if middle else None,
        draw(inputs) if middle else None,
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("sides", "channels", "middle"), SIZES.values(), ids=list(SIZES))
def test_equals_separate_convolutions(
    sides: tuple[int, int],
    channels: tuple[int, int, int, int],
    middle: int,
    dtype: torch.dtype,
    device: str,
) -> None:
    if device == "cpu" and max(sides) > 100:
        pytest.skip("only the kernel for GPUs divides the pixels into blocks")
    arguments = random_arguments(sides, channels, middle, dtype, device)
    assert can_fuse_transition(arguments[1], arguments[4], arguments[6])
    output, reduced = block_transition(*arguments)
    images, weight, bias, added, shortcut_weight, shortcut_bias, next_weight, next_bias, *others = (
        None if tensor is None else tensor.double() for tensor in arguments
    )
    middle_weight, middle_bias = others
    if middle_weight is not None:
        assert can_fuse_middle(middle_weight)
        images = F.conv2d(images, middle_weight, middle_bias, padding=1).relu().to(dtype).double()
    if shortcut_weight is not None:
        added = F.conv2d(added, shortcut_weight, shortcut_bias)
    expected = (F.conv2d(images, weight, bias) + added).relu()
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    # The second convolution reads rounded values.
    expected = F.conv2d(output.double(), next_weight, next_bias).relu()
    torch.testing.assert_close(reduced.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(("shortcut", "middle"), [(0, 0), (64, 0), (64, 3)])
def test_other_gpus_can_use_separate_convolutions(
    shortcut: int, middle: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Measuring separate convolutions measures each of them, too."""
    choices = Choices(tmp_path / "file.json")
    monkeypatch.setattr(fastest, "_choices_of", lambda _device: choices)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    arguments = random_arguments((9, 12), (64, shortcut, 256, 64), middle, torch.float16, "cuda")
    expected = block_transition(*(x if x is None else x.cpu() for x in arguments))
    for actual in (block_transition(*arguments), block_transition(*arguments)):
        for result, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(result.cpu(), other, rtol=4e-3, atol=4e-3)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    inputs, others = (
        random_arguments((9, 12), (64, 0, 256, 64), 0, torch.float16, "cuda") for _ in range(2)
    )
    others[0], others[3] = torch.zeros_like(others[0]), torch.zeros_like(others[3])

    def transition(images: Tensor, shortcut: Tensor) -> tuple[Tensor, Tensor]:
        return block_transition(images, *inputs[1:3], shortcut, *inputs[4:])

    results = replayed(transition, [others[0], others[3]], [inputs[0], inputs[3]])
    for actual, expected in zip(results, block_transition(*inputs), strict=True):
        assert torch.equal(actual, expected.cpu())


def test_empty_batch(device: str) -> None:
    images, weight, bias, shortcut, *others = random_arguments(
        (9, 12), (64, 0, 256, 64), 0, torch.float16, device
    )
    results = block_transition(images[:0], weight, bias, shortcut[:0], *others)
    assert [tuple(result.shape) for result in results] == [(0, 256, 9, 12), (0, 64, 9, 12)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("index", "change"),
    [
        (0, lambda x: x.float()),
        (1, lambda x: x.bfloat16()),
        (2, lambda x: x[1:]),
        (3, lambda x: x.transpose(2, 3)),
        (4, lambda _: None),
        (9, lambda _: None),
        (8, lambda x: x[..., :1, :1]),
        (6, lambda x: x.cpu()),
    ],
)
def test_wrong_arguments_raise(index: int, change: Callable[[Tensor], Tensor | None]) -> None:
    arguments = random_arguments((9, 12), (64, 64, 256, 64), 3, torch.float16, "cuda")
    arguments[index] = change(arguments[index])
    with pytest.raises((ValueError, RuntimeError)):
        block_transition(*arguments)


def results_of_all_blocks(arguments: list[Tensor | None]) -> list[list[Tensor]]:
    """Run the Triton kernel with all its launch parameters. On a CPU, it needs TRITON_INTERPRET=1.

    Returns:
        for each choice of launch parameters, the two results [B * H * W, channels].
    """
    from maskrcnn_trt.plugins.fused_convolution.block_transition_kernel import (
        fastest_blocks,
        launch_block_transition,
    )

    names = "images weight bias shortcut shortcut_weight shortcut_bias next_weight next_bias"
    names += " middle_weight middle_bias"
    tensors = {}
    for name, tensor in zip(names.split(), arguments, strict=True):
        if tensor is not None:
            tensors[name] = tensor.movedim(1, -1).contiguous() if tensor.dim() > 1 else tensor
            if name.endswith("weight"):
                tensors[name] = tensors[name].flatten(1)
    for name in ("images", "shortcut"):
        if "middle_weight" not in tensors:
            tensors[name] = tensors[name].reshape(1, 1, -1, tensors[name].shape[3])
    images = tensors["images"]
    results = []
    for blocks in fastest_blocks(tensors):
        output, reduced = (
            images.new_empty(*images.shape[:3], len(tensors[name]))
            for name in ("weight", "next_weight")
        )
        launch_block_transition({**tensors, "output": output, "reduced": reduced}, blocks)
        results.append([output.flatten(0, 2), reduced.flatten(0, 2)])
    return results


@pytest.mark.gpu
@pytest.mark.parametrize(("sides", "channels", "middle"), SIZES.values(), ids=list(SIZES))
def test_all_launch_parameters_give_the_same_results(
    sides: tuple[int, int], channels: tuple[int, int, int, int], middle: int
) -> None:
    arguments = random_arguments(sides, channels, middle, torch.float16, "cuda")
    on_cpu = [None if tensor is None else tensor.cpu() for tensor in arguments]
    expected = [result.movedim(1, -1).flatten(0, 2) for result in block_transition(*on_cpu)]
    for results in results_of_all_blocks(arguments):
        actual = [result.cpu() for result in results]
        torch.testing.assert_close(actual, expected, rtol=4e-3, atol=4e-3)


def test_interpreted_kernel_equals_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    cases = [
        random_arguments(sides, channels, middle, torch.float16, "cpu")
        for sides, channels, middle in SIZES.values()
        if max(sides) < 100
    ]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        found = process.map(results_of_all_blocks, cases)
        for arguments, results in zip(cases, found, strict=True):
            expected = [x.movedim(1, -1).flatten(0, 2) for x in block_transition(*arguments)]
            for actual in results:
                torch.testing.assert_close(actual, expected, rtol=4e-3, atol=4e-3)


def test_any_memory_format(device: str) -> None:
    arguments = random_arguments((5, 6), (64, 64, 128, 64), 3, torch.float16, device)
    expected = block_transition(*arguments)
    for index in (0, 3):
        arguments[index] = arguments[index].contiguous()
    for actual, other in zip(block_transition(*arguments), expected, strict=True):
        torch.testing.assert_close(actual, other, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(
    "channels",
    [
        (256, 0, 1024, 256),
        (128, 0, 512, 512),
        (64, 64, 512, 256),
        (48, 0, 256, 64),
        (64, 96, 256, 64),
        (64, 0, 256, 72),
    ],
)
def test_too_many_channels_or_no_power_of_two_cannot_be_fused(
    channels: tuple[int, int, int, int],
) -> None:
    arguments = random_arguments((1, 1), channels, 0, torch.float16, "cpu")
    assert not can_fuse_transition(arguments[1], arguments[4], arguments[6])


@pytest.mark.parametrize(("shortcut", "middle"), [(0, 0), (64, 0), (64, 3)])
def test_opcheck(shortcut: int, middle: int, device: str) -> None:
    arguments = random_arguments((3, 5), (64, shortcut, 64, 64), middle, torch.float16, device)
    utilities = ["test_schema", "test_faketensor"]
    torch.library.opcheck(block_transition, tuple(arguments), test_utils=utilities)
