"""The decoder hardware of a GPU gives exactly the pixels of Pillow."""

from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from smooth_jpegs import jpeg, pixels
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from maskrcnn_trt.model.device_images import decode_jpegs, tensor_from_bytes
from maskrcnn_trt.model.hardware_jpegs import HardwareJpegDecoder, hardware_jpeg_decoder
from maskrcnn_trt.model.image_limits import ImageError

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


def encoded(height: int, width: int, **options: Any) -> Tensor:
    return tensor_from_bytes(jpeg(pixels(height, width, height * width), **options))


def by_pillow(file: Tensor) -> Tensor:
    image = np.array(Image.open(BytesIO(file.numpy().tobytes())).convert("RGB"))
    return torch.from_numpy(image).permute(2, 0, 1).to(DEVICE)


@pytest.fixture
def decoder() -> HardwareJpegDecoder:
    found = hardware_jpeg_decoder(DEVICE)
    if found is None:
        pytest.skip("this GPU has no decoder hardware")
    return found


@pytest.mark.parametrize(
    "options", [{"subsampling": 0}, {"subsampling": 1}, {"subsampling": 2}, {"mode": "L"}]
)
def test_pixels_equal_those_of_pillow(
    decoder: HardwareJpegDecoder, options: dict[str, Any]
) -> None:
    sizes = ((48, 64), (131, 77), (480, 640), (65, 1025), (9, 7), (2, 3))
    files = [encoded(*size, **options) for size in sizes]
    for file, own in zip(files, decoder.decode(files), strict=True):
        assert own is not None
        assert torch.equal(own, by_pillow(file))


def test_unsupported_files_do_not_affect_others(decoder: HardwareJpegDecoder) -> None:
    usual, progressive = encoded(48, 64), encoded(64, 48, progressive=True)
    first, second, third = decoder.decode([usual, progressive, usual])
    assert second is None
    assert first is not None
    assert third is not None
    assert torch.equal(first, third)
    fourth, fifth = decode_jpegs([usual, progressive], DEVICE)
    assert isinstance(fourth, Tensor)
    assert isinstance(fifth, Tensor)
    assert torch.equal(fourth, first)
    assert torch.equal(fifth, decode_jpeg(progressive, ImageReadMode.RGB, DEVICE))


@pytest.mark.parametrize("length", [0, 20, 400])
def test_damaged_files_are_reported(decoder: HardwareJpegDecoder, length: int) -> None:
    usual = encoded(48, 64)
    damaged = usual[:length].clone()
    first, second, third = decode_jpegs([usual, damaged, usual], DEVICE)
    assert isinstance(second, ImageError)
    for own in (first, third):
        assert isinstance(own, Tensor)
        assert torch.equal(own, by_pillow(usual))
    for own in decoder.decode([usual] * 3):
        assert own is not None
        assert torch.equal(own, by_pillow(usual))


def test_threads_decode_at_the_same_time(decoder: HardwareJpegDecoder) -> None:
    batches = [[encoded(90 + n, 100 + m) for n in range(1 + m % 3)] for m in range(60)]
    wanted = [[by_pillow(file) for file in files] for files in batches]

    def decode(files: list[Tensor]) -> list[Tensor | None]:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            decoded = decoder.decode(files)
            # The stream waits for the pixels; no thread does.
            return [None if own is None else own.clone() for own in decoded]

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(decode, batches))
    torch.cuda.synchronize()
    for own, expected in zip(results, wanted, strict=True):
        for image, exact in zip(own, expected, strict=True):
            assert image is not None
            assert torch.equal(image, exact)


def test_many_batches_are_in_flight(decoder: HardwareJpegDecoder) -> None:
    files = [tensor_from_bytes(jpeg(pixels(200, 300, seed))) for seed in range(30)]
    torch.cuda._sleep(10**8)  # type: ignore[no-untyped-call]
    decoded = [decoder.decode([file])[0] for file in files]
    for own, file in zip(decoded, files, strict=True):
        assert own is not None
        assert torch.equal(own, by_pillow(file))


def test_files_for_the_fallback_are_decoded_behind_other_work() -> None:
    files = [tensor_from_bytes(jpeg(pixels(480, 640, n), progressive=True)) for n in range(4)]
    wanted = [decode_jpeg(file, ImageReadMode.RGB, DEVICE) for file in files]
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        earlier = [torch.full((480, 1920), n, dtype=torch.uint8, device=DEVICE) for n in range(8)]
        torch.cuda._sleep(10**9)  # type: ignore[no-untyped-call]
        copies = [own.clone() for own in earlier]
        del earlier
        for own, expected in zip(decode_jpegs(files, DEVICE), wanted, strict=True):
            assert isinstance(own, Tensor)
            assert torch.equal(own, expected)
        assert [copy.unique().tolist() for copy in copies] == [[n] for n in range(8)]


@pytest.mark.parametrize("turn", ["first", "second"])  # the second one creates no nvJPEG states
def test_images_are_decoded_behind_other_work(decoder: HardwareJpegDecoder, turn: str) -> None:
    """nvJPEG writes without waiting for the stream, which may still use memory that is free."""
    files = [tensor_from_bytes(jpeg(pixels(480, 640, seed))) for seed in range(4)]
    wanted = [by_pillow(file) for file in files]
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        earlier = [torch.full((480, 960), n, dtype=torch.uint8, device=DEVICE) for n in range(8)]
        torch.cuda._sleep(10**9)  # type: ignore[no-untyped-call]
        copies = [own.clone() for own in earlier]
        del earlier
        decoded = [decoder.decode([file])[0] for file in files]
        for own, expected in zip(decoded, wanted, strict=True):
            assert own is not None
            assert torch.equal(own, expected)
        assert [copy.unique().tolist() for copy in copies] == [[n] for n in range(8)]
