import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tensorrt_stubs import load_tensorrt, missing_names

import maskrcnn_trt.serving.backends
from maskrcnn_trt.serving.backends.plans import PlanRuntime
from maskrcnn_trt.serving.backends.runtime_cache import cache_path
from maskrcnn_trt.serving.errors import BackendError

FOLDER = Path(maskrcnn_trt.serving.backends.__path__[0])

CLASSES = {
    "plans.py": {
        "_loader": "Runtime",
        "engine": "ICudaEngine",
        "_engine": "ICudaEngine",
        "context": "IExecutionContext",
        "config": "IRuntimeConfig",
    },
    "runtime_cache.py": {
        "engine": "ICudaEngine",
        "config": "IRuntimeConfig",
        "_cache": "IRuntimeCache",
    },
}
"""What variables and attributes of these names are, by file."""


def missing_members(path: Path, module: ModuleType) -> list[str]:
    """Members such as `context.execute_async_v3` that their class in the module does not have."""
    classes = CLASSES[path.name]
    missing = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if owner in classes and not hasattr(getattr(module, classes[owner]), node.attr):
                missing.append(f"{classes[owner]}.{node.attr}")
    return missing


def test_every_name_is_tensorrts() -> None:
    trt = load_tensorrt()
    assert missing_names(FOLDER / "plans.py", "trt", trt) == []
    assert missing_members(FOLDER / "plans.py", trt) == []


def test_every_name_is_tensorrt_rtxs() -> None:
    trt = importlib.import_module("tensorrt_rtx")
    assert missing_names(FOLDER / "plans.py", "trt", trt) == []
    assert [m for file in CLASSES for m in missing_members(FOLDER / file, trt)] == []


def test_missing_member_is_found(tmp_path: Path) -> None:
    path = tmp_path / "plans.py"
    path.write_text("context.execute_async_v2(0)\nself._engine.get_tensor_name(1)\n")
    trt = importlib.import_module("tensorrt_rtx")
    assert missing_members(path, trt) == ["IExecutionContext.execute_async_v2"]


@pytest.fixture(scope="module")
def rtx_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real plan that returns what it is given."""
    trt = importlib.import_module("tensorrt_rtx")
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    given = network.add_input("given", trt.float32, (4,))
    network.mark_output(network.add_identity(given).get_output(0))
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    path = tmp_path_factory.mktemp("plans") / "tiny.rtx"
    path.write_bytes(builder.build_serialized_network(network, config))
    return path


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_plan_without_a_gpu_is_told(rtx_plan: Path) -> None:
    with pytest.raises(BackendError, match=r"TensorRT-RTX 1\..* does not load .*tiny.rtx \(.*CUDA"):
        PlanRuntime("tensorrt-rtx").engine_from(rtx_plan)


@pytest.mark.parametrize("length", [0, 10, 1000])
def test_damaged_plan_is_told(rtx_plan: Path, tmp_path: Path, length: int) -> None:
    path = tmp_path / "damaged.rtx"
    path.write_bytes(rtx_plan.read_bytes()[:length])
    runtime = PlanRuntime("tensorrt-rtx")
    for _ in range(2):
        with pytest.raises(BackendError, match=r"damaged.rtx \(.*\); export the bundle again on"):
            runtime.engine_from(path)


def test_cache_is_the_users_and_the_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache_path(["a", "b"])
    assert path.is_relative_to(tmp_path)
    assert cache_path(["a", "b"]) == path
    assert cache_path(["a", "c"]) != path
