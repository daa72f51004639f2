"""INT8 and FP8 models: quantization of an ONNX model's convolutions and linear layers."""

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from ...model.bundle.manifest import Preprocessing
from ...model.bundle.spec import INPUT_NAMES, ShapeBucket
from ...model.image_files import read_resized_image
from ...model.resizing import pad_to_bucket

# Maximum number of calibration images. With more images, the value ranges hardly change.
_MOST_IMAGES = 64
# Largest number in E4M3.
_LARGEST_FP8 = 448


def calibration_images(paths: Sequence[Path], preprocessing: Preprocessing) -> list[Path]:
    """Return at most 64 of `paths`, evenly spaced, for the calibration. Read each file as a check.

    Raises:
        ImageError: one of the chosen images cannot be read.
    """
    chosen = list(paths[:: -(-len(paths) // _MOST_IMAGES) or 1])
    for path in chosen:
        read_resized_image(path, preprocessing)
    return chosen


def quantized_model(
    model: onnx.ModelProto, paths: Sequence[Path], preprocessing: Preprocessing, bucket: ShapeBucket
) -> onnx.ModelProto:
    """Quantize convolutions and linear layers to 8-bit integers.

    Pairs of QuantizeLinear and DequantizeLinear nodes are inserted. Weights become int8, with a
    scale per output channel. The layers' inputs and outputs become uint8, with value ranges
    measured on the images. All other operations, including the custom nodes, stay in fp32.

    Args:
        model: result of `onnx_from_model` in fp32.
        paths: image files for the calibration, as `calibration_images` returns them.
        preprocessing: the checkpoint's settings for resizing images.
        bucket: input size of the model. Images that exceed it are cropped.

    Returns:
        A new model.

    Raises:
        ModuleNotFoundError: ONNX Runtime is not installed.
        ImageError: an image cannot be read.
    """
    # Import on use, because the export of other precisions needs no ONNX Runtime.
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, NDArray[Any]] | None:
            return next(feeds, None)

    dtype = onnx.helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
    feeds = (_feed(path, preprocessing, bucket, dtype) for path in paths)
    with tempfile.TemporaryDirectory() as folder, _without_advice():
        target = Path(folder, "quantized.onnx")
        quantize_static(
            model,
            target,
            Reader(),
            op_types_to_quantize=["Conv", "Gemm"],
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        return onnx.load(target)


def float8_model(
    model: onnx.ModelProto, paths: Sequence[Path], preprocessing: Preprocessing, bucket: ShapeBucket
) -> onnx.ModelProto:
    """Quantize convolutions and linear layers to fp8 (E4M3), for TensorRT.

    Inputs, outputs and weights of the layers become fp8. The value ranges are measured as in
    `quantized_model`, then made symmetric. The arguments (fp32 model, calibration images, resizing
    settings and input size), the result and the errors are those of `quantized_model`.
    """
    weights = {w.name: numpy_helper.to_array(w) for w in model.graph.initializer}
    quantized = quantized_model(model, paths, preprocessing, bucket)
    graph = quantized.graph
    make_symmetric(graph)
    constants = {constant.name: constant for constant in graph.initializer}
    nodes = [n for n in graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    # A QuantizeLinear and its DequantizeLinear read the same constants: scale each constant once.
    for scale, zero in {(node.input[1], node.input[2]) for node in nodes}:
        factor = numpy_helper.to_array(constants[scale]) * np.float32(127 / _LARGEST_FP8)
        constants[scale].CopyFrom(numpy_helper.from_array(factor, scale))
        constants[zero].CopyFrom(_fp8_constant(zero, np.zeros_like(factor)))
    for node in nodes:
        data, scale, _ = node.input
        if data in constants:
            weight = weights[data.removesuffix("_quantized")]
            (channels,) = (a.i for a in node.attribute if a.name == "axis")
            others = [axis for axis in range(weight.ndim) if axis != channels]
            scales = np.expand_dims(numpy_helper.to_array(constants[scale]), others)
            constants[data].CopyFrom(_fp8_constant(data, weight / scales))
    # fp8 needs opset 19. The model's operators of opset 18 have the same meaning in opset 19, so it
    # is enough to raise the version.
    for opset in (
        *quantized.opset_import,
        *(o for f in quantized.functions for o in f.opset_import),
    ):
        if opset.domain == "":
            opset.version = 19
    return quantized


def _fp8_constant(name: str, values: NDArray[np.float32]) -> onnx.TensorProto:
    """Return an ONNX constant in fp8 (E4M3), with values clamped to fp8's range and rounded."""
    bounded = torch.from_numpy(values).clamp(-_LARGEST_FP8, _LARGEST_FP8)
    content = bounded.to(torch.float8_e4m3fn).view(torch.uint8).numpy().tobytes()
    return helper.make_tensor(name, onnx.TensorProto.FLOAT8E4M3FN, values.shape, content, raw=True)


def make_symmetric(graph: onnx.GraphProto) -> None:
    """Convert quantized activations to int8 without zero points, and biases to fp32, in place.

    TensorRT supports no other types for these values. The new, symmetric range of an activation
    includes the old range. A graph without quantization does not change.
    """
    constants = {constant.name: constant for constant in graph.initializer}

    def value(name: str) -> NDArray[Any]:
        return numpy_helper.to_array(constants[name])

    def replace(name: str, array: NDArray[Any]) -> None:
        constants[name].CopyFrom(numpy_helper.from_array(array, name))

    for node in [n for n in graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]:
        data, scale, zero = node.input
        if data in constants and value(data).dtype == np.int32:
            bias = (value(data) * value(scale)).astype(np.float32)
            graph.initializer.append(numpy_helper.from_array(bias, node.output[0]))
            graph.node.remove(node)
        elif value(zero).dtype == np.uint8:  # int8: a weight, or already converted
            point = int(value(zero))
            replace(scale, value(scale) * np.float32(max(point, 255 - point) / 127))
            replace(zero, np.zeros((), np.int8))


def _feed(
    path: Path, preprocessing: Preprocessing, bucket: ShapeBucket, dtype: np.dtype[Any]
) -> dict[str, NDArray[Any]]:
    """Read, resize, crop and pad an image, and return the model's inputs by name."""
    resized = read_resized_image(path, preprocessing)[: bucket.height, : bucket.width]
    pixels = pad_to_bucket(resized, bucket)[None].astype(dtype)
    return dict(zip(INPUT_NAMES, (pixels, np.array([resized.shape[:2]], np.int64)), strict=True))


@contextmanager
def _without_advice() -> Iterator[None]:
    """Context manager: silence the log messages of all Python loggers, up to WARNING."""
    previous = logging.root.manager.disable
    logging.disable(max(previous, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(previous)
