"""`maskrcnn::rgb_from_ycbcr`: conversion of decoded JPEG planes to RGB.

Contract of all implementations: pixel values equal those that libjpeg-turbo computes from the same
planes with its default settings, which are Pillow's. Chroma planes of half the width or height are
interpolated linearly ("fancy upsampling"), in integers. Images of a single row or column may
differ, because their planes do not show whether the file halves the chroma along the short side.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..runtime.arguments import check_argument
from ..runtime.launching import launch_kernel, table_on_device
from .kernel import RGB_FROM_YCBCR, rgb_from_ycbcr_launch

_CHANNELS = 3
# libjpeg-turbo repeats samples, instead of interpolating them, if a row has no more than these.
_MOST_REPEATED_COLUMNS = 2
# ITU-R BT.601 coefficients, rounded to 16 fractional bits.
_RED_OF_CR, _GREEN_OF_CB, _GREEN_OF_CR, _BLUE_OF_CB = 91881, 22554, 46802, 116130
_HALF = 1 << 15


@torch.library.custom_op("maskrcnn::rgb_from_ycbcr", mutates_args=(), device_types="cpu")
def rgb_from_ycbcr(lumas: Sequence[Tensor], chromas: Sequence[Tensor]) -> list[Tensor]:
    """Upsample chroma planes, and convert images to RGB.

    Args:
        lumas: B >= 1 planes [h, w] uint8.
        chromas: B tensors [2, ch, cw] uint8, the planes Cb and Cr of each image. `ch` is h or
            ceil(h / 2), and `cw` is w or ceil(w / 2). [2, 0, 0]: the image is grey.

    Returns:
        B images [3, h, w] uint8.

    Raises:
        ValueError: the numbers of luma and chroma tensors differ, their types, shapes or devices
            are wrong, or chroma planes do not have the luma's size or half of it.
    """
    _check_planes(lumas, chromas)
    return [_converted(luma, chroma) for luma, chroma in zip(lumas, chromas, strict=True)]


@rgb_from_ycbcr.register_fake
def _(lumas: Sequence[Tensor], _chromas: Sequence[Tensor]) -> list[Tensor]:
    return [_empty_rgb(luma) for luma in lumas]


@rgb_from_ycbcr.register_kernel("cuda")
def _(lumas: Sequence[Tensor], chromas: Sequence[Tensor]) -> list[Tensor]:
    _check_planes(lumas, chromas)
    lumas, chromas = ([plane.contiguous() for plane in planes] for planes in (lumas, chromas))
    images = [_empty_rgb(luma) for luma in lumas]
    rows = [
        (luma.data_ptr(), chroma.data_ptr(), image.data_ptr(), *luma.shape, *chroma.shape[1:])
        for luma, chroma, image in zip(lumas, chromas, images, strict=True)
    ]
    table = table_on_device(rows, lumas[0].device)
    height, width = (max(luma.shape[axis] for luma in lumas) for axis in (0, 1))
    launch_kernel(RGB_FROM_YCBCR, rgb_from_ycbcr_launch(len(images), height, width), [table], [])
    return images


def _check_planes(lumas: Sequence[Tensor], chromas: Sequence[Tensor]) -> None:
    if len(lumas) != len(chromas):
        raise ValueError(
            "rgb_from_ycbcr needs one chroma tensor per luma plane, not "
            f"{len(chromas)} for {len(lumas)}"
        )
    for luma, chroma in zip(lumas, chromas, strict=True):
        check_argument("lumas", luma, torch.uint8, (-1, -1))
        check_argument("chromas", chroma, torch.uint8, (_CHANNELS - 1, -1, -1))
        if {luma.device, chroma.device} != {lumas[0].device}:
            raise ValueError(
                f"all planes must be on one device, not on {lumas[0].device}, {luma.device} and "
                f"{chroma.device}"
            )
        sizes = zip(luma.shape, chroma.shape[1:], strict=True)
        if chroma.numel() and any(part not in (side, (side + 1) // 2) for side, part in sizes):
            raise ValueError(
                f"chroma planes of {chroma.shape[1]}x{chroma.shape[2]} samples do not fit an image "
                f"of {luma.shape[0]}x{luma.shape[1]} pixels (height x width); each side must have "
                "the length of the image's side, or half of it rounded up"
            )


def _empty_rgb(luma: Tensor) -> Tensor:
    return luma.new_empty(_CHANNELS, *luma.shape)


def _converted(luma: Tensor, chroma: Tensor) -> Tensor:
    if not chroma.numel():
        return luma.expand(_CHANNELS, -1, -1).clone()
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
    """Return samples at twice the resolution along an axis, multiplied by 4 if interpolated."""
    nearest = samples.index_select(axis, places // 2)
    if not interpolated:
        return nearest
    neighbours = (places // 2 + 2 * (places % 2) - 1).clamp(0, samples.shape[axis] - 1)
    return 3 * nearest + samples.index_select(axis, neighbours)
