"""Conversion of JPEG planes to RGB equals Pillow's."""

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


@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
def test_pixels_equal_those_of_pillow(subsampling: int, device: str) -> None:
    factors = SUBSAMPLINGS[subsampling]
    images = [blocks(*size, factors) for size in SIZES]
    lumas, chromas = zip(*(planes_of(image, factors) for image in images), strict=True)
    converted = rgb_from_ycbcr(
        [luma.to(device) for luma in lumas], [chroma.to(device) for chroma in chromas]
    )
    for image, own in zip(images, converted, strict=True):
        assert torch.equal(own.cpu(), decoded_by_pillow(image, subsampling))


def test_grey_and_coloured_images_in_one_batch(device: str) -> None:
    image = blocks(20, 30, (2, 2))
    luma, chroma = (plane.to(device) for plane in planes_of(image, (2, 2)))
    grey, coloured = rgb_from_ycbcr([luma, luma], [chroma[:, :0, :0], chroma])
    assert torch.equal(grey, luma.expand(3, -1, -1))
    assert torch.equal(coloured.cpu(), decoded_by_pillow(image, 2))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("factors", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_kernel_equals_the_cpu(
    factors: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, the CUDA kernel is compiled by the host's compiler."""
    if device == "cpu":
        monkeypatch.setattr(operation, "launch_kernel", launch_on_host)
    generator = torch.Generator().manual_seed(0)
    lumas, chromas = [], []
    for height, width in [*SIZES, (480, 640), (1, 9), (7, 1), (1, 1)]:
        size = -(-height // factors[0]), -(-width // factors[1])
        lumas.append(torch.randint(256, (height, width), generator=generator).byte())
        chromas.append(torch.randint(256, (2, *size), generator=generator).byte())
    planes = ([plane.to(device) for plane in own] for own in (lumas, chromas))
    by_kernel = rgb_from_ycbcr._backend_fns["cuda"](*planes)
    for own, expected in zip(by_kernel, rgb_from_ycbcr(lumas, chromas), strict=True):
        assert torch.equal(own.cpu(), expected)


def test_half_of_the_rows(device: str) -> None:
    """Pillow does not write this subsampling. Each sample counts 3/4, and its neighbour 1/4."""
    chroma = torch.tensor([10, 20, 200]).byte().expand(2, 5, 3).mT.contiguous().to(device)
    luma = torch.full((6, 5), 128, dtype=torch.uint8, device=device)
    (image,) = rgb_from_ycbcr([luma], [chroma])
    samples = torch.tensor([10, 13, 17, 65, 155, 200])
    blue = 128 + (1.772 * (samples - 128)).round()
    assert torch.equal(image[2, :, 0].cpu(), blue.clamp(0, 255).byte())


@pytest.mark.parametrize(
    ("luma", "chromas", "message"),
    [((4, 4), [], "one chroma tensor per luma plane"), ((3, 4, 4), [(2, 4, 4)], "lumas"),
     ((4, 4), [(2, 3, 4)], "planes of 3x4"), ((4, 4), [(1, 4, 4)], r"shape \[2, \*, \*\]")],
)  # fmt: skip
def test_invalid_planes_are_rejected(
    luma: tuple[int, ...], chromas: list[tuple[int, ...]], message: str
) -> None:
    planes = [torch.zeros(shape, dtype=torch.uint8) for shape in chromas]
    with pytest.raises(ValueError, match=message):
        rgb_from_ycbcr([torch.zeros(luma, dtype=torch.uint8)], planes)


def test_opcheck(device: str) -> None:
    luma, chroma = (plane.to(device) for plane in planes_of(blocks(20, 30, (2, 2)), (2, 2)))
    arguments = ([luma], [chroma])
    torch.library.opcheck(rgb_from_ycbcr, arguments, test_utils=["test_schema", "test_faketensor"])
