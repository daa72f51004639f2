"""Requests of the Open Inference Protocol: inputs for Triton's client, and messages."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import InferInput

from maskrcnn_trt.protos.inference import open_inference_pb2 as inference

# Model name of the test bundle.
MODEL = "maskrcnn_resnet10_fpn"


def images_of(*images: bytes, column: bool = False) -> list[InferInput]:
    """Return encoded images as an input of Triton's client, of shape [B], or [B, 1] if `column`."""
    array = np.array(images, np.object_).reshape((-1, 1) if column else -1)
    return [InferInput("images", array.shape, "BYTES").set_data_from_numpy(array)]


def pixels_of(array: NDArray[Any], datatype: str) -> list[InferInput]:
    """Return pixels [B, H, W, 3] as an input of Triton's client."""
    return [InferInput("images", array.shape, datatype).set_data_from_numpy(array)]


def infer_request(model: str, *images: bytes) -> inference.ModelInferRequest:
    """Return encoded images as a request message."""
    tensor = inference.ModelInferRequest.InferInputTensor(
        name="images",
        datatype="BYTES",
        shape=[len(images)],
        contents=inference.InferTensorContents(bytes_contents=images),
    )
    return inference.ModelInferRequest(model_name=model, inputs=[tensor])
