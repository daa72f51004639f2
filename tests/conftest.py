"""Fixtures shared by several folders: a tiny model with random weights, and its bundles."""

import asyncio
import gc
import importlib
import inspect
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shared_exports import cached_exports, folder_of_run, made_once

import maskrcnn_trt  # noqa: F401, before onnxruntime, to disable its telemetry

# Garbage is collected less often, for speed. The default is 700.
gc.set_threshold(50_000)

# Fixtures that export a bundle, which takes ten seconds or more.
BUNDLES = frozenset(
    {"bundle", "torch_bundle", "half_bundle", "quantized", "reused_exports", "precise_bundle"}
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that need an exported bundle, and start the slowest test files first.

    Files are sorted by their number of slow tests, then by their number of tests, in descending
    order. If a long file started last, one worker would still run it after the others are done.
    """
    slow: Counter[Path] = Counter()
    tests = Counter(item.path for item in items)
    for item in items:
        if not BUNDLES.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("bundle")
        slow[item.path] += item.get_closest_marker("slow") is not None
    items.sort(key=lambda item: (-slow[item.path], -tests[item.path]))


def pytest_collection_finish() -> None:
    """Exempt the imported modules from garbage collection, for speed."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests on machines without a GPU."""
    if item.get_closest_marker("gpu") and not importlib.import_module("torch").cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(autouse=True, scope="session")
def no_disk_flushes() -> Iterator[None]:
    """Let `os.fsync` do nothing: no file of a test has to survive a power loss."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests that are coroutines."""
    # anyio's plugin for coroutines is not used. With it, tests fail if threads of gRPC send
    # messages to closed event loops.
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that all pytest-xdist workers of this run share. Tests must not change its files."""
    return folder_of_run(tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_checkpoint(shared_folder: Path) -> Path:
    """Checkpoint of a small model of three classes that detects objects in any image."""
    torch = pytest.importorskip("torch")
    from maskrcnn_trt.model.bundle.manifest import Category, Preprocessing
    from maskrcnn_trt.model.bundle.spec import ShapeBucket
    from maskrcnn_trt.model.checkpoint import Checkpoint, save_checkpoint
    from maskrcnn_trt.model.config.schema import (
        AnchorConfig,
        BackboneConfig,
        ModelConfig,
        RoiConfig,
        RpnConfig,
    )
    from maskrcnn_trt.model.mask_rcnn import MaskRCNN

    torch.manual_seed(0)
    config = ModelConfig(
        num_classes=3,
        backbone=BackboneConfig(name="resnet10", norm="bn", frozen_stages=0, fpn_channels=32),
        anchors=AnchorConfig(sizes=(16, 32, 64, 128, 256)),
        rpn=RpnConfig(pre_nms_top_n_test=100, post_nms_top_n_test=50),
        roi=RoiConfig(
            box_head_dim=64,
            mask_head_dim=32,
            mask_head_depth=2,
            max_detections=20,
            nms_candidates=200,
            score_threshold=0.2,
        ),
    )
    checkpoint = Checkpoint(
        model_config=config,
        weights=MaskRCNN(config).state_dict(),
        categories=tuple(Category(id=i, name=n) for i, n in ((3, "disc"), (7, "box"), (8, "ring"))),
        preprocessing=Preprocessing(
            min_size=96, max_size=160, pixel_mean=config.pixel_mean, pixel_std=config.pixel_std
        ),
        buckets=(ShapeBucket(96, 160), ShapeBucket(160, 96)),
        iteration=0,
    )
    return made_once(shared_folder / "tiny.pth", lambda path: save_checkpoint(path, checkpoint))


@pytest.fixture(scope="session")
def bundle(tiny_checkpoint: Path, shared_folder: Path) -> Path:
    """The tiny model exported as fp32 for inputs of 96x160 and 160x96."""
    return exported(tiny_checkpoint, shared_folder / "bundle", precisions=("fp32",))


@pytest.fixture(scope="session")
def torch_bundle(tiny_checkpoint: Path, shared_folder: Path) -> Path:
    """The tiny model as ONNX and as torch programs, in fp32 for inputs of 96x160 and 160x96."""
    path = shared_folder / "torch-bundle"
    return exported(tiny_checkpoint, path, precisions=("fp32",), with_programs=True)


@pytest.fixture(scope="session")
def half_bundle(tiny_checkpoint: Path, shared_folder: Path) -> Path:
    """The tiny model exported as fp16 for inputs of 96x160."""
    from maskrcnn_trt.model.bundle.spec import ShapeBucket

    path = shared_folder / "half-bundle"
    return exported(tiny_checkpoint, path, precisions=("fp16",), buckets=(ShapeBucket(96, 160),))


@pytest.fixture
def reused_exports(shared_folder: Path) -> Iterator[None]:
    """Export each model only once per test run: exports in the test reuse the stored files."""
    with cached_exports(shared_folder):
        yield


def exported(checkpoint: Path, path: Path, **options: Any) -> Path:
    """Return the bundle at `path` in the shared folder. If it does not exist, export it."""
    from maskrcnn_trt.export.bundle import bundle_from_checkpoint

    with cached_exports(path.parent):
        return made_once(path, lambda path: bundle_from_checkpoint(checkpoint, path, **options))
