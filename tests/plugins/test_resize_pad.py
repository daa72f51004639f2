from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from host_kernels import launch_on_host
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from maskrcnn_trt.plugins.resize_pad import operation, resize_pad

HEIGHT, WIDTH = 120, 200


def noise(height: int, width: int) -> NDArray[np.uint8]:
    generator = np.random.default_rng((height, width))
    return generator.integers(0, 256, (height, width, 3), np.uint8)


def chw(pixels: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def padded_by_pillow(
    images: Sequence[NDArray[np.uint8]], sizes: Sequence[tuple[int, int]]
) -> Tensor:
    batch = torch.zeros(len(images), 3, HEIGHT, WIDTH, dtype=torch.uint8)
    for row, image, (height, width) in zip(batch, images, sizes, strict=True):
        resized = Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR)
        row[:, :height, :width] = chw(np.array(resized))
    return batch


@pytest.fixture(params=["cpu", "host", pytest.param("cuda", marks=pytest.mark.gpu)])
def implementation(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Tensor]:
    """Implementation of the operation: on the CPU, on a GPU, or the GPU's kernels on the CPU."""
    if request.param == "host":
        monkeypatch.setattr(operation, "launch_kernel", launch_on_host)

        def run_kernels(images: Sequence[Tensor], sizes: Sequence[int], *limits: int) -> Tensor:
            pairs = list(zip(sizes[::2], sizes[1::2], strict=True))
            return operation._resized_by_kernel(images, pairs, *limits)

        return run_kernels

    def run(images: Sequence[Tensor], *arguments: Any) -> Tensor:
        result: Tensor = resize_pad([image.to(request.param) for image in images], *arguments)
        return result.cpu()

    return run


def test_images_equal_those_of_pillow(implementation: Callable[..., Tensor]) -> None:
    sources = [(48, 64), (120, 200), (333, 517), (7, 900), (1, 1), (200, 3), (500, 100)]
    sizes = [(90, 120), (120, 200), (77, 120), (1, 128), (5, 9), (120, 2), (20, 4)]
    images = [noise(*source) for source in sources]
    own = implementation(list(map(chw, images)), np.ravel(sizes).tolist(), HEIGHT, WIDTH)
    assert torch.equal(own, padded_by_pillow(images, sizes))


def test_images_of_any_sizes_equal_those_of_pillow(implementation: Callable[..., Tensor]) -> None:
    """Pillow 13 chooses the order of its two passes by the sizes."""
    generator = np.random.default_rng(0)
    sources = generator.integers(1, 300, (60, 2)).tolist()
    sizes = (1 + generator.integers(0, (HEIGHT, WIDTH), (60, 2))).tolist()
    images = [noise(*source) for source in sources]
    own = implementation(list(map(chw, images)), np.ravel(sizes).tolist(), HEIGHT, WIDTH)
    for row, expected in zip(own, padded_by_pillow(images, sizes), strict=True):
        assert torch.equal(row, expected)


def test_unscaled_and_empty_images(device: str) -> None:
    """An image of its target size is copied. One without pixels is black."""
    image = chw(noise(HEIGHT, WIDTH)).to(device)
    own = resize_pad([image[:, :0, :0], image], [HEIGHT, WIDTH] * 2, HEIGHT, WIDTH)
    assert not own[0].any()
    assert torch.equal(own[1], image)


def test_any_strides(device: str) -> None:
    image = noise(60, 41)
    channels_last = torch.from_numpy(image).to(device).permute(2, 0, 1)
    turned = chw(np.ascontiguousarray(image.transpose(1, 0, 2))).to(device).mT
    own = resize_pad([channels_last, turned], [90, 61] * 2, HEIGHT, WIDTH)
    assert torch.equal(own.cpu(), padded_by_pillow([image] * 2, [(90, 61)] * 2))


BLACK = torch.zeros(3, 4, 5, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("image", "sizes", "message"),
    [(BLACK, [4], "two numbers in `sizes` per image"), (BLACK.float(), [4, 5], "torch.uint8"),
     (BLACK[:1], [4, 5], r"shape \[3, \*, \*\]"), (BLACK, [0, 0], "resized to 0x0"),
     (BLACK, [4, WIDTH + 1], "resized to 4x201")],
)  # fmt: skip
def test_invalid_sizes_are_rejected(
    image: Tensor, sizes: list[int], message: str, device: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resize_pad([image.to(device)], sizes, HEIGHT, WIDTH)


@pytest.mark.gpu
def test_images_of_several_devices_are_rejected() -> None:
    with pytest.raises(ValueError, match="one device"):
        resize_pad([BLACK.cuda(), BLACK], [4, 5] * 2, HEIGHT, WIDTH)
