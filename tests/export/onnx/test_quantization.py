"""INT8 and FP8: graphs, detections, and engines of TensorRT-RTX's real builder."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from PIL import Image
from shared_exports import cached_exports
from torch import Tensor

from maskrcnn_trt.export.bundle import bundle_from_checkpoint
from maskrcnn_trt.export.engines.build import builder_for
from maskrcnn_trt.export.engines.build_log import BuildLog
from maskrcnn_trt.export.engines.engine_graph import load_model
from maskrcnn_trt.export.engines.options import EngineOptions
from maskrcnn_trt.export.errors import EngineError
from maskrcnn_trt.export.onnx.quantization import float8_model, quantized_model
from maskrcnn_trt.model.bundle.manifest import BundleError, Precision, read_manifest
from maskrcnn_trt.model.bundle.spec import INPUT_NAMES, ShapeBucket
from maskrcnn_trt.model.checkpoint import load_checkpoint
from maskrcnn_trt.model.image_limits import ImageError


@pytest.fixture(scope="module")
def images(
    smooth_noise: tuple[Tensor, Tensor], tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """Image files, some of which are larger than the input."""
    folder = tmp_path_factory.mktemp("calibration")
    paths = [folder / f"{index}.png" for index in range(8)]
    for index, (path, image) in enumerate(zip(paths, smooth_noise[0], strict=True)):
        pixels = Image.fromarray(image.permute(1, 2, 0).numpy())
        (pixels.transpose(Image.Transpose.ROTATE_90) if index % 4 == 3 else pixels).save(path)
    return paths


@pytest.fixture(scope="module")
def quantized(
    tiny_checkpoint: Path,
    images: list[Path],
    shared_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Bundle in fp32 and int8."""
    folder = tmp_path_factory.mktemp("quantized") / "bundle"
    with cached_exports(shared_folder):
        bundle_from_checkpoint(
            tiny_checkpoint, folder, precisions=("fp32", "int8"), buckets=[ShapeBucket(96, 160)],
            calibration=images,
        )  # fmt: skip
    return folder


def path_of(bundle: Path) -> Path:
    (artifact,) = read_manifest(bundle).artifacts_for("int8")
    return bundle / artifact.path


def test_weights_are_int8_and_custom_nodes_stay(quantized: Path) -> None:
    graph = onnx.load(path_of(quantized)).graph
    producers = {name: node for node in graph.node for name in node.output}
    constants = {value.name: numpy_helper.to_array(value) for value in graph.initializer}
    heavy = [node for node in graph.node if node.op_type in ("Conv", "Gemm")]
    assert len(heavy) > 20
    for node in heavy:
        data, weights = (producers[name] for name in node.input[:2])
        assert data.op_type == weights.op_type == "DequantizeLinear"
        assert constants[weights.input[0]].dtype == np.int8
        assert constants[data.input[2]].dtype == np.uint8
    custom = {node.op_type for node in graph.node if node.domain}
    assert custom == {"DecodeBoxes", "NmsKeep", "PyramidRoIAlign"}
    assert (
        path_of(quantized).stat().st_size
        < 0.4 * (quantized / "model-fp32-96x160.onnx").stat().st_size
    )


@pytest.fixture(scope="module")
def float8(
    quantized: Path, tiny_checkpoint: Path, images: list[Path], tmp_path_factory: Any
) -> Path:
    """ONNX file in fp8."""
    model = onnx.load(quantized / "model-fp32-96x160.onnx")
    preprocessing = load_checkpoint(tiny_checkpoint).preprocessing
    path: Path = tmp_path_factory.mktemp("float8") / "model.onnx"
    onnx.save(float8_model(model, images, preprocessing, ShapeBucket(96, 160)), path)
    return path


def scores_of(
    model: bytes, noise: tuple[Tensor, Tensor], *, fused: bool = True
) -> NDArray[np.float32]:
    """Return the scores [B, D] of all detections."""
    feeds = dict(zip(INPUT_NAMES, (tensor.numpy() for tensor in noise), strict=True))
    options = onnxruntime.SessionOptions()
    if not fused:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    (scores,) = onnxruntime.InferenceSession(model, options).run(["scores"], feeds)
    return np.asarray(scores)


def test_scores_are_alike(quantized: Path, smooth_noise: tuple[Tensor, Tensor]) -> None:
    single, integer = (
        scores_of((quantized / f"model-{types}-96x160.onnx").read_bytes(), smooth_noise)
        for types in ("fp32", "int8")
    )
    assert single.max() > 0.1
    np.testing.assert_allclose(integer, single, atol=0.03)
    assert np.abs(integer - single).max() > 0


def test_engines_get_symmetric_ranges(quantized: Path, smooth_noise: tuple[Tensor, Tensor]) -> None:
    wide, symmetric = onnx.load(path_of(quantized)), load_model(path_of(quantized))
    before, after = (
        {value.name: numpy_helper.to_array(value) for value in model.graph.initializer}
        for model in (wide, symmetric)
    )
    nodes = [n for n in symmetric.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert {after[node.input[2]].dtype for node in nodes} == {np.dtype(np.int8)}
    pairs = [node for node in wide.graph.node if node.op_type == "QuantizeLinear"]
    for _, scale, zero in (node.input for node in pairs):
        assert after[zero] == 0
        point = int(before[zero])
        limits = before[scale] * np.array([-point, 255 - point])
        np.testing.assert_allclose(np.abs(limits).max(), 127 * after[scale], rtol=1e-6)
    scores = (scores_of(m.SerializeToString(), smooth_noise) for m in (wide, symmetric))
    np.testing.assert_allclose(*scores, atol=0.03)


def test_fp8_rounds_weights_and_inputs(
    quantized: Path, float8: Path, smooth_noise: tuple[Tensor, Tensor]
) -> None:
    single, rounded = (onnx.load(path) for path in (quantized / "model-fp32-96x160.onnx", float8))
    before, after = (
        {value.name: numpy_helper.to_array(value) for value in model.graph.initializer}
        for model in (single, rounded)
    )
    pairs = [node for node in rounded.graph.node if node.op_type == "DequantizeLinear"]
    weights = [node for node in pairs if node.input[0] in after]
    assert len(weights) > 20
    for data, scale, zero in (node.input for node in weights):
        assert not after[zero].astype(np.float32).any()
        weight = before[data.removesuffix("_quantized")]
        scales = after[scale].reshape(-1, *[1] * (weight.ndim - 1))
        # Half of the distance of neighbours: 4 bits, and below 2 ** -6 steps of 2 ** -9.
        bound = np.maximum(np.abs(weight) / 16, scales / 2**10) * 1.001
        assert (np.abs(after[data].astype(np.float32) * scales - weight) <= bound).all()
    # Unfused, because ONNX Runtime has no operators for fp8 beside the conversions.
    scores = [
        scores_of(m.SerializeToString(), smooth_noise, fused=m is single) for m in (single, rounded)
    ]
    np.testing.assert_allclose(*scores, atol=0.05)


@pytest.mark.skipif(torch.cuda.is_available(), reason="builds for GPUs that are not here")
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_engine_computes_in_its_precision(
    quantized: Path, float8: Path, tmp_path: Path, precision: Precision
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs the wheel tensorrt-rtx")
    options = EngineOptions(batches=(1,), compute_capabilities=("8.9",), strict=True)
    builder = builder_for("tensorrt-rtx", options, BuildLog(tmp_path / "build.log"))
    source = float8 if precision == "fp8" else path_of(quantized)
    builder.build(source, tmp_path / "x.rtx", precision)


def test_older_gpus_do_not_compute_in_fp8(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs the wheel tensorrt-rtx")
    options = EngineOptions(compute_capabilities=("8.6", "12.0"))
    builder = builder_for("tensorrt-rtx", options, BuildLog(tmp_path / "build.log"))
    with pytest.raises(EngineError, match=r"8\.6 .*fp8.*8\.9.*--compute-capability"):
        builder.check(["fp16", "fp8"])


@pytest.mark.parametrize(
    ("precision", "remedy"), [("int8", "--calibration"), ("fp8", "--engine tensorrt")]
)
def test_calibration_and_engine_are_required(
    tiny_checkpoint: Path, tmp_path: Path, precision: Precision, remedy: str
) -> None:
    with pytest.raises(BundleError, match=remedy):
        bundle_from_checkpoint(tiny_checkpoint, tmp_path / "b", precisions=(precision,))


@pytest.mark.parametrize(
    ("name", "fault"), [("damaged", "not a JPEG"), ("missing", "No such file")]
)
def test_an_unusable_calibration_image_is_named_before_the_export(
    tiny_checkpoint: Path, tmp_path: Path, name: str, fault: str
) -> None:
    (tmp_path / "damaged").write_bytes(b"text")
    with pytest.raises(ImageError, match=f"{tmp_path / name}: .*{fault}"):
        bundle_from_checkpoint(
            tiny_checkpoint, tmp_path / "bundle", precisions=["int8"],
            calibration=[tmp_path / name], report=pytest.fail,
        )  # fmt: skip


def test_the_disabled_log_level_is_restored(
    bundle: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    artifact = read_manifest(bundle).artifacts[0]
    model = onnx.load(bundle / artifact.path)
    preprocessing = load_checkpoint(tiny_checkpoint).preprocessing
    logging.disable(logging.INFO)
    try:
        with pytest.raises(ImageError):
            quantized_model(model, [tmp_path / "missing"], preprocessing, artifact.bucket)
        assert logging.root.manager.disable == logging.INFO
    finally:
        logging.disable(logging.NOTSET)
