import pytest
import torch
from cuda_graphs import replayed
from torch import Tensor
from torch.nn import functional as F

from maskrcnn_trt.plugins.class_logits import (
    class_logits,
    relu_class_logits,
    upsampled_class_logits,
)


def random_arguments(
    instances: int, cells: int, channels: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(channels)
    features = torch.randn(instances, cells, channels, generator=generator)
    weight = torch.randn(7, channels, generator=generator) / channels**0.5
    bias = torch.randn(7, generator=generator)
    labels = torch.randint(0, 7, (instances,), generator=generator)
    moved = (tensor.to(device, dtype) for tensor in (features, weight, bias))
    return *moved, labels.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("instances", "cells", "channels"),
    [(3, 784, 256), (1, 1, 256), (5, 9, 8), (2, 50, 300), (2, 3, 5), (0, 784, 256),
     (100, 784, 256)],
)  # fmt: skip
def test_equals_products_with_the_weight_of_each_class(
    instances: int, cells: int, channels: int, dtype: torch.dtype, device: str
) -> None:
    arguments = random_arguments(instances, cells, channels, dtype, device)
    features, weight, bias, labels = arguments
    expected = torch.einsum("rpc,rc->rp", features.double(), weight.double()[labels])
    expected += bias.double()[labels][:, None]
    actual = class_logits(*arguments)
    assert actual.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("instances", "cells", "channels"),
    [(3, 784, 256), (1, 1, 256), (5, 9, 8), (2, 50, 300), (2, 3, 5), (0, 784, 256)],
)
def test_logits_and_gradients_with_relu(
    instances: int, cells: int, channels: int, dtype: torch.dtype, device: str
) -> None:
    features, weight, bias, labels = random_arguments(instances, cells, channels, dtype, device)
    offset = torch.linspace(-1, 1, channels, device=device).to(dtype)
    leaves = [x.requires_grad_() for x in (features, offset, weight, bias)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    activated = (exact[0] + exact[1]).relu()
    expected = torch.einsum("rpc,rc->rp", activated, exact[2][labels]) + exact[3][labels][:, None]
    actual = relu_class_logits(*leaves, labels)
    assert actual.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    factors = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    factors = factors.to(device, dtype)
    gradients = torch.autograd.grad(actual, leaves, factors)
    wanted = torch.autograd.grad(expected, exact, factors.double())
    for mine, other in zip(gradients, wanted, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), other, rtol=tolerance, atol=20 * tolerance)


# torch.compile imports deprecated parts of torch.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_gradients_with_relu_are_summed_in_float32(device: str) -> None:
    """Under autocast, matrix products of a compiled backward pass would round their inputs."""
    features, weight, bias, labels = random_arguments(64, 9, 8, torch.bfloat16, device)
    leaves = [x.requires_grad_() for x in (features, weight[0].clone(), weight, bias)]
    compiled = torch.compile(relu_class_logits, backend="aot_eager")
    with torch.autocast(device, torch.bfloat16):
        results = [function(*leaves, labels) for function in (relu_class_logits, compiled)]
    eager, traced = (torch.autograd.grad(x.float().sin().sum(), leaves) for x in results)
    assert all(map(torch.equal, eager, traced))


def test_nan_is_kept(device: str) -> None:
    features, weight, bias, labels = random_arguments(2, 3, 8, torch.float32, device)
    features[1, 2, 5] = torch.nan
    logits = relu_class_logits(features, torch.zeros_like(weight[0]), weight, bias, labels)
    assert logits.isnan().nonzero().tolist() == [[1, 2]]


@pytest.mark.gpu
def test_gradients_with_relu_are_reproducible() -> None:
    features, weight, bias, labels = random_arguments(40, 784, 256, torch.float16, "cuda")
    leaves = [x.requires_grad_() for x in (features, weight[0].clone(), weight, bias)]
    first, *others = (
        torch.autograd.grad(relu_class_logits(*leaves, labels).float().square().sum(), leaves)
        for _ in range(3)
    )
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.gpu
def test_wrong_arguments_raise() -> None:
    features, weight, bias, labels = random_arguments(2, 9, 8, torch.float16, "cuda")
    with pytest.raises(ValueError, match=r"weight.*float16"):
        class_logits(features, weight.float(), bias, labels)
    with pytest.raises(ValueError, match=r"offset.*\[8\]"):
        relu_class_logits(features, bias, weight, bias, labels)
    with pytest.raises(ValueError, match="features"):
        class_logits(features.double(), weight, bias, labels)


def upsampling_arguments(
    instances: int, channels: int, outputs: int, sides: tuple[int, int], dtype: torch.dtype,
    device: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return arguments of `upsampled_class_logits`."""
    generator = torch.Generator().manual_seed(instances)
    features = torch.randn(instances, channels, *sides, generator=generator)
    weight = torch.randn(2, 2, outputs, channels, generator=generator) / channels**0.5
    bias = torch.randn(outputs, generator=generator)
    class_weight = torch.randn(7, outputs, generator=generator) / outputs**0.5
    class_bias = torch.randn(7, generator=generator)
    labels = torch.randint(0, 7, (instances,), generator=generator)
    values = (x.to(device, dtype) for x in (features, weight, bias, class_weight, class_bias))
    return *values, labels.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("instances", "channels", "outputs", "sides"),
    [(3, 256, 256, (14, 14)), (1, 64, 128, (8, 8)), (50, 128, 64, (9, 8)), (2, 40, 24, (3, 5)),
     (0, 256, 256, (14, 14)), (25, 256, 256, (14, 14))],
)  # fmt: skip
def test_equals_transposed_convolution_and_logits_of_each_class(
    instances: int,
    channels: int,
    outputs: int,
    sides: tuple[int, int],
    dtype: torch.dtype,
    device: str,
) -> None:
    arguments = upsampling_arguments(instances, channels, outputs, sides, dtype, device)
    *values, labels = (x.cpu() for x in arguments)
    features, weight, bias, class_weight, class_bias = (x.double() for x in values)
    hidden = F.conv_transpose2d(features, weight.permute(3, 2, 0, 1), bias, stride=2).relu()
    expected = torch.einsum("rdhw,rd->rhw", hidden, class_weight[labels])
    expected += class_bias[labels][:, None, None]
    channels_last = arguments[0].contiguous(memory_format=torch.channels_last)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for given in (arguments[0], channels_last):
        with torch.backends.cudnn.flags(allow_tf32=False):
            actual = upsampled_class_logits(given, *arguments[1:])
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
def test_upsampled_logits_of_any_number_of_instances() -> None:
    """Groups of cells begin and end at different cells of instances."""
    features, *others, labels = upsampling_arguments(40, 256, 256, (14, 14), torch.float16, "cuda")
    expected = upsampled_class_logits(features, *others, labels)
    for count in (1, 2, 7, 33, 39):
        actual = upsampled_class_logits(features[:count], *others, labels[:count])
        assert torch.equal(actual, expected[:count])


@pytest.mark.gpu
def test_upsampled_logits_with_wrong_arguments_raise() -> None:
    arguments = upsampling_arguments(2, 64, 64, (8, 8), torch.float16, "cuda")
    features, weight, bias, class_weight, class_bias, labels = arguments
    with pytest.raises(ValueError, match=r"weight.*\[2, 2, 64, 64\]"):
        upsampled_class_logits(features, weight[:1], bias, class_weight, class_bias, labels)
    with pytest.raises(ValueError, match=r"class_bias.*float16"):
        upsampled_class_logits(features, weight, bias, class_weight, class_bias.float(), labels)
    with pytest.raises(ValueError, match=r"labels.*\[2\]"):
        upsampled_class_logits(features, weight, bias, class_weight, class_bias, labels[:1])


def test_opcheck_of_upsampled_logits(device: str) -> None:
    arguments = upsampling_arguments(2, 8, 6, (3, 5), torch.float32, device)
    torch.library.opcheck(upsampled_class_logits, arguments)


@pytest.mark.gpu
def test_upsampled_logits_can_be_captured() -> None:
    example = upsampling_arguments(2, 256, 256, (14, 14), torch.float16, "cuda")
    inputs = upsampling_arguments(2, 256, 256, (14, 14), torch.float16, "cpu")
    (logits,) = replayed(lambda *held: [upsampled_class_logits(*held)], example, inputs)
    assert torch.equal(logits, upsampled_class_logits(*(x.cuda() for x in inputs)).cpu())


def test_opcheck(device: str) -> None:
    features, weight, bias, labels = random_arguments(2, 9, 8, torch.float32, device)
    torch.library.opcheck(class_logits, (features, weight, bias, labels))
    leaves = (x.requires_grad_() for x in (features, weight[0].clone(), weight, bias))
    torch.library.opcheck(relu_class_logits, (*leaves, labels))


@pytest.mark.gpu
def test_can_be_captured() -> None:
    example = random_arguments(2, 784, 256, torch.float16, "cuda")
    inputs = random_arguments(2, 784, 256, torch.float16, "cpu")
    (logits,) = replayed(lambda *held: [class_logits(*held)], example, inputs)
    assert torch.equal(logits, class_logits(*(tensor.cuda() for tensor in inputs)).cpu())
