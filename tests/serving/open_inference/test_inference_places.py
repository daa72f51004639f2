"""Which requests get as far as being converted: a gate before the model keeps places taken."""

import asyncio
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from gated_engine import Gate
from numpy.typing import NDArray
from PIL import Image
from triton_requests import MODEL, pixels_of
from tritonclient.grpc import InferInput, InferResult
from tritonclient.grpc import aio as triton_aio
from tritonclient.utils import InferenceServerException

from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.server import detection_server

Encode = Callable[..., bytes]
HEIGHT, WIDTH = 120, 200
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


def two_pictures(picture: Encode) -> NDArray[np.uint8]:
    """Pixels [2, HEIGHT, WIDTH, 3]."""
    images = (Image.open(BytesIO(picture(seed))).convert("RGB") for seed in range(2))
    return np.stack([np.array(image) for image in images])


def out_of_range() -> list[InferInput]:
    tensor = InferInput("images", (2, HEIGHT, WIDTH, 3), "UINT8")
    tensor._get_tensor().contents.uint_contents.extend([300] * (2 * HEIGHT * WIDTH * 3))
    return [tensor]


async def refusal(client: triton_aio.InferenceServerClient, images: Sequence[InferInput]) -> str:
    with pytest.raises(InferenceServerException) as caught:
        await client.infer(MODEL, images)
    return f"{caught.value.status()} {caught.value.message()}"


def test_only_what_has_places_is_converted(bundle: Path, gate: Gate, picture: Encode) -> None:
    pixels = two_pictures(picture)
    good, large = pixels_of(pixels, "UINT8"), pixels_of(np.zeros((2, 121, WIDTH, 3), "u1"), "UINT8")

    async def ask() -> list[InferResult]:
        config = ServeConfig(port=0, queue_size=3, max_batch=2, max_pixels=HEIGHT * WIDTH)
        async with (
            detection_server(bundle, config) as address,
            triton_aio.InferenceServerClient(address, channel_args=OWN_CONNECTION) as first,
            triton_aio.InferenceServerClient(address, channel_args=OWN_CONNECTION) as second,
        ):
            warm = gate.count
            gate.close()
            held = asyncio.create_task(first.infer(MODEL, good))
            await gate.comes_to(warm + 1)
            # One place is free: enough to be read, but not for two images.
            message = await refusal(second, out_of_range())
            assert "RESOURCE_EXHAUSTED" in message
            assert "the request takes 2 of the places" in message
            message = await refusal(second, large)
            assert "INVALID_ARGUMENT" in message
            assert (
                "images of 24200 pixels; send smaller ones, as the server's max_pixels" in message
            )
            gate.open()
            results = [await held]
            message = await refusal(second, out_of_range())
            assert "INVALID_ARGUMENT" in message
            assert "outside 0..255" in message
            return [*results, await second.infer(MODEL, good)]  # whose places are free again

    for result in asyncio.run(ask()):
        assert result.as_numpy("num_detections").all()


@pytest.mark.parametrize("datatype", ["UINT8", "FP32"])
def test_pixels_of_an_image_are_limited_however_they_are_sent(
    bundle: Path, picture: Encode, datatype: str
) -> None:
    def typed(shape: tuple[int, ...]) -> list[InferInput]:
        tensor = InferInput("images", shape, datatype)
        contents = tensor._get_tensor().contents
        values = contents.uint_contents if datatype == "UINT8" else contents.fp32_contents
        values.extend([9] * int(np.prod(shape)))
        return [tensor]

    def raw(shape: tuple[int, ...]) -> list[InferInput]:
        return pixels_of(np.full(shape, 9, "u1" if datatype == "UINT8" else "f4"), datatype)

    async def ask() -> None:
        async with (
            detection_server(bundle, ServeConfig(port=0, max_pixels=400)) as address,
            triton_aio.InferenceServerClient(address) as client,
        ):
            for images in (typed, raw):
                message = await refusal(client, images((1, 20, 21, 3)))
                assert "as the server's max_pixels is 400" in message
                result = await client.infer(MODEL, images((1, 20, 20, 3)))
                assert result.as_numpy("image_sizes").tolist() == [[20, 20]]

    asyncio.run(ask())
