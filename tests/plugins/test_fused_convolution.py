from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from cuda_graphs import replayed
from torch import Tensor
from torch.nn import functional as F

from maskrcnn_trt.plugins.fused_convolution import (
    convolution_relu,
    cudnn_convolution,
    fastest,
    gemm_convolution,
    pointwise_convolution,
)
from maskrcnn_trt.plugins.fused_convolution.fastest import Choices, run_fastest
from maskrcnn_trt.plugins.fused_convolution.libraries import UnsupportedError

TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}

# batch, channels in and out, rows, columns, stride
SIZES = {
    "residual block": (2, 64, 256, 20, 28, 1),
    "deep": (1, 512, 128, 10, 14, 1),
    "narrow": (2, 256, 15, 12, 20, 1),
    "odd channels": (3, 24, 40, 6, 10, 1),
    "strided": (2, 64, 128, 21, 30, 2),
    "one pixel": (1, 32, 32, 1, 1, 1),
    "pyramid": (2, 256, 256, 18, 26, 1),
    "small pyramid": (1, 64, 64, 2, 2, 1),
}


def random_tensor(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return tensor.to(device, dtype)


def random_pointwise(
    size: tuple[int, ...], dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, weight and bias of a 1x1 convolution of one of `SIZES`."""
    batch, channels, outputs, rows, columns, _ = size
    images = random_tensor(batch, channels, rows, columns, dtype=dtype, device=device)
    weight = random_tensor(outputs, channels, 1, 1, dtype=dtype, device=device) / channels**0.5
    return images, weight, random_tensor(outputs, dtype=dtype, device=device)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(
        actual.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("residual", ["none", "same", "half"])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("size", SIZES.values(), ids=list(SIZES))
def test_pointwise_convolution_adds_residual_and_relu(
    size: tuple[int, ...], relu: bool, residual: str, dtype: torch.dtype, device: str
) -> None:
    batch, _, outputs, rows, columns, stride = size
    if residual == "half" and (rows % 2 or columns % 2 or stride > 1):
        pytest.skip("no map has half of this size")
    images, weight, bias = random_pointwise(size, dtype, device)
    expected = F.conv2d(images.double(), weight.double(), bias.double(), stride)
    added = None
    if residual != "none":
        sides = [side // (2 if residual == "half" else 1) for side in expected.shape[2:]]
        added = random_tensor(batch, outputs, *sides, dtype=dtype, device=device)
        expected += F.interpolate(added.double(), expected.shape[2:], mode="nearest")
    actual = pointwise_convolution(images, weight, bias, added, stride, relu)
    assert_near(actual, expected.relu() if relu else expected, dtype)


def test_strides_and_upsampled_residuals_combine(device: str) -> None:
    images, weight, bias = random_pointwise((2, 64, 64, 16, 24, 2), torch.float16, device)
    added = random_tensor(2, 64, 4, 6, dtype=torch.float16, device=device)
    expected = F.conv2d(images.double(), weight.double(), bias.double(), 2)
    expected += F.interpolate(added.double(), scale_factor=2)
    actual = pointwise_convolution(images, weight, bias, added, 2, False)
    assert_near(actual, expected, torch.float16)


class Lateral(torch.nn.Module):
    """Lateral convolution of a feature pyramid."""

    def forward(self, images: Tensor, weight: Tensor, bias: Tensor, coarse: Tensor) -> Tensor:
        result: Tensor = pointwise_convolution(images, weight, bias, coarse, 1, False)
        return result


@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")  # raised by torch itself
def test_lateral_convolutions_are_traced_without_a_gpu() -> None:
    images, weight, bias = random_pointwise((1, 64, 64, 16, 24, 1), torch.bfloat16, "cpu")
    coarse = random_tensor(1, 64, 8, 12, dtype=torch.bfloat16, device="cpu")
    program = torch.export.export(Lateral(), (images, weight, bias, coarse))
    result = program.run_decompositions({}).module()(images, weight, bias, coarse)
    assert result.shape == (1, 64, 16, 24)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    "window", [(3, 1, 1, 1), (3, 2, 1, 1), (7, 2, 3, 1), (1, 1, 0, 1), (3, 1, 2, 2)]
)
def test_convolution_relu_equals_separate_operations(
    window: tuple[int, ...], residual: bool, dtype: torch.dtype, device: str
) -> None:
    """A window is kernel size, stride, padding and dilation."""
    kernel, *others = window
    images = random_tensor(2, 32, 18, 22, dtype=dtype, device=device)
    weight = random_tensor(48, 32, kernel, kernel, dtype=dtype, device=device) / (32**0.5 * kernel)
    bias = random_tensor(48, dtype=dtype, device=device)
    settings = [[value] * 2 for value in others]
    expected = F.conv2d(images.double(), weight.double(), bias.double(), *settings)
    added = random_tensor(*expected.shape, dtype=dtype, device=device) if residual else None
    if added is not None:
        expected += added.double()
    with torch.backends.cudnn.flags(allow_tf32=False):
        actual = convolution_relu(images, weight, bias, added, *settings)
    assert_near(actual, expected.relu(), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "window", [(3, 1, 1, 1), (3, 2, 1, 1), (7, 2, 3, 1), (1, 1, 0, 1), (3, 1, 2, 2)]
)
@pytest.mark.parametrize("outputs", [48, 5])
@pytest.mark.parametrize("relu", [False, True])
def test_cudnn_convolution_equals_separate_operations(
    relu: bool, outputs: int, window: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    """A window is kernel size, stride, padding and dilation."""
    kernel, *others = window
    images = random_tensor(2, 32, 18, 22, dtype=dtype, device=device)
    weight = random_tensor(outputs, 32, kernel, kernel, dtype=dtype, device=device) / kernel / 6
    bias = random_tensor(outputs, dtype=dtype, device=device)
    settings = [[value] * 2 for value in others]
    expected = F.conv2d(images.double(), weight.double(), bias.double(), *settings)
    actual = cudnn_convolution(images, weight, bias, *settings, relu)
    assert_near(actual, expected.relu() if relu else expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("size", SIZES.values(), ids=list(SIZES))
def test_gemm_convolution_equals_separate_operations(
    size: tuple[int, ...], relu: bool, residual: bool, dtype: torch.dtype, device: str
) -> None:
    batch, _, outputs, rows, columns, _ = size
    images, weight, bias = random_pointwise(size, dtype, device)
    added = random_tensor(batch, outputs, rows, columns, dtype=dtype, device=device)
    expected = F.conv2d(images.double(), weight.double(), bias.double())
    expected = expected + added.double() if residual else expected
    # The second call uses the algorithm that the first call found to be the fastest.
    for _ in range(2):
        actual = gemm_convolution(images, weight, bias, added if residual else None, relu)
        assert_near(actual, expected.relu() if relu else expected, dtype)


def test_choices_are_kept_for_later_processes(tmp_path: Path) -> None:
    path = tmp_path / "folder/choices.json"
    first, second = Choices(path), Choices(path)
    first.add("a", 2)
    second.add("b", 1)  # must not lose the other process's choice
    third = Choices(path)
    assert (third["a"], third["b"]) == (2, 1)
    assert "c" not in third


@pytest.mark.parametrize("content", ["", "[1, 2]", "{", "\0"])
def test_damaged_choices_are_replaced(content: str, tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    path.write_text(content)
    Choices(path).add("a", 0)
    assert Choices(path)["a"] == 0


@pytest.mark.gpu
def test_fastest_supported_implementation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastest, "_choices_of", lambda _device: Choices(tmp_path / "file.json"))
    numbers = torch.rand(1 << 24, device="cuda")

    def unsupported() -> Tensor:
        raise UnsupportedError("unsupported")

    def slow() -> Tensor:
        return numbers.sort().values.sum()

    def fast() -> Tensor:
        return numbers[:1] + 1

    implementations = [unsupported, slow, fast]
    for _ in range(2):
        assert torch.equal(run_fastest("test", implementations), numbers[:1] + 1)
    with pytest.raises(UnsupportedError):
        run_fastest("none", [unsupported])


@pytest.mark.gpu
def test_library_convolutions_can_be_captured() -> None:
    images = random_tensor(2, 64, 20, 30, dtype=torch.float16, device="cuda")
    weights = [
        random_tensor(64, 64, side, side, dtype=torch.float16, device="cuda") for side in (3, 1)
    ]
    bias = random_tensor(64, dtype=torch.float16, device="cuda")

    def both(held: Tensor) -> tuple[Tensor]:
        convolved = cudnn_convolution(held, weights[0] / 24, bias, [1, 1], [1, 1], [1, 1], True)
        return (gemm_convolution(convolved, weights[1] / 8, bias, held, True),)

    (output,) = replayed(both, [torch.zeros_like(images)], [images])
    assert torch.equal(output, both(images)[0].cpu())


@pytest.mark.gpu
def test_result_does_not_depend_on_uninitialised_memory() -> None:
    images = random_tensor(2, 64, 40, 40, dtype=torch.float16, device="cuda")
    weight = random_tensor(64, 64, 3, 3, dtype=torch.float16, device="cuda") / 24
    bias = random_tensor(64, dtype=torch.float16, device="cuda")
    for _ in range(3):
        stale = torch.full((2, 64, 40, 40), torch.nan, dtype=torch.float16, device="cuda")
        del stale
        for operation in (
            partial(cudnn_convolution, relu=True),
            partial(convolution_relu, residual=None),
        ):
            output = operation(images, weight, bias, stride=[1, 1], padding=[1, 1], dilation=[1, 1])
            assert output.isfinite().all()


@pytest.mark.parametrize("operation", [convolution_relu, pointwise_convolution])
def test_fake_outputs_have_the_shape_of_real_ones(
    operation: Callable[..., Tensor], device: str
) -> None:
    images = random_tensor(2, 32, 8, 12, dtype=torch.float16, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    weight = random_tensor(48, 32, 1, 1, dtype=torch.float16, device=device)
    bias = random_tensor(48, dtype=torch.float16, device=device)
    settings = ([1, 1], [0, 0], [1, 1]) if operation is convolution_relu else (1, True)
    eager = operation(images, weight, bias, None, *settings)
    assert eager.shape == (2, 48, 8, 12)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = operation(images, weight, bias, None, *settings)
    assert (fake.shape, fake.dtype) == (eager.shape, eager.dtype)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [None, (8, 10), (4, 5)])
def test_gradients_of_pointwise_convolutions(
    residual: tuple[int, int] | None, relu: bool, device: str
) -> None:
    dtype = torch.float16 if device == "cuda" else torch.float64
    shapes = [(2, 16, 8, 10), (24, 16, 1, 1), (24,), *([(2, 24, *residual)] if residual else [])]

    def separate(images: Tensor, weight: Tensor, bias: Tensor, *added: Tensor) -> Tensor:
        output = F.conv2d(images, weight, bias)
        for addend in added:
            output = output + F.interpolate(addend, output.shape[2:], mode="nearest")
        return output.relu() if relu else output

    def fused(images: Tensor, weight: Tensor, bias: Tensor, *added: Tensor) -> Tensor:
        return pointwise_convolution(images, weight, bias, added[0] if added else None, 1, relu)

    assert_equal_gradients(fused, separate, shapes, dtype, device)


@pytest.mark.parametrize("residual", [False, True])
def test_gradients_of_convolutions(residual: bool, device: str) -> None:
    dtype = torch.float16 if device == "cuda" else torch.float64
    shapes = [(2, 16, 9, 11), (24, 16, 3, 3), (24,), *([(2, 24, 5, 6)] if residual else [])]
    window = [2, 2], [1, 1], [1, 1]

    def separate(images: Tensor, weight: Tensor, bias: Tensor, *added: Tensor) -> Tensor:
        return sum(added, F.conv2d(images, weight, bias, *window)).relu()

    def fused(images: Tensor, weight: Tensor, bias: Tensor, *added: Tensor) -> Tensor:
        return convolution_relu(images, weight, bias, added[0] if added else None, *window)

    assert_equal_gradients(fused, separate, shapes, dtype, device)


@pytest.mark.parametrize("relu", [False, True])
def test_gradients_of_cudnn_convolutions(relu: bool, device: str) -> None:
    dtype = torch.float16 if device == "cuda" else torch.float64
    window = [2, 1], [1, 1], [1, 1]

    def separate(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        output = F.conv2d(images, weight, bias, *window)
        return output.relu() if relu else output

    def fused(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return cudnn_convolution(images, weight, bias, *window, relu)

    shapes = [(2, 16, 9, 11), (24, 16, 3, 3), (24,)]
    assert_equal_gradients(fused, separate, shapes, dtype, device)


def assert_equal_gradients(
    fused: Callable[..., Tensor],
    separate: Callable[..., Tensor],
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    device: str,
) -> None:
    inputs = [random_tensor(*shape, dtype=dtype, device=device) / 4 for shape in shapes]
    gradients = []
    for function, kind in ((fused, dtype), (separate, torch.float64)):
        leaves = [x.to(kind).requires_grad_() for x in inputs]
        output = function(*leaves)
        factors = random_tensor(*output.shape, dtype=kind, device=device)
        gradients.append(torch.autograd.grad(output, leaves, factors))
    for ours, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=2e-2, atol=2e-2)
