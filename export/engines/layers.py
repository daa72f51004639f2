"""Layers of a built engine, and the check that they compute in the requested precision."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...model.bundle.manifest import QUANTIZED_PRECISIONS, Precision
from ..errors import EngineError


class PrecisionError(EngineError):
    """An engine's layers do not compute in the requested precision, or include no convolution."""


@dataclass(frozen=True)
class LayerTensor:
    """Input or output tensor of a layer."""

    name: str
    # Sizes of the axes. -1: the size is known only at run time.
    shape: tuple[int, ...]
    # Name such as `fp16` or `int64`. Empty: unknown.
    dtype: str


@dataclass(frozen=True)
class Layer:
    """Layer of a built engine. It may fuse several layers of the network."""

    name: str
    # TensorRT's name of the layer type, such as `CaskConvolution`, `correlation` or `gemm`.
    kind: str
    inputs: tuple[LayerTensor, ...]
    outputs: tuple[LayerTensor, ...]
    # Type of the weights. Empty: TensorRT does not list it.
    weights_dtype: str = ""

    @property
    def is_convolution(self) -> bool:
        """Whether the layer is a convolution or a transposed convolution."""
        return re.search("conv|correlation", self.kind, re.IGNORECASE) is not None

    @property
    def is_matrix_product(self) -> bool:
        """Whether the layer is a matrix product."""
        found = re.search(r"gemm|mat(rix)?\s?mul", self.kind, re.IGNORECASE) is not None
        return found and not self.is_convolution

    @property
    def compute_types(self) -> frozenset[str]:
        """Types of the inputs that the layer computes with, such as `fp16` or `int8`.

        They show the layer's precision. Types of indices, booleans and uint8 images are left out.
        If this leaves no type, the set contains the type of the weights, if it is known.
        """
        read = frozenset(t.dtype for t in self.inputs) & _ARITHMETIC
        return read or frozenset({self.weights_dtype}) & _ARITHMETIC


# Types that decide the precision of a layer, unlike the types of indices, images and booleans.
_ARITHMETIC = frozenset({"fp32", "fp16", "bf16", "fp8", "fp4", "int8"})
_DTYPE = re.compile("BFLOAT16|BF16|HALF|FP16|FLOAT|FP32|FP8|FP4|U?INT8|INT(?:4|32|64)|BOOL")
# In an fp8 engine, convolutions with fewer input channels than this may have inputs of any type.
_MIN_FP8_CHANNELS = 16
# This project's name of each type that TensorRT names differently, by TensorRT's name.
_SPELLINGS = {"bfloat16": "bf16", "half": "fp16", "float": "fp32"}


def check_precision(layers: Sequence[Layer], precision: Precision, name: str) -> None:
    """Check that the inputs of an engine's layers have the type of the engine's precision.

    - fp16, bf16: every convolution and at least one matrix product must have inputs of this type.
    - fp32, tf32: every convolution and matrix product must have fp32 inputs. The input types do not
      show whether TF32 is on.
    - int8, fp8: every convolution must have an input of this type. Its other inputs may be fp32.
      Transposed convolutions are not checked. In fp8, convolutions with fewer than 16 input
      channels, such as the first layer, are not checked either.

    `name` is the engine's name in error messages.

    Raises:
        PrecisionError: a layer computes in another type, or `layers` has no convolution.
    """
    convolutions = [layer for layer in layers if layer.is_convolution]
    products = [layer for layer in layers if layer.is_matrix_product]
    if not convolutions:
        raise PrecisionError(
            f"cannot check the precision of {name}, because TensorRT's engine inspector "
            "reports no convolutions; build the engine with a TensorRT version that "
            "export/README.md lists"
        )
    is_quantized = precision in QUANTIZED_PRECISIONS
    if is_quantized:
        convolutions = [layer for layer in convolutions if "deconv" not in layer.kind.lower()]
        products = []
    if precision == "fp8":
        convolutions = [c for c in convolutions if c.inputs[0].shape[1] >= _MIN_FP8_CHANNELS]
    expected = frozenset({"fp32" if precision == "tf32" else precision})
    allowed = expected | ({"fp32"} if is_quantized else set())
    wrong = [c for c in convolutions if not expected <= c.compute_types <= allowed]
    # The function body of NMS has a matrix product in fp32. In fp16 and bf16, matrix products of
    # another type are therefore an error only if no product has the expected type.
    products_differ = [layer for layer in products if layer.compute_types != expected]
    if precision not in ("fp16", "bf16") or len(products_differ) == len(products):
        wrong += products_differ
    if wrong:
        types = ", ".join(sorted(frozenset().union(*(layer.compute_types for layer in wrong))))
        raise PrecisionError(
            f"{name} should compute in {precision}, but {len(wrong)} of its "
            f"{len(convolutions) + len(products)} convolutions and matrix products have "
            f"inputs of {types or 'an unknown type'}, beginning with layer {wrong[0].name}; "
            "measure the accuracy with `maskrcnn eval`, or export the bundle without --engine"
        )


def layers_from_json(text: str) -> list[Layer]:
    """Parse the JSON that `EngineInspector.get_engine_information` returns.

    Raises:
        EngineError: the engine was built without detailed profiling verbosity.
    """
    records = json.loads(text)["Layers"]
    if any(isinstance(record, str) for record in records):
        raise EngineError(
            "the engine holds only the names of its layers, because it was built without "
            "ProfilingVerbosity.DETAILED; rebuild it with `maskrcnn export --engine`"
        )
    return [
        Layer(
            name=record["Name"],
            kind=record.get("LayerType", ""),
            inputs=_tensors_from_json(record.get("Inputs", ())),
            outputs=_tensors_from_json(record.get("Outputs", ())),
            weights_dtype=dtype_from_text(record.get("Weights", {}).get("Type", "")),
        )
        for record in records
    ]


def _tensors_from_json(records: Sequence[dict[str, Any]]) -> tuple[LayerTensor, ...]:
    # Depending on TensorRT's backend, the type is in a separate field or in the format's name.
    return tuple(
        LayerTensor(
            record["Name"],
            tuple(record.get("Dimensions", ())),
            dtype_from_text(record.get("Datatype") or record.get("Format/Datatype", "")),
        )
        for record in records
    )


# Line of the list of layers in TensorRT-RTX's build log, and one tensor in such a line.
_LISTED_LAYER = re.compile(
    r"^Name: (?P<name>.*?), LayerType: (?P<kind>[^,]*), Inputs: \[(?P<inputs>.*?)\], "
    r"(?:Constants: \[.*?\], )?Outputs: \[(?P<outputs>.*?)\], TacticName: ",
    re.MULTILINE,
)
_LISTED_TENSOR = re.compile(
    r"\{ Name: (?P<name>.*?), Dimensions: \[(?P<shape>[-\d,]*)\].*?, Datatype: (?P<dtype>\w+)"
)


def layers_from_listing(text: str) -> list[Layer]:
    """Parse the list of an engine's layers in TensorRT-RTX's build log, one layer per line.

    Unlike the input of `layers_from_json`, the build log can be obtained without a GPU. The log
    lacks the types of the weights, so the field `weights_dtype` of each layer is empty.
    """
    return [
        Layer(
            match["name"],
            match["kind"],
            _tensors_from_listing(match["inputs"]),
            _tensors_from_listing(match["outputs"]),
        )
        for match in _LISTED_LAYER.finditer(text)
    ]


def _tensors_from_listing(text: str) -> tuple[LayerTensor, ...]:
    return tuple(
        LayerTensor(
            match["name"],
            tuple(int(size) for size in match["shape"].split(",") if size),
            dtype_from_text(match["dtype"]),
        )
        for match in _LISTED_TENSOR.finditer(text)
    )


def dtype_from_text(text: str) -> str:
    """Return the data type that a text from TensorRT names, or "" if it names none.

    `Half` and `Channel major FP16 format` both give `fp16`.
    """
    match = _DTYPE.search(text.upper())
    word = match[0].lower() if match else ""
    return _SPELLINGS.get(word, word)
