"""Gradients of `pyramid_roi_align` agree between implementations."""

import pytest
import torch
from pooling_cases import (
    DEFAULT,
    FORMATS,
    HEIGHT,
    IMPLEMENTATIONS,
    MODES,
    ROIS,
    SCALES,
    WIDTH,
    Pool,
    attributes,
    pool_by_torch,
    pool_by_torchvision,
    pyramid,
    random_rois,
)

from maskrcnn_trt.plugins.pyramid_roi_align import pyramid_roi_align


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", ["no RoI", "three images", "over and beyond the borders"])
def test_gradients_equal_torchvision(implementation: Pool, case: str) -> None:
    """The comparison is in float32, because the operation accumulates in float32."""
    rois = ROIS[case]
    ours = [feature.requires_grad_() for feature in pyramid(len(rois))]
    theirs = [feature.requires_grad_() for feature in pyramid(len(rois))]
    pooled = implementation(ours, rois)
    weights = torch.randn(pooled.shape, generator=torch.Generator().manual_seed(0))
    (pooled * weights).sum().backward()
    (pool_by_torchvision(theirs, rois) * weights).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        wanted = torch.zeros_like(other) if other.grad is None else other.grad
        torch.testing.assert_close(mine.grad, wanted, atol=1e-5, rtol=1e-5)


def test_gradient_has_the_dtype_of_the_features() -> None:
    rois = ROIS["three images"]
    halves = [feature.requires_grad_() for feature in pyramid(3, torch.float16)]
    singles = [feature.detach().float().requires_grad_() for feature in halves]
    pool_by_torch(halves, rois).sum().backward()
    pool_by_torch(singles, rois).sum().backward()
    for half, single in zip(halves, singles, strict=True):
        assert half.grad.dtype == torch.float16
        torch.testing.assert_close(half.grad.float(), single.grad, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("mode", ["default", "adaptive, aligned"])
def test_gradients_equal_finite_differences(
    mode: str, memory_format: torch.memory_format, device: str
) -> None:
    rois = torch.tensor([[[1, 2, 15, 11], [-3, 0, 40, 30], [0, 0, 31, 15]]] * 2).float().to(device)
    features = [
        torch.rand(2, 4, 8 >> level, 8 >> level, dtype=torch.float64, device=device)
        .to(memory_format=memory_format)
        .requires_grad_()
        for level in range(4)
    ]
    assert torch.autograd.gradcheck(
        lambda *maps: pyramid_roi_align(maps, rois, *attributes(4, MODES[mode])), features
    )


@pytest.mark.gpu
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("channels", [1, 5, 8, 36, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("batch", "side"), [(0, 7), (1, 7), (3, 14), (16, 2)])
def test_equals_the_cpu_on_a_gpu(
    dtype: torch.dtype, batch: int, side: int, channels: int, memory_format: torch.memory_format
) -> None:
    """Forward and backward agree for various channels, types, layouts, batches and sizes."""
    rois = random_rois(batch, 10)
    generator = torch.Generator().manual_seed(channels)
    sizes = [(int(HEIGHT * s), int(WIDTH * s)) for s in SCALES]
    maps = [torch.randn(batch, channels, *size, generator=generator).to(dtype) for size in sizes]
    weights = torch.randn(batch, 10, channels, side, side, generator=generator).to(dtype)
    answers = []
    for device in ("cpu", "cuda"):
        features = [
            m.to(device, memory_format=memory_format, copy=True).requires_grad_() for m in maps
        ]
        pooled = pyramid_roi_align(features, rois.to(device), side, *attributes(4, DEFAULT)[1:])
        pooled.backward(weights.to(device))
        answers.append([x.cpu() for x in (pooled.detach(), *(f.grad for f in features))])
    # float32 rounds the positions of samples, whose weights many gradients share.
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(dtype, 1e-4)
    for ours, wanted in zip(answers[1], answers[0], strict=True):
        torch.testing.assert_close(ours, wanted, atol=tolerance, rtol=tolerance)
