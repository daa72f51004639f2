import json
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from command_line import invoke
from rich.console import Console
from rich.table import Table

from maskrcnn_trt.export.engines import commands as engine_commands
from maskrcnn_trt.export.engines.build import builder_for
from maskrcnn_trt.export.engines.build_log import BuildLog
from maskrcnn_trt.export.engines.inspection import EngineTensor
from maskrcnn_trt.export.engines.layers import Layer, LayerTensor
from maskrcnn_trt.export.engines.options import EngineOptions
from maskrcnn_trt.export.errors import EngineError
from maskrcnn_trt.model.bundle.manifest import BundleError, read_manifest, sha256_of, write_manifest

pytest.importorskip("tensorrt_rtx", reason="needs the wheel tensorrt-rtx")


inspect = partial(invoke, engine_commands.engine, "inspect")


@pytest.fixture(scope="module")
def engine_bundle(
    half_bundle: Path, convolution: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Copy of the fp16 bundle with a TensorRT-RTX engine, which has one convolution."""
    folder = shutil.copytree(half_bundle, tmp_path_factory.mktemp("engines") / "bundle")
    manifest = read_manifest(folder)
    (graph,) = manifest.artifacts
    plan = folder / "model-fp16-96x160.rtx"
    options = EngineOptions(batches=(1, 4), compute_capabilities=("12.0", "8.9", "12.0"))
    builder = builder_for("tensorrt-rtx", options, BuildLog(folder.with_name("build.log")))
    build = builder.build(convolution, plan, "fp32")
    facts = {"path": plan.name, "sha256": sha256_of(plan), "kind": builder.kind, "engine": build}
    engine = graph.model_copy(update=facts)
    write_manifest(folder, manifest.model_copy(update={"artifacts": (graph, engine)}))
    return folder


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_the_manifest_entry_is_shown(engine_bundle: Path) -> None:
    plan = engine_bundle / "model-fp16-96x160.rtx"
    result = inspect(plan)
    for fact in ("fp16", "96x160 uint8", "1 to 1, best 1, 2 to 4, best 4", "12.0, 8.9", "none"):
        assert fact in result.output
    assert isinstance(result.exception, EngineError)
    assert "CUDA driver version is insufficient" in str(result.exception)
    assert "no GPU" in str(result.exception)
    assert "maskrcnn export --engine" in str(result.exception)
    result = inspect(plan, "--json")
    assert result.exit_code == 0
    record = json.loads(result.stdout)
    assert (record["tensors"], record["layers"], record["types"]) == ([], [], {})
    assert "CUDA driver version is insufficient" in record["note"]


@pytest.mark.parametrize("name", ["model-fp16-96x160.rtx", "other.rtx"])
def test_damaged_and_unlisted_plans_are_not_loaded(
    engine_bundle: Path, tmp_path: Path, name: str
) -> None:
    copy = shutil.copytree(engine_bundle, tmp_path / "copy")
    plan = (copy / "model-fp16-96x160.rtx").rename(copy / name)
    with plan.open("ab") as file:
        file.write(b"\0")
    error = inspect(plan).exception
    assert isinstance(error, BundleError)
    assert name in str(error)


def test_damaged_plan_outside_a_bundle(tmp_path: Path) -> None:
    plan = tmp_path / "model.rtx"
    plan.write_bytes(b"not a plan")
    result = inspect(plan, "--json")
    assert result.output == ""
    assert isinstance(result.exception, EngineError)
    assert str(plan) in str(result.exception)


def test_tensorrt_without_a_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def runtime(_: object) -> None:
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr("tensorrt_rtx.Runtime", runtime)
    (plan := tmp_path / "model.rtx").write_bytes(b"plan")
    error = inspect(plan).exception
    assert isinstance(error, EngineError)
    assert str(plan) in str(error)


@pytest.mark.parametrize(
    ("name", "fact"),
    [("model-fp16-96x160.onnx", ".plan or .rtx"), ("manifest.json", ".plan or .rtx"),
     ("none.plan", "does not exist"), (".", "is a directory")],
)  # fmt: skip
def test_other_files_are_usage_errors(engine_bundle: Path, name: str, fact: str) -> None:
    result = inspect(engine_bundle / name)
    assert result.exit_code == 2
    assert fact in " ".join(result.output.split())


def test_plan_of_tensorrt_needs_tensorrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    (tmp_path / "model.plan").touch()
    error = inspect(tmp_path / "model.plan").exception
    assert isinstance(error, ModuleNotFoundError)
    assert error.name == "tensorrt"


LAYERS = [
    Layer("cast", "kgen", (LayerTensor("images", (-1, 3, 8, 8), "uint8"),), ()),
    Layer("c1", "correlation", (LayerTensor("x", (-1, 3, 8, 8), "fp16"),), ()),
    Layer("c2", "correlation", (LayerTensor("x", (-1, 8), "fp16"),), (LayerTensor("y", (), ""),)),
    Layer("nms", "gemm", (LayerTensor("x", (1, 100, 100), "fp32"),), ()),
]


def rows_of(table: Table) -> list[list[str]]:
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(table)
    lines = [line for line in capture.get().splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_tables() -> None:
    assert rows_of(engine_commands.table_of_types(LAYERS)) == [
        ["fp16", "2", "50%", "2", "0"],
        ["none", "1", "25%", "0", "0"],
        ["fp32", "1", "25%", "0", "1"],
    ]
    rows = rows_of(engine_commands.table_of_layers(LAYERS))
    assert rows[0] == ["0", "cast", "kgen", "uint8 Nx3x8x8", ""]
    assert rows[2] == ["2", "c2", "correlation", "fp16 Nx8", "? scalar"]
    tensors = [
        EngineTensor("images", True, "uint8", (-1, 3, 8), (((1, 3, 8), (4, 3, 8), (4, 3, 8)),)),
        EngineTensor("scores", False, "fp32", (-1, 20), ()),
    ]
    assert rows_of(engine_commands.table_of_tensors(tensors)) == [
        ["images", "input", "uint8", "Nx3x8", "1x3x8 4x3x8 4x3x8"],
        ["scores", "output", "fp32", "Nx20", ""],
    ]


def test_json_record(engine_bundle: Path) -> None:
    plan = engine_bundle / "model-fp16-96x160.rtx"
    artifact = engine_commands._artifact_of(plan)
    record = json.loads(json.dumps(engine_commands._record(plan, artifact, [], LAYERS)))
    assert record["bytes"] == plan.stat().st_size
    assert record["artifact"]["engine"]["compute_capabilities"] == ["12.0", "8.9"]
    assert record["note"] is None
    assert record["types"] == {"none": 1, "fp16": 2, "fp32": 1}
    assert record["layers"][1]["inputs"] == [{"name": "x", "shape": [-1, 3, 8, 8], "dtype": "fp16"}]
