import pytest
import torch
from cuda_graphs import replayed
from torch import Tensor
from torch.nn import functional as F

from maskrcnn_trt.plugins.feature_patches import feature_patches

SIZES = [(9, 14), (5, 7), (3, 4), (2, 2), (1, 1)]
FORMATS = [torch.contiguous_format, torch.channels_last]


def patches_by_unfolding(features: list[Tensor], centres: Tensor, radius: int) -> Tensor:
    side = 2 * radius + 1
    columns = [F.unfold(feature, side, padding=radius) for feature in features]
    every = torch.cat(columns, dim=2).mT.unflatten(2, (-1, side, side)).movedim(2, -1)
    index = centres[..., None, None, None].expand(-1, -1, *every.shape[2:])
    return every.gather(1, index)


def pyramid(
    batch: int, channels: int, dtype: torch.dtype = torch.float32, levels: int = 5
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(channels)
    return [
        torch.randn(batch, channels, *size, generator=generator).to(dtype)
        for size in SIZES[:levels]
    ]


def random_centres(batch: int, count: int, levels: int = 5) -> Tensor:
    """Return indices of cells, most of them several times."""
    cells = sum(rows * columns for rows, columns in SIZES[:levels])
    return torch.randint(cells, (batch, count), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("radius", [0, 1, 2])
@pytest.mark.parametrize(
    ("batch", "channels", "count", "levels"),
    [(2, 5, 70, 5), (1, 8, 1, 1), (3, 256, 40, 5), (2, 300, 33, 2), (2, 4, 0, 5), (0, 4, 3, 5)],
)
def test_patches_and_gradients_equal_unfolded_maps(
    batch: int,
    channels: int,
    count: int,
    levels: int,
    radius: int,
    memory_format: torch.memory_format,
    device: str,
) -> None:
    features = pyramid(batch, channels, levels=levels)
    theirs = [x.clone().requires_grad_() for x in features]
    ours = [x.to(device).to(memory_format=memory_format).requires_grad_() for x in features]
    centres = random_centres(batch, count, levels)
    expected = patches_by_unfolding(theirs, centres, radius)
    patches = feature_patches(ours, centres.to(device), radius)
    assert torch.equal(patches.cpu(), expected)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    (expected * weights).sum().backward()
    (patches * weights.to(device)).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad.cpu(), other.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_are_added_in_float32(dtype: torch.dtype, device: str) -> None:
    """Sums in the dtype of the features would lose the small gradients."""
    (feature,) = features = [x.to(device).requires_grad_() for x in pyramid(1, 8, dtype, levels=1)]
    centres = torch.full((1, 64), 20, device=device)
    patches = feature_patches(features, centres, 0)
    weights = torch.full_like(patches, 0.5**9)
    weights[:, 0] = 1
    (patches * weights).sum().backward()
    assert feature.grad.dtype == dtype
    expected = torch.tensor(1 + 63 * 0.5**9).to(dtype)
    assert (feature.grad.flatten(2)[0, :, 20].cpu() == expected).all()
    assert feature.grad.count_nonzero() == 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_patches_have_the_dtype_of_the_features(dtype: torch.dtype, device: str) -> None:
    features, centres = pyramid(2, 16, dtype), random_centres(2, 50)
    patches = feature_patches([x.to(device) for x in features], centres.to(device), 1)
    expected = patches_by_unfolding([x.double() for x in features], centres, 1)
    assert patches.dtype == dtype
    assert torch.equal(patches.cpu().double(), expected)


def test_gradients_equal_finite_differences(device: str) -> None:
    features = [x.to(device).requires_grad_() for x in pyramid(2, 3, torch.float64, levels=2)]
    centres = random_centres(2, 20, levels=2).to(device)
    assert torch.autograd.gradcheck(lambda *maps: feature_patches(maps, centres, 1), features)


def test_gradients_are_reproducible(device: str) -> None:
    """On a CPU, several threads would add so many gradients."""
    features = [x.to(device) for x in pyramid(2, 64)]
    centres = random_centres(2, 500).to(device)
    grad = torch.randn(2, 500, 3, 3, 64).to(device)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        first, *others = (
            torch.ops.maskrcnn.feature_patches_backward(grad, features, centres, 1)
            for _ in range(6)
        )
    finally:
        torch.set_num_threads(threads)
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.gpu
def test_gradients_can_be_captured() -> None:
    features = [x.cuda().to(memory_format=torch.channels_last) for x in pyramid(2, 64)]
    inputs = [torch.randn(2, 90, 3, 3, 64), random_centres(2, 90)]

    def gradients(grad: Tensor, centres: Tensor) -> list[Tensor]:
        return torch.ops.maskrcnn.feature_patches_backward(grad, features, centres, 1)

    expected = gradients(*(x.cuda() for x in inputs))
    results = replayed(gradients, [torch.zeros_like(x) for x in inputs], inputs)
    for mine, other in zip(results, expected, strict=True):
        assert torch.equal(mine, other.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([torch.zeros(1, 4, 2, 2)] * 6, "1 to 5 maps, not 6"),
        ([torch.zeros(1, 4, 2, 2, dtype=torch.int32)], "must be .* not torch.int32"),
        ([torch.zeros(1, 4, 2, 2), torch.zeros(1, 5, 1, 1)], "same dtype, batch size and number"),
    ],
    ids=["maps", "dtype", "channels"],
)
def test_unsupported_features_are_rejected_on_a_gpu(features: list[Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        feature_patches([x.cuda() for x in features], torch.zeros(1, 1).long().cuda(), 1)


def test_opcheck(device: str) -> None:
    features = [x.to(device).requires_grad_() for x in pyramid(2, 8)]
    centres = random_centres(2, 10).to(device)
    torch.library.opcheck(torch.ops.maskrcnn.feature_patches.default, (features, centres, 1))
