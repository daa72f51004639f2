"""Admission of inference requests before their tensors are converted."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from gated_engine import Gate
from in_process_server import OWN_CONNECTION, served
from numpy.typing import NDArray
from PIL import Image
from triton_requests import MODEL, pixels_of
from tritonclient.grpc import InferInput
from tritonclient.grpc import aio as triton_aio
from tritonclient.utils import InferenceServerException

Encode = Callable[..., bytes]
HEIGHT, WIDTH = 120, 200


def two_images(picture: Encode) -> NDArray[np.uint8]:
    """Return pixels [2, HEIGHT, WIDTH, 3]."""
    images = (Image.open(BytesIO(picture(seed))).convert("RGB") for seed in range(2))
    return np.stack([np.array(image) for image in images])


def out_of_range() -> list[InferInput]:
    tensor = InferInput("images", (2, HEIGHT, WIDTH, 3), "UINT8")
    tensor._get_tensor().contents.uint_contents.extend([300] * (2 * HEIGHT * WIDTH * 3))
    return [tensor]


async def error_of(client: triton_aio.InferenceServerClient, images: Sequence[InferInput]) -> str:
    with pytest.raises(InferenceServerException) as caught:
        await client.infer(MODEL, images)
    return f"{caught.value.status()} {caught.value.message()}"


async def test_only_admitted_requests_are_converted(
    wide_bundle: Path, gate: Gate, picture: Encode
) -> None:
    pixels = two_images(picture)
    good, large = pixels_of(pixels, "UINT8"), pixels_of(np.zeros((2, 121, WIDTH, 3), "u1"), "UINT8")
    async with (
        served(wide_bundle, queue_size=3, max_batch=2, max_pixels=HEIGHT * WIDTH) as address,
        triton_aio.InferenceServerClient(address, channel_args=OWN_CONNECTION) as first,
        triton_aio.InferenceServerClient(address, channel_args=OWN_CONNECTION) as second,
    ):
        warm = gate.count
        gate.close()
        held = asyncio.create_task(first.infer(MODEL, good))
        await gate.comes_to(warm + 1)
        # One slot is free: the request is read, but two images are not admitted.
        message = await error_of(first, out_of_range())
        assert "RESOURCE_EXHAUSTED" in message
        assert "needs 2 slots" in message
        message = await error_of(first, large)
        assert "INVALID_ARGUMENT" in message
        assert "24200 pixels" in message
        assert "max_pixels" in message
        gate.open()
        assert (await held).as_numpy("num_detections").all()
        message = await error_of(second, out_of_range())
        assert "INVALID_ARGUMENT" in message
        assert "outside 0..255" in message
        assert (await second.infer(MODEL, good)).as_numpy("num_detections").all()


async def test_pixels_per_image_are_limited_in_raw_and_typed_contents(wide_bundle: Path) -> None:
    def typed(shape: tuple[int, ...], datatype: str) -> list[InferInput]:
        tensor = InferInput("images", shape, datatype)
        contents = tensor._get_tensor().contents
        values = contents.uint_contents if datatype == "UINT8" else contents.fp32_contents
        values.extend([9] * int(np.prod(shape)))
        return [tensor]

    def raw(shape: tuple[int, ...], datatype: str) -> list[InferInput]:
        return pixels_of(np.full(shape, 9, "u1" if datatype == "UINT8" else "f4"), datatype)

    async with (
        served(wide_bundle, max_pixels=400) as address,
        triton_aio.InferenceServerClient(address) as client,
    ):
        for images, datatype in itertools.product((typed, raw), ("UINT8", "FP32")):
            message = await error_of(client, images((1, 20, 21, 3), datatype))
            assert "max_pixels (400)" in message
            result = await client.infer(MODEL, images((1, 20, 20, 3), datatype))
            assert result.as_numpy("image_sizes").tolist() == [[20, 20]]
