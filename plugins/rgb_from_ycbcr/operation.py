"""Conversion of decoded JPEG planes to RGB.

Specification of all implementations: pixel values equal those that libjpeg-turbo computes from the
same planes with its default settings, which are Pillow's. Chroma planes of half the width or height
are interpolated linearly ("fancy upsampling"), in integers. In an image of a single row or column,
the planes do not show whether the JPEG file has half the chroma resolution along the short side.
Pixel values of such images may differ from libjpeg-turbo's.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.arguments import check_argument
from ..runtime.launching import launch_kernel, table_on_device
from .kernel import RGB_FROM_YCBCR, rgb_from_ycbcr_launch

_CHANNELS = 3
# Numbers per image in the argument `sizes`.
_SIDES = 4
# If a row has at most this many chroma samples, libjpeg-turbo repeats samples instead of
# interpolating them.
_MOST_REPEATED_COLUMNS = 2
# ITU-R BT.601 coefficients, rounded to 16 fractional bits.
_RED_OF_CR, _GREEN_OF_CB, _GREEN_OF_CR, _BLUE_OF_CB = 91881, 22554, 46802, 116130
_HALF = 1 << 15


class _PlaneLayout(NamedTuple):
    """Sizes of an image, and byte offsets of its planes (input) and of its RGB pixels (output)."""

    luma: int
    chroma: int
    rgb: int
    # Height and width of the image, and of its chroma planes.
    height: int
    width: int
    chroma_height: int
    chroma_width: int


# One tensor holds all planes, and another one all images: whenever a tensor is freed, torch
# releases the GIL, and the thread must wait to get it back.
def rgb_from_ycbcr(planes: Tensor, sizes: Sequence[int]) -> Tensor:
    """Upsample chroma planes, and convert images to RGB.

    Args:
        planes: [P] uint8. For each of B >= 1 images, the planes Y [h, w], Cb [ch, cw] and
            Cr [ch, cw], one after the other without gaps.
        sizes: [4 * B]. For each image, h, w, ch and cw. `ch` is h or ceil(h / 2), and `cw` is w or
            ceil(w / 2). Both are 0 if the image is grey. h and w are at least 1.

    Returns:
        Images [3, h, w] uint8, one after the other without gaps, as one tensor of one dimension.

    Raises:
        ValueError: `planes` has the wrong type or size, `sizes` does not have four entries per
            image, an image has no pixels, or chroma planes do not have the luma's size or half of
            it.
    """
    images = _checked_images(planes, sizes)
    if planes.is_cuda:
        return _converted_by_kernel(planes.contiguous(), images)
    return torch.cat([_converted(*_planes_of(planes, image)).flatten() for image in images])


def _converted_by_kernel(planes: Tensor, images: Sequence[_PlaneLayout]) -> Tensor:
    last = images[-1]
    pixels = planes.new_empty(last.rgb + _CHANNELS * last.height * last.width)
    source, target = planes.data_ptr(), pixels.data_ptr()
    rows = [(source + i.luma, source + i.chroma, target + i.rgb, *i[3:]) for i in images]
    table = table_on_device(rows, planes.device)
    height, width = max(i.height for i in images), max(i.width for i in images)
    launch_kernel(RGB_FROM_YCBCR, rgb_from_ycbcr_launch(len(images), height, width), [table], [])
    return pixels


def _checked_images(planes: Tensor, sizes: Sequence[int]) -> list[_PlaneLayout]:
    """Check the arguments, and return the sizes and offsets of each image of the batch."""
    check_argument("planes", planes, torch.uint8, (-1,))
    if not sizes or len(sizes) % _SIDES:
        raise ValueError(
            "rgb_from_ycbcr needs four numbers in `sizes` per image (height and width of luma and "
            f"chroma), and at least one image, not {len(sizes)} numbers"
        )
    images = []
    source = target = 0
    for index in range(0, len(sizes), _SIDES):
        sides = sizes[index : index + _SIDES]
        height, width, chroma_height, chroma_width = sides
        halves = (height + 1) // 2, (width + 1) // 2
        if min(height, width) < 1:
            raise ValueError(f"an image of {height}x{width} pixels (height x width) has no pixels")
        if (chroma_height or chroma_width) and (
            chroma_height not in (height, halves[0]) or chroma_width not in (width, halves[1])
        ):
            raise ValueError(
                f"chroma planes of {chroma_height}x{chroma_width} samples do not fit an image of "
                f"{height}x{width} pixels (height x width); each side must have the length of the "
                "image's side, or half of it rounded up"
            )
        chroma = source + height * width
        images.append(_PlaneLayout(source, chroma, target, *sides))
        source = chroma + 2 * chroma_height * chroma_width
        target += _CHANNELS * height * width
    if source != len(planes):
        raise ValueError(
            f"images of the given `sizes` have {source} samples of luma and chroma in total, but "
            f"`planes` has {len(planes)}"
        )
    return images


def _planes_of(planes: Tensor, image: _PlaneLayout) -> tuple[Tensor, Tensor]:
    """Return the luma plane [h, w] and the chroma planes [2, ch, cw] of one image of a batch.

    `planes` [bytes] uint8 has the planes of the whole batch. `image` has the offsets of the image.
    """
    shape = _CHANNELS - 1, image.chroma_height, image.chroma_width
    luma = planes[image.luma : image.chroma].view(image.height, image.width)
    return luma, planes[image.chroma :][: math.prod(shape)].view(shape)


def _converted(luma: Tensor, chroma: Tensor) -> Tensor:
    if not chroma.numel():
        return luma.expand(_CHANNELS, -1, -1)
    blueness, redness = _upsampled(chroma.int(), luma.shape) - 128
    red = (_RED_OF_CR * redness + _HALF) >> 16
    green = (_HALF - _GREEN_OF_CB * blueness - _GREEN_OF_CR * redness) >> 16
    blue = (_BLUE_OF_CB * blueness + _HALF) >> 16
    return (luma + torch.stack([red, green, blue])).clamp_(0, 255).to(torch.uint8)


def _upsampled(chroma: Tensor, size: Sequence[int]) -> Tensor:
    """Upsample chroma planes [2, ch, cw] int32 to [2, h, w], where `size` is (h, w)."""
    halved_rows, halved_columns = (
        side != part for side, part in zip(size, chroma.shape[1:], strict=True)
    )
    interpolated = not halved_columns or chroma.shape[2] > _MOST_REPEATED_COLUMNS
    rows, columns = (torch.arange(side) for side in size)
    if halved_rows:
        chroma = _doubled(chroma, 1, rows, interpolated)
    if halved_columns:
        chroma = _doubled(chroma, 2, columns, interpolated)
    if not interpolated or not (halved_rows or halved_columns):
        return chroma
    # The sums are 4 or 16 times the values. Halves are rounded up and down alternately.
    if halved_rows and halved_columns:
        return (chroma + 8 - columns % 2) >> 4
    odd = columns % 2 if halved_columns else rows[:, None] % 2
    return (chroma + 1 + odd) >> 2


def _doubled(samples: Tensor, axis: int, places: Tensor, interpolated: bool) -> Tensor:
    """Return chroma samples upsampled by two along an axis.

    `places` are the indices along the upsampled axis for which values are returned.
    If `interpolated`, interpolate linearly. The results are then 4 times the interpolated values,
    to keep them integers. Otherwise, repeat the samples.
    """
    nearest = samples.index_select(axis, places // 2)
    if not interpolated:
        return nearest
    neighbours = (places // 2 + 2 * (places % 2) - 1).clamp(0, samples.shape[axis] - 1)
    return 3 * nearest + samples.index_select(axis, neighbours)
