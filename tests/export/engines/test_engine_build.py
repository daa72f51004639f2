"""Builds of real engines with TensorRT-RTX. Tests that need a GPU: test_tensorrt_engines.py."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, inliner

from maskrcnn_trt.export.bundle import bundle_from_checkpoint
from maskrcnn_trt.export.engines.build import builder_for
from maskrcnn_trt.export.engines.build_log import BuildLog
from maskrcnn_trt.export.engines.builder import profiles_from_batches
from maskrcnn_trt.export.engines.options import EngineOptions
from maskrcnn_trt.export.errors import EngineError
from maskrcnn_trt.export.onnx.export import onnx_from_model
from maskrcnn_trt.export.onnx.precision import fold_batch_norms, halve
from maskrcnn_trt.model.bundle.manifest import BatchProfile, Precision, read_manifest
from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.model.config.schema import ModelConfig
from maskrcnn_trt.model.mask_rcnn import MaskRCNN

trt = pytest.importorskip("tensorrt_rtx", reason="needs the wheel tensorrt-rtx")

OPTIONS = EngineOptions(batches=(4,))
# Type of the first input of each convolution in TensorRT-RTX's log.
READ_BY_CONVOLUTIONS = re.compile(
    r"LayerType: correlation, Inputs: \[ \{ Name: [^}]*Datatype: (\w+)"
)


@pytest.fixture(scope="module")
def models(bundle: Path, half_bundle: Path) -> dict[Precision, Path]:
    """ONNX files for inputs of 96x160."""
    single, half = (
        path / next(a.path for a in read_manifest(path).artifacts if str(a.bucket) == "96x160")
        for path in (bundle, half_bundle)
    )
    return {"fp32": single, "fp16": half}


@pytest.mark.parametrize(
    ("batches", "profiles"),
    [((1, 8), [(1, 1, 1), (2, 8, 8)]), ((16, 1, 8), [(1, 1, 1), (2, 8, 8), (9, 16, 16)]),
     ((4,), [(1, 4, 4)]), ((2, 2), [(1, 2, 2)])],
)  # fmt: skip
def test_profiles_cover_every_batch_once(
    batches: tuple[int, ...], profiles: list[tuple[int, int, int]]
) -> None:
    expected = [BatchProfile(min=low, opt=best, max=high) for low, best, high in profiles]
    assert list(profiles_from_batches(batches)) == expected


def test_engine_computes_in_the_types_of_its_precision(
    models: dict[Precision, Path], tmp_path: Path
) -> None:
    """The tests of the command `maskrcnn export` build engines in fp32 and tf32."""
    log = BuildLog(tmp_path / "build.log")
    plan = tmp_path / "model.rtx"
    build = builder_for("tensorrt-rtx", OPTIONS, log).build(models["fp16"], plan, "fp16")
    assert plan.stat().st_size > models["fp16"].stat().st_size / 2
    assert build.runtime_version == trt.__version__
    assert build.compute_capabilities == ("8.0", "8.6", "8.9", "12.0", "12.1")
    assert build.plugins == {}
    assert build.profiles == profiles_from_batches((4,))
    assert log.errors == []
    read = READ_BY_CONVOLUTIONS.findall(log.path.read_text())
    nodes = [node.op_type for node in onnx.load(models["fp16"]).graph.node]
    assert read == ["Half"] * nodes.count("Conv") * len(build.profiles)


@pytest.mark.usefixtures("reused_exports")
def test_bf16_engines_come_without_onnx_files(tiny_checkpoint: Path, tmp_path: Path) -> None:
    options = EngineOptions(batches=(1,), compute_capabilities=("8.9",), strict=True)
    log = BuildLog(tmp_path / "build.log")
    manifest = bundle_from_checkpoint(
        tiny_checkpoint,
        tmp_path / "bundle",
        precisions=("bf16",),
        buckets=[ShapeBucket(96, 160)],
        builders=[builder_for("tensorrt-rtx", options, log)],
    )
    assert [(a.kind, a.precision) for a in manifest.artifacts] == [("tensorrt-rtx", "bf16")]
    files = {path.name for path in (tmp_path / "bundle").iterdir()}
    assert files == {"manifest.json", "model-bf16-96x160.rtx"}
    assert set(READ_BY_CONVOLUTIONS.findall(log.path.read_text())) == {"BFloat16"}


def test_engine_of_another_precision(
    convolution: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"batches": (1,), "compute_capabilities": ("8.9",)}
    log = BuildLog(tmp_path / "build.log")
    builder = builder_for("tensorrt-rtx", EngineOptions(**options, strict=True), log)
    with pytest.raises(EngineError, match=r"x.rtx .*fp16.*fp32"):
        builder.build(convolution, tmp_path / "x.rtx", "fp16")
    assert not (tmp_path / "x.rtx").exists()
    builder_for("tensorrt-rtx", EngineOptions(**options), log).build(
        convolution, tmp_path / "x.rtx", "fp16"
    )
    assert "x.rtx should compute in fp16" in caplog.text
    assert (tmp_path / "x.rtx").exists()


def constants_of(path: Path) -> Iterator[np.ndarray]:
    """Constants of the network that TensorRT-RTX parses from a file."""
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(path.read_bytes())
    for index in range(network.num_layers):
        layer: Any = network.get_layer(index)
        if layer.type == trt.LayerType.CONSTANT:
            layer.__class__ = trt.IConstantLayer
            yield np.array(layer.weights)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_parser_reads_function_bodies_like_inlined_ones(
    models: dict[Precision, Path], tmp_path: Path, precision: Precision
) -> None:
    """An attribute that the parser loses leaves an empty constant or zeros."""
    inlined = tmp_path / "inlined.onnx"
    onnx.save(inliner.inline_local_functions(onnx.load(models[precision])), inlined)
    found, expected = (list(constants_of(path)) for path in (models[precision], inlined))
    assert len(found) == len(expected)
    for constant, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(constant, wanted)
    scales = np.array([1 / 4, 1 / 8, 1 / 16, 1 / 32], np.float32)
    assert sum(np.array_equal(constant, scales) for constant in found) >= 2


@pytest.mark.parametrize("capability", ["7.5", "9.0"])
def test_unsupported_gpu_raises(tmp_path: Path, capability: str) -> None:
    options = EngineOptions(compute_capabilities=("8.9", capability))
    with pytest.raises(EngineError, match=rf"12\.0.*, not {capability}; .* --engine tensorrt"):
        builder_for("tensorrt-rtx", options, BuildLog(tmp_path / "build.log"))


@pytest.mark.parametrize(
    "error",
    [
        "Error Code 2: OutOfMemory (Requested size was 4831838208 bytes.)",
        "Cuda failure: out of memory",
        "There may not be enough free memory for allocation to succeed.",
        "Tactic needs 9 MiB and is skipped due to insufficient memory",
    ],
)
def test_out_of_memory_error_takes_precedence(tmp_path: Path, error: str) -> None:
    log = BuildLog(tmp_path / "build.log")
    builder = builder_for("tensorrt-rtx", OPTIONS, log)
    with log.section("x.rtx"):
        log.write("ERROR", "Could not find any implementation for node conv")
        log.write("ERROR", error)
    message = builder._builder_error("x.rtx")
    assert error in message
    assert "--batch" in message


def model_of_one_node(path: Path, node: onnx.NodeProto) -> Path:
    shapes = {"x": (2, 3, 8, 8), "rois": (5, 4), "images": (5,)}
    inputs = [
        helper.make_tensor_value_info(
            name, TensorProto.INT64 if name == "images" else TensorProto.FLOAT, shapes[name]
        )
        for name in node.input
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "one", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)
    return path


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize(
    ("kind", "inputs", "fact"),
    [
        ("Frobnicate", ["x"], r"x.rtx .*pool \(Frobnicate\)"),
        # The bodies for C4 and for adaptive sampling use RoiAlign.
        ("RoiAlign", ["x", "rois", "images"], r"pool \(RoiAlign\).* requires an NVIDIA GPU"),
    ],
)
def test_unsupported_nodes_are_named(
    tmp_path: Path, kind: str, inputs: list[str], fact: str
) -> None:
    node = helper.make_node(kind, inputs, ["y"], name="pool")
    model = model_of_one_node(tmp_path / "one.onnx", node)
    builder = builder_for("tensorrt-rtx", OPTIONS, BuildLog(tmp_path / "build.log"))
    with pytest.raises(EngineError, match=fact):
        builder.build(model, tmp_path / "x.rtx", "fp32")


def test_interrupt_stops_the_builder(models: dict[Precision, Path], tmp_path: Path) -> None:
    script = (
        "import signal, sys\n"
        "from pathlib import Path\n"
        "from maskrcnn_trt.export.engines.build_log import BuildLog\n"
        "from maskrcnn_trt.export.engines.build import builder_for\n"
        "from maskrcnn_trt.export.engines.options import EngineOptions\n"
        # Shells make background processes ignore SIGINT.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "folder = Path(sys.argv[1])\n"
        "builder = builder_for('tensorrt-rtx', EngineOptions(), BuildLog(folder / 'build.log'))\n"
        "print('ready', flush=True)\n"
        "try:\n"
        "    builder.build(Path(sys.argv[2]), folder / 'x.rtx', 'fp32')\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path), str(models["fp32"])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        log = tmp_path / "build.log"
        while not (log.exists() and "GRAPH NODES" in log.read_text(errors="ignore")):
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        assert process.stdout.read() == "interrupted\n"
    assert "BuildCanceled" in log.read_text()
    assert not (tmp_path / "x.rtx").exists()


@pytest.mark.slow
def test_true_size(tmp_path: Path) -> None:
    """R-50-FPN for 800x1344 in fp16, batches up to 8."""
    torch.manual_seed(0)
    model = MaskRCNN(ModelConfig(num_classes=80)).eval()
    fold_batch_norms(model)
    halve(model, torch.float16)
    path = tmp_path / "model.onnx"
    onnx.save(onnx_from_model(model, ShapeBucket(800, 1344), torch.uint8), path)
    builder = builder_for("tensorrt-rtx", EngineOptions(), BuildLog(tmp_path / "build.log"))
    build = builder.build(path, tmp_path / "fp16.rtx", "fp16")
    assert [profile.max for profile in build.profiles] == [1, 8]
