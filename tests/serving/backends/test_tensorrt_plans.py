import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tensorrt_stubs import load_tensorrt, missing_names

import maskrcnn_trt.serving.backends
from maskrcnn_trt.model.bundle.manifest import BatchProfile
from maskrcnn_trt.serving.backends.tensorrt_plans import PlanRuntime, batch_profiles, cache_path
from maskrcnn_trt.serving.errors import BackendError

FOLDER = Path(maskrcnn_trt.serving.backends.__path__[0])

# Class in TensorRT of each variable and attribute in tensorrt_plans.py.
CLASSES = {
    "_loader": "Runtime",
    "engine": "ICudaEngine",
    "_engine": "ICudaEngine",
    "context": "IExecutionContext",
    "config": "IRuntimeConfig",
    "_cache": "IRuntimeCache",
}


def missing_members(path: Path, module: ModuleType, skip: str | None = None) -> list[str]:
    """Return members in a file, such as `context.execute_async_v3`, that their class lacks.

    Args:
        path: The file.
        module: Module of TensorRT.
        skip: Class in the file that is not checked.
    """
    missing = []
    body = ast.parse(path.read_text()).body
    checked = [node for node in body if not (isinstance(node, ast.ClassDef) and node.name == skip)]
    for node in ast.walk(ast.Module(checked, [])):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if owner in CLASSES and not hasattr(getattr(module, CLASSES[owner]), node.attr):
                missing.append(f"{CLASSES[owner]}.{node.attr}")
    return missing


def test_all_names_exist_in_tensorrt_and_in_tensorrt_rtx() -> None:
    for trt, skip in (
        (load_tensorrt(), "RuntimeCache"),
        (importlib.import_module("tensorrt_rtx"), None),
    ):
        assert missing_names(FOLDER / "tensorrt_plans.py", "trt", trt) == []
        assert missing_members(FOLDER / "tensorrt_plans.py", trt, skip) == []


def test_fake_engines_have_the_members_of_real_ones() -> None:
    pytest.importorskip("cuda.bindings.driver", exc_type=ImportError)
    from fake_tensorrt import FakeContext, FakeEngine

    trt = load_tensorrt()
    for fake, real in ((FakeEngine, trt.ICudaEngine), (FakeContext, trt.IExecutionContext)):
        members = [name for name in vars(fake) if not name.startswith("_")]
        assert len(members) > 3
        assert [name for name in members if not hasattr(real, name)] == []


def test_missing_members_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "tensorrt_plans.py"
    path.write_text("context.execute_async_v2(0)\nself._engine.get_tensor_name(1)\n")
    trt = importlib.import_module("tensorrt_rtx")
    assert missing_members(path, trt) == ["IExecutionContext.execute_async_v2"]


@pytest.fixture(scope="module")
def rtx_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plan that returns its input."""
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests a machine without a GPU")
def test_plan_without_a_gpu(rtx_plan: Path) -> None:
    with pytest.raises(BackendError, match=r"TensorRT-RTX 1\..* cannot load .*tiny.rtx \(.*CUDA"):
        PlanRuntime("tensorrt-rtx").engine_from(rtx_plan)


@pytest.mark.parametrize("length", [0, 10, 1000])
def test_damaged_plan(rtx_plan: Path, tmp_path: Path, length: int) -> None:
    path = tmp_path / "damaged.rtx"
    path.write_bytes(rtx_plan.read_bytes()[:length])
    runtime = PlanRuntime("tensorrt-rtx")
    for _ in range(2):
        with pytest.raises(BackendError, match=r"damaged.rtx \(.*\); export the bundle again on"):
            runtime.engine_from(path)


def test_failures_of_the_runtime_become_errors() -> None:
    """Some functions of the bindings return None or False if they fail, and some raise."""
    runtime = PlanRuntime("tensorrt-rtx")

    def raise_error() -> bool:
        raise RuntimeError("Error in set optimization profile async.")

    assert runtime.checked(lambda: True, "set it", "export again")
    for call, reason in (
        (lambda: False, "no error was logged"),
        (lambda: None, "no error was logged"),
        (raise_error, "optimization profile async"),
    ):
        with pytest.raises(BackendError, match=rf"cannot set it \(.*{reason}.*\); export again"):
            runtime.checked(call, "set it", "export again")


def test_cache_path_depends_on_user_and_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache_path(["a", "b"])
    assert path.is_relative_to(tmp_path)
    assert cache_path(["a", "b"]) == path
    assert cache_path(["a", "c"]) != path


def profiles(*sizes: tuple[int, int, int]) -> tuple[BatchProfile, ...]:
    return tuple(BatchProfile(min=low, opt=opt, max=high) for low, opt, high in sizes)


@pytest.mark.parametrize(
    ("built", "max_batch", "sizes"),
    [
        (profiles((1, 1, 1), (2, 8, 8)), 8, {1: 0, 2: 1, 4: 1, 8: 1}),
        (profiles((1, 1, 1), (2, 8, 8)), 6, {1: 0, 2: 1, 4: 1, 6: 1}),
        (profiles((1, 1, 1), (2, 8, 8)), 1, {1: 0}),
        (profiles((1, 16, 16), (1, 4, 4)), 16, {1: 1, 2: 1, 4: 1, 8: 0, 16: 0}),
        # A profile without padding is preferred to a smaller one with padding.
        (profiles((4, 4, 4), (1, 8, 8)), 4, {1: 1, 2: 1, 4: 0}),
        (profiles((8, 8, 8)), 3, {8: 0}),
        (profiles((2, 2, 2), (5, 8, 8)), 8, {2: 0, 5: 1, 8: 1}),
    ],
)
def test_each_batch_size_gets_the_smallest_profile(
    built: tuple[BatchProfile, ...], max_batch: int, sizes: dict[int, int]
) -> None:
    assert batch_profiles(built, max_batch) == sizes
    assert list(sizes) == sorted(sizes)


def test_batch_sizes_lie_within_their_profile() -> None:
    built = profiles((1, 1, 2), (3, 4, 7), (6, 12, 20))
    for max_batch in range(1, 21):
        sizes = batch_profiles(built, max_batch)
        assert max(sizes) >= max_batch
        for size, index in sizes.items():
            assert built[index].min <= size <= built[index].max


def test_batch_beyond_every_profile() -> None:
    with pytest.raises(
        BackendError, match=r"max-batch is 9, .* 8; lower --max-batch to 8, .*`--batch 9`"
    ):
        batch_profiles(profiles((1, 1, 1), (2, 8, 8)), 9)
