"""Options of TensorRT's builder, run with TensorRT-RTX, whose library has the same objects."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from maskrcnn_trt import __version__
from maskrcnn_trt.export.engines.build import builder_for, builders_from_options
from maskrcnn_trt.export.engines.build_log import BuildLog
from maskrcnn_trt.export.engines.options import EngineOptions
from maskrcnn_trt.export.errors import EngineError
from maskrcnn_trt.model.bundle.manifest import EngineKind
from maskrcnn_trt.plugins.tensorrt.plugins import _signed, kernels_digest

trt = pytest.importorskip("tensorrt_rtx", reason="needs the wheel tensorrt-rtx")


@pytest.fixture
def as_tensorrt(monkeypatch: pytest.MonkeyPatch) -> dict[int, threading.Thread]:
    """Import TensorRT-RTX as TensorRT, with two GPUs; return the threads that select a GPU."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    threads: dict[int, threading.Thread] = {}

    @contextlib.contextmanager
    def select(gpu: int) -> Iterator[None]:
        threads[gpu] = threading.current_thread()
        yield

    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", select)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: "NVIDIA L40S, 48 GB")
    return threads


@pytest.mark.filterwarnings("ignore:.*Timing cache operations are no-ops:DeprecationWarning")
@pytest.mark.parametrize("older", [None, b"damaged"])
def test_timing_cache_is_written(
    convolution: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    as_tensorrt: dict[int, threading.Thread],
    older: bytes | None,
) -> None:
    """The build works up to the point where it loads the engine.

    This shows that the builder accepts the options, not their effect.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = f"NVIDIA-L40S-48-GB-{trt.__version__}-{__version__}-{kernels_digest(89)}.cache"
    cache = tmp_path / "maskrcnn-trt" / "timing" / name
    if older is not None:
        cache.parent.mkdir(parents=True)
        cache.write_bytes(older)
    options = EngineOptions(
        batches=(1,), plugins=False, optimization_level=1, tiling="fast", aux_streams=0
    )
    builder = builder_for("tensorrt", options, BuildLog(tmp_path / "build.log"))
    with pytest.raises(EngineError, match="cannot load the engine"):
        builder.build(convolution, tmp_path / "x.plan", "fp32")
    assert len(cache.read_bytes()) > 100
    # The build ran in another thread, on the GPU that was selected in this one.
    assert as_tensorrt[1] is not threading.current_thread()
    assert not (tmp_path / "x.plan").exists()


@pytest.mark.usefixtures("as_tensorrt")
def test_options_of_portable_and_stripped_plans_are_set(tmp_path: Path) -> None:
    """TensorRT-RTX has the same configuration object, but it ignores hardware compatibility."""
    choices: dict[str, Any] = {
        "hardware_compatibility": "ampere-plus",
        "version_compatible": True,
        "strip_weights": True,
    }
    flags = trt.BuilderFlag.VERSION_COMPATIBLE, trt.BuilderFlag.STRIP_PLAN
    # A configuration is valid while its builder and their logger exist.
    logger = trt.Logger(trt.Logger.ERROR)
    maker = trt.Builder(logger)
    for options, is_set in ((EngineOptions(), False), (EngineOptions(**choices), True)):
        builder = builder_for("tensorrt", options, BuildLog(tmp_path / "build.log"))
        config = maker.create_builder_config()
        builder._set_options(config)
        assert [config.get_flag(flag) for flag in flags] == [is_set, is_set]
        # Kernels of plugins must run on the oldest GPU, too.
        assert builder._architecture == (80 if is_set else 89)


@pytest.mark.usefixtures("as_tensorrt")
def test_errors_of_plugins_are_reported(tmp_path: Path) -> None:
    """TensorRT prints them, and then fails without a reason."""

    def describe() -> None:
        raise ValueError("spatial_scales must have one value per feature map: 4, not 2")

    with pytest.raises(ValueError, match="spatial_scales"):
        _signed(describe, {}, None)()
    builder = builder_for("tensorrt", EngineOptions(), BuildLog(tmp_path / "build.log"))
    assert "cannot build x.plan: spatial_scales must have" in builder._builder_error("x.plan")
    message = builder._builder_error("x.plan")
    assert f"it gives no reason; the build log is {tmp_path}" in message


@pytest.mark.usefixtures("as_tensorrt")
def test_only_plans_with_plugins_for_triton_have_a_profile_per_batch_size(tmp_path: Path) -> None:
    def profiles(*kinds: EngineKind, **choices: Any) -> list[list[tuple[int, int]]]:
        builders = builders_from_options(
            tmp_path / "b", kinds, for_triton=True, batches=(1, 3), **choices
        )
        return [[(p.min, p.max) for p in builder._profiles] for builder in builders]

    each, ranges = [(1, 1), (2, 2), (3, 3)], [(1, 1), (2, 3)]
    assert profiles("tensorrt", "tensorrt-rtx") == [each, ranges]
    assert profiles("tensorrt", plugins=False) == [ranges]
    with pytest.raises(click.UsageError, match="--strip-weights"):
        profiles("tensorrt", strip_weights=True)
