"""Conversion of JPEG planes to RGB equals Pillow's."""

from collections.abc import Sequence
from io import BytesIO

import numpy as np
import pytest
import torch
from host_kernels import launch_on_host
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from maskrcnn_trt.plugins.rgb_from_ycbcr import operation, rgb_from_ycbcr

# Pillow's argument `subsampling`, and the factors by which it divides chroma rows and columns.
SUBSAMPLINGS = {0: (1, 1), 1: (1, 2), 2: (2, 2)}
SIZES = [(96, 128), (131, 77), (16, 5), (17, 6), (2, 3), (40, 2)]


def blocks(height: int, width: int, factors: tuple[int, int]) -> NDArray[np.uint8]:
    """Return an image [H, W, 3] in YCbCr whose JPEG blocks have one random value each.

    If it is saved with the highest quality, each block is stored without an error.
    """
    generator = np.random.default_rng((height, width, *factors))
    shape = (height // 8 + 1, width // 8 + 1)
    luma = generator.integers(0, 256, shape, np.uint8).repeat(8, 0).repeat(8, 1)
    chroma = generator.integers(0, 256, (*shape, 2), np.uint8)
    for axis, factor in enumerate(factors):
        chroma = chroma.repeat(8 * factor, axis)
    planes = (luma[:height, :width, None], chroma[:height, :width])
    return np.ascontiguousarray(np.concatenate(planes, axis=2))


def decoded_by_pillow(ycbcr: NDArray[np.uint8], subsampling: int) -> Tensor:
    file = BytesIO()
    Image.fromarray(ycbcr, "YCbCr").save(file, "JPEG", quality=100, subsampling=subsampling)
    return torch.from_numpy(np.array(Image.open(file).convert("RGB"))).permute(2, 0, 1)


def planes_of(ycbcr: NDArray[np.uint8], factors: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return luma [H, W] and chroma [2, CH, CW] of an image of constant blocks."""
    luma, chroma = ycbcr[..., 0], ycbcr[:: factors[0], :: factors[1], 1:]
    return torch.from_numpy(luma.copy()), torch.from_numpy(chroma.transpose(2, 0, 1).copy())


def arguments_of(images: Sequence[tuple[Tensor, Tensor]], device: str) -> tuple[Tensor, list[int]]:
    """Return the arguments of the operation for luma and chroma planes."""
    planes = torch.cat([plane.flatten() for image in images for plane in image])
    sizes = [side for luma, chroma in images for side in (*luma.shape, *chroma.shape[1:])]
    return planes.to(device), sizes


def images_in(pixels: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    parts = pixels.cpu().split([3 * height * width for height, width in sizes])
    return [part.view(3, *size) for part, size in zip(parts, sizes, strict=True)]


@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
def test_pixels_equal_those_of_pillow(subsampling: int, device: str) -> None:
    factors = SUBSAMPLINGS[subsampling]
    images = [blocks(*size, factors) for size in SIZES]
    converted = rgb_from_ycbcr(*arguments_of([planes_of(i, factors) for i in images], device))
    for image, own in zip(images, images_in(converted, SIZES), strict=True):
        assert torch.equal(own, decoded_by_pillow(image, subsampling))


def test_grey_and_coloured_images_in_one_batch(device: str) -> None:
    image = blocks(20, 30, (2, 2))
    luma, chroma = planes_of(image, (2, 2))
    converted = rgb_from_ycbcr(*arguments_of([(luma, chroma[:, :0, :0]), (luma, chroma)], device))
    grey, coloured = images_in(converted, [(20, 30)] * 2)
    assert torch.equal(grey, luma.expand(3, -1, -1))
    assert torch.equal(coloured, decoded_by_pillow(image, 2))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("factors", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_kernel_equals_the_cpu(
    factors: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, the CUDA kernel is compiled by the host's compiler."""
    if device == "cpu":
        monkeypatch.setattr(operation, "launch_kernel", launch_on_host)
    generator = torch.Generator().manual_seed(0)
    images = []
    for height, width in [*SIZES, (480, 640), (1, 9), (7, 1), (1, 1)]:
        size = -(-height // factors[0]), -(-width // factors[1])
        luma = torch.randint(256, (height, width), generator=generator).byte()
        images.append((luma, torch.randint(256, (2, *size), generator=generator).byte()))
    planes, sizes = arguments_of(images, device)
    by_kernel = operation._converted_by_kernel(planes, operation._checked_images(planes, sizes))
    assert torch.equal(by_kernel.cpu(), rgb_from_ycbcr(*arguments_of(images, "cpu")))


def test_half_of_the_rows(device: str) -> None:
    """Pillow does not write this subsampling. Each sample counts 3/4, and its neighbour 1/4."""
    chroma = torch.tensor([10, 20, 200]).byte().expand(2, 5, 3).mT
    luma = torch.full((6, 5), 128, dtype=torch.uint8)
    (image,) = images_in(rgb_from_ycbcr(*arguments_of([(luma, chroma)], device)), [(6, 5)])
    samples = torch.tensor([10, 13, 17, 65, 155, 200])
    blue = 128 + (1.772 * (samples - 128)).round()
    assert torch.equal(image[2, :, 0], blue.clamp(0, 255).byte())


@pytest.mark.parametrize(
    ("samples", "sizes", "message"),
    [((16,), [], "four numbers"), ((16,), [4, 4, 0], "four numbers"),
     ((4, 4), [4, 4, 0, 0], "planes"), ((40,), [4, 4, 3, 4], "planes of 3x4"),
     ((16,), [4, 4, 0, 4], "planes of 0x4"), ((16,), [-4, -4, 0, 0], "no pixels"),
     ((17,), [4, 4, 0, 0], "have 16 samples")],
)  # fmt: skip
def test_invalid_planes_are_rejected(
    samples: tuple[int, ...], sizes: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rgb_from_ycbcr(torch.zeros(samples, dtype=torch.uint8), sizes)
