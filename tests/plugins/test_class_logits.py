import pytest
import torch
from cuda_graphs import replayed
from torch import Tensor

from maskrcnn_trt.plugins.class_logits import class_logits, relu_class_logits


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
