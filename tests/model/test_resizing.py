import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.model.device_images import resize_pixels
from maskrcnn_trt.model.image_limits import ImageError
from maskrcnn_trt.model.resizing import pad_to_bucket, resize_image, resized_size, smallest_bucket


def photo(height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def size_of_detectron2(height: int, width: int, shortest: int, longest: int) -> tuple[int, int]:
    """Size by the formula of detectron2's `ResizeShortestEdge`."""
    ratio = shortest / min(height, width)
    exact = [ratio * height, ratio * width]
    exact[height >= width] = float(shortest)
    if max(exact) > longest:
        ratio = longest / max(exact)
        exact = [side * ratio for side in exact]
    return int(exact[0] + 0.5), int(exact[1] + 0.5)


def test_resized_size_is_torchvisions() -> None:
    sides = np.random.default_rng(0).integers(8, 900, (60, 2)).tolist()
    transform = GeneralizedRCNNTransform(200, 333, [0.0] * 3, [1.0] * 3, size_divisible=1)
    for height, width in [*sides, [8, 900], [900, 8], [427, 640]]:
        resized, _ = transform([torch.zeros(3, height, width)])
        assert resized_size(height, width, 200, 333) == resized.image_sizes[0]
    assert resized_size(8, 100_000, 800, 1333) == (1, 1333)  # at least a pixel


@pytest.mark.parametrize(
    ("source", "resized"),
    [
        # COCO's usual sizes, with 800 and 1333 as in detectron2's configurations.
        ((480, 640), (800, 1067)),
        ((640, 480), (1067, 800)),
        ((427, 640), (800, 1199)),
        ((500, 375), (1067, 800)),
        ((333, 500), (800, 1201)),
        ((640, 640), (800, 800)),
        ((1080, 1920), (750, 1333)),
        ((375, 1242), (402, 1333)),
        ((3000, 4000), (800, 1067)),
    ],
)
def test_detectron2_rounds_to_the_nearest_pixel(
    source: tuple[int, int], resized: tuple[int, int]
) -> None:
    assert resized_size(*source, 800, 1333, "detectron2") == resized
    for height, width in np.random.default_rng(0).integers(8, 5000, (500, 2)).tolist():
        expected = size_of_detectron2(height, width, 640, 1000)
        assert resized_size(height, width, 640, 1000, "detectron2") == expected


def test_smallest_bucket_holds_the_image() -> None:
    wide, tall, large = ShapeBucket(64, 96), ShapeBucket(96, 64), ShapeBucket(96, 96)
    buckets = [large, wide, tall]
    assert smallest_bucket(64, 96, buckets) == wide
    assert smallest_bucket(65, 64, buckets) == tall
    assert smallest_bucket(10, 10, buckets) == wide
    assert smallest_bucket(96, 96, buckets) == large
    with pytest.raises(ImageError, match=r"97x10 .* 96x96, 64x96, 96x64"):
        smallest_bucket(97, 10, buckets)


def test_resizing_is_bilinear() -> None:
    image = photo(24, 40)
    larger = resize_image(image, 48, 80)
    reference = torch.nn.functional.interpolate(
        torch.from_numpy(image).permute(2, 0, 1)[None].float(),
        (48, 80),
        mode="bilinear",
        antialias=True,
    )
    assert np.abs(larger.transpose(2, 0, 1) - reference[0].numpy()).max() <= 1
    np.testing.assert_array_equal(resize_image(image, 24, 40), image)


@pytest.mark.parametrize("size", [(300, 401), (427, 640), (90, 131), (200, 266)])
def test_torchvisions_rule_equals_its_transform(size: tuple[int, int]) -> None:
    """Reduced, enlarged and unchanged images, on CPU and by the GPU's function."""
    image, mean, std = photo(*size), [0.48, 0.45, 0.4], [0.22, 0.23, 0.24]
    transform = GeneralizedRCNNTransform(200, 333, mean, std, size_divisible=1).eval()
    pixels = torch.from_numpy(image).permute(2, 0, 1)
    ((expected,), ((height, width),)) = vars(transform([pixels / 255])[0]).values()
    assert resized_size(*size, 200, 333, "torchvision") == (height, width)
    own = resize_image(image, height, width, "torchvision")
    assert own.dtype == np.float32
    for result in (
        torch.from_numpy(own).permute(2, 0, 1),
        resize_pixels(pixels, (height, width), "torchvision"),
    ):
        normalised = (result / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[
            :, None, None
        ]
        torch.testing.assert_close(normalised, expected, atol=1e-5, rtol=0)


def test_padding_is_black_at_the_right_and_the_bottom() -> None:
    image = photo(24, 40)
    padded = pad_to_bucket(image, ShapeBucket(32, 64))
    assert padded.shape == (3, 32, 64)
    assert padded.dtype == np.uint8
    assert padded.flags.c_contiguous
    np.testing.assert_array_equal(padded[:, :24, :40].transpose(1, 2, 0), image)
    assert not padded[:, 24:].any()
    assert not padded[:, :, 40:].any()
