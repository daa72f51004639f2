"""What an engine's layers are and in which types they compute."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..model.manifest import Precision
from .errors import EngineError


@dataclass(frozen=True)
class LayerTensor:
    """A tensor that a layer reads or writes."""

    name: str
    shape: tuple[int, ...]
    """-1 for a size that is only known when the engine runs."""
    dtype: str
    """As in `fp16` or `int64`; empty where TensorRT does not say."""


@dataclass(frozen=True)
class Layer:
    """A layer of a built engine, which may be several layers of the network fused."""

    name: str
    kind: str
    """TensorRT's own word, as `CaskConvolution`, `correlation`, `gemm` or `kgen`."""
    inputs: tuple[LayerTensor, ...]
    outputs: tuple[LayerTensor, ...]
    weights_dtype: str = ""
    """Type of the weights, where TensorRT lists them apart."""

    @property
    def is_convolution(self) -> bool:
        """Whether this is a convolution, transposed or not."""
        return re.search("conv|correlation", self.kind, re.IGNORECASE) is not None

    @property
    def is_matrix_product(self) -> bool:
        """Whether this is a product of matrices."""
        found = re.search(r"gemm|mat(rix)?\s?mul", self.kind, re.IGNORECASE) is not None
        return found and not self.is_convolution

    @property
    def compute_types(self) -> frozenset[str]:
        """Floating-point types that it reads, or of its weights where inputs have none."""
        read = frozenset(t.dtype for t in self.inputs) & _FLOATING
        return read or frozenset({self.weights_dtype}) & _FLOATING


_FLOATING = frozenset({"fp32", "fp16", "bf16", "fp8", "fp4"})
_DTYPE = re.compile("BFLOAT16|BF16|HALF|FP16|FLOAT|FP32|FP8|FP4|U?INT8|INT(?:4|32|64)|BOOL")
_SPELLINGS = {"bfloat16": "bf16", "half": "fp16", "float": "fp32"}


def check_precision(layers: Sequence[Layer], precision: Precision, name: str) -> None:
    """Refuse an engine that computes in another type than its precision says.

    In fp16 every convolution reads half precision, and so does at least one matrix product, for
    that of suppression stays in single precision. In fp32 and tf32 neither reads anything but
    single precision; what TF32 does to it, no type tells.

    Raises:
        EngineError: it does not, or has no convolution by which to tell.
    """
    convolutions = [layer for layer in layers if layer.is_convolution]
    products = [layer for layer in layers if layer.is_matrix_product]
    if not convolutions:
        raise EngineError(
            f"TensorRT lists no convolution of {name}, by which its precision would be confirmed; "
            "build it with a version that the README names"
        )
    expected = frozenset({"fp16" if precision == "fp16" else "fp32"})
    wrong = [layer for layer in convolutions if layer.compute_types != expected]
    products_differ = [layer for layer in products if layer.compute_types != expected]
    if precision != "fp16" or len(products_differ) == len(products):
        wrong += products_differ
    if wrong:
        types = ", ".join(sorted(frozenset().union(*(layer.compute_types for layer in wrong))))
        raise EngineError(
            f"{name} should compute in {precision}, but {len(wrong)} of its "
            f"{len(convolutions) + len(products)} convolutions and matrix products read "
            f"{types or 'an unknown type'}, {wrong[0].name} first; the engine is not kept, "
            "and the bundle can be exported without --engine"
        )


def layers_from_json(text: str) -> list[Layer]:
    """Layers as `EngineInspector.get_engine_information` gives them in JSON.

    The engine must have been built with detailed profiling verbosity.

    Raises:
        EngineError: it was not.
    """
    records = json.loads(text)["Layers"]
    if any(isinstance(record, str) for record in records):
        raise EngineError(
            "the engine holds no more than its layers' names; it was built without "
            "ProfilingVerbosity.DETAILED, so build it with `maskrcnn export --engine`"
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
    # Backends within TensorRT differ: a type of its own, or one in the name of the format.
    return tuple(
        LayerTensor(
            record["Name"],
            tuple(record.get("Dimensions", ())),
            dtype_from_text(record.get("Datatype") or record.get("Format/Datatype", "")),
        )
        for record in records
    )


_LISTED_LAYER = re.compile(
    r"^Name: (?P<name>.*?), LayerType: (?P<kind>[^,]*), Inputs: \[(?P<inputs>.*?)\], "
    r"(?:Constants: \[.*?\], )?Outputs: \[(?P<outputs>.*?)\], TacticName: ",
    re.MULTILINE,
)
_LISTED_TENSOR = re.compile(
    r"\{ Name: (?P<name>.*?), Dimensions: \[(?P<shape>[-\d,]*)\].*?, Datatype: (?P<dtype>\w+)"
)


def layers_from_listing(text: str) -> list[Layer]:
    """Layers as TensorRT-RTX's builder lists them in its log, a layer a line.

    They are what the inspector would say; this needs no GPU.
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
    """`fp16` from `Half` or `Channel major FP16 format`; empty where no type is named."""
    match = _DTYPE.search(text.upper())
    word = match[0].lower() if match else ""
    return _SPELLINGS.get(word, word)
