import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from maskrcnn_trt.plugins.resnet_stem import arranged_weight, operation, resnet_stem

MEAN, STD = torch.tensor([123.7, 116.3, 103.5]), torch.tensor([58.4, 57.1, 1.0])
TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 4e-2}


def expected_map(images: Tensor, sizes: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute the stem in float64, image by image, with pixels rounded to the weight's dtype."""
    pixels = torch.zeros(images.shape, dtype=torch.float64)
    for row, image, (height, width) in zip(pixels, images.cpu(), sizes.tolist(), strict=True):
        inside = image[:, :height, :width].float()
        normalised = (inside - MEAN[:, None, None]) / STD[:, None, None]
        row[:, :height, :width] = normalised.to(weight.dtype)
    hidden = F.conv2d(pixels, weight.double().cpu(), bias.double().cpu(), stride=2, padding=3)
    return F.max_pool2d(hidden.relu(), 3, 2, 1)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("pixel_type", [torch.uint8, torch.float32])
@pytest.mark.parametrize(
    "size", [(64, 128), (61, 127), (7, 5), (1, 1), (96, 64)], ids=lambda x: "x".join(map(str, x))
)
def test_stem_equals_separate_operations(
    size: tuple[int, int], pixel_type: torch.dtype, dtype: torch.dtype, device: str
) -> None:
    """The last image is smaller than the batch, with values in its padding."""
    generator = torch.Generator().manual_seed(sum(size))
    images = torch.randint(0, 256, (3, 3, *size), generator=generator).to(pixel_type)
    sizes = torch.tensor([[*size], [*size], [max(1, size[0] // 2), max(1, size[1] - 9)]])
    weight = (torch.randn(64, 3, 7, 7, generator=generator) / 12).to(dtype)
    bias = torch.randn(64, generator=generator).to(dtype)
    tensors = (images, sizes, arranged_weight(weight), bias, MEAN, STD)
    actual = resnet_stem(*(x.to(device) for x in tensors))
    expected = expected_map(images, sizes, weight, bias)
    assert actual.dtype == dtype
    assert actual.is_contiguous(memory_format=torch.channels_last)
    tolerance = TOLERANCES[dtype]
    scale = float(expected.abs().max())
    torch.testing.assert_close(
        actual.cpu().double(), expected, rtol=tolerance, atol=tolerance * scale / 4
    )


def test_sizes_beyond_the_images_are_those_of_the_images(device: str) -> None:
    generator = torch.Generator().manual_seed(2)
    images = torch.randint(0, 256, (2, 3, 37, 61), generator=generator, dtype=torch.uint8)
    weight = (torch.randn(64, 3, 7, 7, generator=generator) / 12).half()
    others = [arranged_weight(weight), torch.zeros(64).half(), MEAN, STD]
    beyond, own = (
        resnet_stem(*(x.to(device) for x in (images, torch.tensor([size] * 2), *others)))
        for size in ((37 + 1000, 61 + 1000), (37, 61))
    )
    assert torch.equal(beyond, own)


def test_infinite_and_nan_weights_are_not_hidden(device: str) -> None:
    weight = torch.zeros(64, 3, 7, 7)
    weight[3, 0, 3, 3], weight[5, 1, 0, 0] = torch.inf, torch.nan
    tensors = (
        torch.full((1, 3, 32, 32), 200.0),
        torch.tensor([[32, 32]]),
        arranged_weight(weight.half()),
        torch.zeros(64).half(),
        MEAN,
        STD,
    )
    actual = resnet_stem(*(x.to(device) for x in tensors))
    assert actual[0, 3].isinf().any()
    assert actual[0, 5].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_kernel_of_other_gpus_gives_the_same_map(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs of compute capability 9.0 have a kernel of their own. The maps have several tiles."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this GPU has one kernel")
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (2, 3, 333, 519), generator=generator, dtype=torch.uint8)
    weight = (torch.randn(64, 3, 7, 7, generator=generator) / 12).to(dtype)
    bias = torch.randn(64, generator=generator).to(dtype)
    sizes = torch.tensor([[333, 519], [300, 400]])
    tensors = [x.cuda() for x in (images, sizes, arranged_weight(weight), bias, MEAN, STD)]
    own = resnet_stem(*tensors)
    monkeypatch.setattr(operation, "_WARPGROUP_CAPABILITY", None)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(resnet_stem(*tensors), own, rtol=2 * step, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [torch.float32, torch.float64])
def test_other_types_are_rejected(weights: torch.dtype) -> None:
    weight = torch.zeros(14, 4, 32, 8, dtype=weights, device="cuda")
    images = torch.zeros(1, 3, 32, 32, dtype=torch.uint8, device="cuda")
    sizes = torch.tensor([[32, 32]], device="cuda")
    with pytest.raises(ValueError, match="float16"):
        resnet_stem(images, sizes, weight, weight[0, 0, 0], MEAN.cuda(), STD.cuda())
