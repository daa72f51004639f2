"""Inputs as Triton's client wants them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import InferInput

MODEL = "maskrcnn_resnet18_fpn"


def images_of(*images: bytes, column: bool = False) -> list[InferInput]:
    array = np.array(images, np.object_).reshape((-1, 1) if column else -1)
    return [InferInput("images", array.shape, "BYTES").set_data_from_numpy(array)]


def pixels_of(array: NDArray[Any], datatype: str) -> list[InferInput]:
    return [InferInput("images", array.shape, datatype).set_data_from_numpy(array)]
