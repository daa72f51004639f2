"""Decoding on the model's device gives the pixels of Pillow."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from smooth_jpegs import jpeg, pixels
from torch import Tensor

from maskrcnn_trt.model import device_images
from maskrcnn_trt.model.device_images import (
    apply_orientation,
    decode_jpegs,
    resize_pixels,
    tensor_from_bytes,
)
from maskrcnn_trt.model.image_decoding import decode_image, read_header
from maskrcnn_trt.model.image_limits import ImageError
from maskrcnn_trt.model.resizing import resize_image

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def chw(image: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))


def assert_close(own: Tensor | ImageError, expected: Tensor, *, mean: float, most: int) -> None:
    assert isinstance(own, Tensor)
    assert own.dtype == torch.uint8
    assert own.shape == expected.shape
    difference = (own.cpu().int() - expected.int()).abs()
    assert difference.float().mean() <= mean
    assert difference.max() <= most


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("options", "mean", "most"),
    [
        ({"subsampling": 0}, 1.5, 16),
        ({"mode": "L"}, 1.5, 16),
        # With colours of half the resolution; 3.6 if they are merely repeated.
        ({}, 5, 48),
        ({"progressive": True}, 5, 48),
    ],
)
def test_decoded_pixels_are_close_to_pillow(
    device: str, options: dict[str, Any], mean: float, most: int
) -> None:
    files = [jpeg(pixels(seed=seed), **options) for seed in range(3)]
    assert all(read_header(file).is_plain_jpeg for file in files)
    decoded = decode_jpegs([tensor_from_bytes(file) for file in files], torch.device(device))
    for own, file in zip(decoded, files, strict=True):
        assert_close(own, chw(decode_image(file)), mean=mean, most=most)


@pytest.mark.parametrize("device", DEVICES)
def test_damaged_file_does_not_affect_others(device: str) -> None:
    whole = jpeg(pixels(), subsampling=0)
    damaged = whole.replace(b"\xff\xdb", b"\xff\xe9").replace(b"\xff\xc4", b"\xff\xe9")
    files = [tensor_from_bytes(data) for data in (whole, damaged, whole)]
    first, second, third = decode_jpegs(files, torch.device(device))
    assert isinstance(second, ImageError)
    assert "the image is damaged" in str(second)
    for own in (first, third):
        assert_close(own, chw(decode_image(whole)), mean=1.5, most=16)


def test_too_little_memory_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode_jpeg(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(device_images, "decode_jpeg", decode_jpeg)
    files = [tensor_from_bytes(jpeg(pixels()))] * 2
    assert decode_jpegs([], torch.device("cpu")) == []
    with pytest.raises(torch.OutOfMemoryError):
        decode_jpegs(files, torch.device("cpu"))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_matches_pillow(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = jpeg(pixels(), exif=exif)
    header = read_header(data)
    assert header.orientation == orientation
    stored = chw(decode_image(data, apply_orientation=False))
    upright = chw(decode_image(data))
    assert header.size == upright.shape[1:]
    assert torch.equal(apply_orientation(stored, orientation), upright)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [(48, 64), (31, 41), (100, 133), (7, 200), (1, 1)])
def test_resizing_equals_that_of_the_cpu(device: str, size: tuple[int, int]) -> None:
    rough = np.random.default_rng(1).integers(0, 256, (48, 64, 3), np.uint8)
    for image in (pixels(), rough):
        own = resize_pixels(chw(image).to(device), size).cpu()
        assert torch.equal(own, chw(resize_image(image, *size)))
        floats = resize_pixels(chw(image).to(device), size, "torchvision").cpu()
        expected = torch.from_numpy(resize_image(image, *size, "torchvision")).permute(2, 0, 1)
        torch.testing.assert_close(floats, expected, atol=1e-2, rtol=0)
