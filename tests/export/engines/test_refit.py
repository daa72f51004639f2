"""Weights for stripped engines, with a TensorRT that appends the ONNX model to the plan."""

import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnx
import pytest
from click.testing import CliRunner

from maskrcnn_trt.export.engines.commands import engine
from maskrcnn_trt.export.errors import EngineError
from maskrcnn_trt.model.bundle.manifest import (
    BatchProfile,
    BundleError,
    EngineBuild,
    read_manifest,
    sha256_of,
    verified_path,
    write_manifest,
)
from maskrcnn_trt.model.bundle.spec import ShapeBucket


class FakeTensorRT(ModuleType):
    """Module `tensorrt`. `accepts`: whether refitting works."""

    ILogger, __version__, accepts = object, "11.4.0", True

    def Runtime(self, logger: Any) -> Any:  # noqa: N802
        return SimpleNamespace(
            deserialize_cuda_engine=lambda plan: SimpleNamespace(
                plan=plan, model=b"", serialize=lambda: plan + b"|complete"
            )
        )

    def Refitter(self, engine: Any, logger: Any) -> Any:  # noqa: N802
        return SimpleNamespace(
            engine=engine,
            refit_cuda_engine=lambda: self.accepts,
            get_missing_weights=lambda: ["conv.weight"],
        )

    def OnnxParserRefitter(self, refitter: Any, logger: Any) -> Any:  # noqa: N802
        def refit(model: bytes) -> bool:
            self.model = onnx.load_from_string(model)
            return True

        return SimpleNamespace(refit_from_bytes=refit)


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    module = FakeTensorRT("tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    return module


@pytest.fixture
def stripped(half_bundle: Path, tmp_path: Path) -> Path:
    """Copy of a bundle with a stripped engine."""
    folder = shutil.copytree(half_bundle, tmp_path / "bundle")
    manifest = read_manifest(folder)
    (graph,) = manifest.artifacts
    plan = folder / "model.plan"
    plan.write_bytes(b"plan")
    build = EngineBuild(
        runtime_version="11.4.0", compute_capabilities=("9.0",), cuda_version="13",
        platform="linux-x86_64", plugins={"maskrcnn::NmsKeep": "1"}, stripped=True,
        profiles=(BatchProfile(min=1, opt=1, max=1),),
    )  # fmt: skip
    facts = {"path": plan.name, "sha256": sha256_of(plan), "kind": "tensorrt", "engine": build}
    both = (graph, graph.model_copy(update=facts))
    write_manifest(folder, manifest.model_copy(update={"artifacts": both}))
    return folder


def test_plans_are_replaced(trt: FakeTensorRT, stripped: Path) -> None:
    result = CliRunner().invoke(engine, ["refit", str(stripped)], catch_exceptions=False)
    assert "model.plan" in result.output
    _, artifact = read_manifest(stripped).artifacts
    assert verified_path(stripped, artifact).read_bytes() == b"plan|complete"
    assert artifact.engine is not None
    assert not artifact.engine.stripped
    # The model is that of the plugins, as in the build.
    assert not trt.model.functions
    assert len(trt.model.graph.initializer) > 10
    second = CliRunner().invoke(engine, ["refit", str(stripped)])
    assert second.exit_code == 0
    assert f"{stripped} has no engine with missing weights" in second.output


def test_failure_leaves_the_bundle_as_it_is(trt: FakeTensorRT, stripped: Path) -> None:
    trt.accepts = False
    result = CliRunner().invoke(engine, ["refit", str(stripped)])
    assert isinstance(result.exception, EngineError)
    assert "conv.weight" in str(result.exception)
    (_, artifact) = read_manifest(stripped).artifacts
    assert verified_path(stripped, artifact).read_bytes() == b"plan"


def test_engines_whose_onnx_file_is_missing_are_named(trt: FakeTensorRT, stripped: Path) -> None:
    manifest = read_manifest(stripped)
    graph, plan = manifest.artifacts
    turned = plan.model_copy(update={"bucket": ShapeBucket(plan.bucket.width, plan.bucket.height)})
    write_manifest(stripped, manifest.model_copy(update={"artifacts": (graph, turned)}))
    result = CliRunner().invoke(engine, ["refit", str(stripped)])
    assert isinstance(result.exception, BundleError)
    assert "model.plan" in str(result.exception)
