"""Parsing of layers from three sources, and the check of their precision."""

import json
from typing import Any

import pytest

from maskrcnn_trt.export.engines.layers import (
    Layer,
    LayerTensor,
    check_precision,
    layers_from_json,
    layers_from_listing,
)
from maskrcnn_trt.export.errors import EngineError
from maskrcnn_trt.model.bundle.manifest import Precision


def layer(kind: str, *types: str, weights: str = "") -> Layer:
    inputs = tuple(LayerTensor(f"x{i}", (1, 2), dtype) for i, dtype in enumerate(types))
    return Layer(f"a {kind}", kind, inputs, (), weights)


CONVOLUTIONS = ("CaskConvolution", "CaskDeconvolutionV2", "CaskGemmConvolution", "correlation")
PRODUCTS = ("gemm", "MatrixMultiply", "CaskGemmMatrixMultiply")


@pytest.mark.parametrize(
    "kind",
    [*CONVOLUTIONS, *PRODUCTS, "kgen", "Reformat", "PluginV3", "Constant", "NoOp", "maxpool"],
)
def test_kinds(kind: str) -> None:
    assert layer(kind).is_convolution == (kind in CONVOLUTIONS)
    assert layer(kind).is_matrix_product == (kind in PRODUCTS)


@pytest.mark.parametrize(
    ("precision", "layers"),
    [
        ("fp32", [layer("correlation", "fp32"), layer("gemm", "fp32")]),
        ("tf32", [layer("correlation", "fp32", "fp32")]),
        ("fp16", [layer("correlation", "fp16"), layer("gemm", "fp16"), layer("kgen", "fp32")]),
        # The matrix product of NMS stays in fp32.
        ("fp16", [layer("correlation", "fp16"), layer("gemm", "fp16"), layer("gemm", "fp32")]),
        ("fp16", [layer("correlation", "fp16")]),
        ("fp16", [layer("CaskConvolution", "", weights="fp16")]),
        ("fp16", [layer("correlation", "fp16", "int64")]),
        ("int8", [layer("correlation", "int8", "fp32"), layer("deconv", "fp32")]),
    ],
)
def test_engine_of_the_precision_passes(precision: Precision, layers: list[Layer]) -> None:
    check_precision(layers, precision, "model.plan")


@pytest.mark.parametrize(
    ("precision", "layers", "facts"),
    [
        ("fp16", [layer("correlation", "fp32")] * 2, "2 of its 2 .* fp32.* layer a corr"),
        ("fp16", [layer("correlation", "fp16"), layer("deconv", "fp32")], "1 of its 2 .* fp32"),
        ("fp16", [layer("correlation", "fp16"), layer("gemm", "fp32")], "1 of its 2 .* fp32"),
        ("fp16", [layer("correlation", "fp16", "fp32")], "1 of its 1 .* fp16, fp32"),
        ("fp16", [layer("correlation", "")], "unknown type"),
        ("fp32", [layer("correlation", "fp16")], "fp32, .* fp16"),
        ("tf32", [layer("correlation", "fp32"), layer("gemm", "fp16")], "1 of its 2 .* fp16"),
        ("fp32", [layer("correlation", "bf16")], "bf16"),
        ("bf16", [layer("correlation", "fp16"), layer("gemm", "bf16")], "1 of its 2 .* fp16"),
        (
            "int8",
            [layer("correlation", "fp32"), layer("correlation", "int8")],
            "1 of its 2 .* fp32",
        ),
        ("fp16", [layer("kgen", "fp16")], "model.plan.* no convolution"),
        ("fp32", [], "model.plan.* no convolution"),
    ],
)
def test_engine_of_another_precision_raises(
    precision: Precision, layers: list[Layer], facts: str
) -> None:
    with pytest.raises(EngineError, match=facts):
        check_precision(layers, precision, "model.plan")


@pytest.mark.parametrize(
    ("tensor", "dtype"),
    [({"Format/Datatype": "Row major linear FP32"}, "fp32"),
     ({"Format/Datatype": "Channel major FP16 format where channel % 8 == 0"}, "fp16"),
     ({"Format/Datatype": "Half"}, "fp16"),
     ({"Format/Datatype": "N/A due to dynamic shapes"}, ""),
     ({"Datatype": "Float", "Format": "(NHWC) Channel major format"}, "fp32"),
     ({"Datatype": "BFloat16"}, "bf16"),
     ({"Format/Datatype": "Row major linear UINT8 format (kLINEAR)"}, "uint8"),
     ({"Format/Datatype": "Thirty-two wide channel vectorized row major Int8 format."}, "int8"),
     ({"Datatype": "Int64"}, "int64"), ({"Datatype": "Bool"}, "bool"), ({}, "")],
)  # fmt: skip
@pytest.mark.parametrize("rest", [{"Bindings": ["x"]}, {"I/O Tensors": [{"Name": "x"}]}])
def test_types_in_json(tensor: dict[str, str], dtype: str, rest: dict[str, Any]) -> None:
    tensor = {"Name": "x", "Dimensions": [-1, 3], **tensor}
    record = {"Name": "conv", "LayerType": "CaskConvolution", "Inputs": [tensor], "Outputs": []}
    (found,) = layers_from_json(json.dumps({"Layers": [record], **rest}))
    assert found == Layer("conv", "CaskConvolution", (LayerTensor("x", (-1, 3), dtype),), ())


def test_weights_in_json() -> None:
    record = {
        "Name": "conv", "LayerType": "CaskConvolution", "Weights": {"Type": "Half", "Count": 9},
        "Inputs": [{"Name": "x", "Format/Datatype": "N/A due to dynamic shapes"}],
    }  # fmt: skip
    (found,) = layers_from_json(json.dumps({"Layers": [record]}))
    assert found.compute_types == {"fp16"}


def test_engine_without_detailed_layers_raises() -> None:
    with pytest.raises(EngineError, match=r"ProfilingVerbosity.DETAILED"):
        layers_from_json(json.dumps({"Layers": ["conv1 + relu1"], "Bindings": []}))


def test_listing() -> None:
    layers = layers_from_listing(
        "Layers:\n"
        "Name: __init, LayerType: memset, Inputs: [], Constants: [], Outputs: [ { Name: d, "
        "Dimensions: [1], Strides: [1], StrideOrder: [0], Datatype: Float, Format: (Linear) }], "
        "TacticName: , StreamId: 0, Metadata: \n"
        "Name: conv [profile 1], LayerType: correlation, Inputs: [ { Name: x, Dimensions: "
        "[-1,64,24,40], Strides: [1,2,3,4], StrideOrder: [3,0,2,1], Datatype: Half, Format: ()}, "
        "{ Name: n, Dimensions: [], Strides: [], StrideOrder: [], Datatype: Int64, Format: ()}], "
        "Constants: [ { Name: w, Dimensions: [1], Strides: [1], StrideOrder: [0], Datatype: Float, "
        "Format: (Linear)}], Outputs: [ { Name: y, Dimensions: [-1,8], Strides: [8,1], "
        "StrideOrder: [1,0], Datatype: Half, Format: (NHWC)}], TacticName: t, Metadata: [ONNX: c]\n"
        "Name: wait, LayerType: wait, Inputs: [], Constants: [], Outputs: [], TacticName: , \n"
    )
    assert [(found.name, found.kind) for found in layers] == [
        ("__init", "memset"), ("conv [profile 1]", "correlation"), ("wait", "wait"),
    ]  # fmt: skip
    assert layers[1].inputs == (
        LayerTensor("x", (-1, 64, 24, 40), "fp16"), LayerTensor("n", (), "int64"),
    )  # fmt: skip
    assert layers[1].outputs == (LayerTensor("y", (-1, 8), "fp16"),)
    assert layers[2].inputs == layers[2].outputs == ()
