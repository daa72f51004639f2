"""Fake of the module `tensorrt`. Its engines copy inputs to outputs on the GPU or fail on request.

For each image, each of the outputs `boxes`, `scores`, `labels` and `masks` is a copy of the image's
first bytes, copied through the scratch memory. `num_detections` is the image's height.
"""

import gc
import weakref
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from maskrcnn_trt.model.bundle.manifest import (
    Artifact,
    BatchProfile,
    Category,
    EngineBuild,
    Manifest,
    Preprocessing,
    Provenance,
    sha256_of,
)
from maskrcnn_trt.model.bundle.spec import ShapeBucket

# Input sizes of the fake engines. Both have the same number of pixels.
BUCKETS = (ShapeBucket(32, 32), ShapeBucket(16, 64))
PROFILES = (BatchProfile(min=1, opt=1, max=1), BatchProfile(min=2, opt=8, max=8))
SCRATCH = 64 << 20
_DETECTIONS, _SIDE = 3, 16
_OUTPUTS: dict[str, tuple[tuple[int, ...], Any]] = {
    "num_detections": ((), np.int64),
    "boxes": ((_DETECTIONS, 4), np.float32),
    "scores": ((_DETECTIONS,), np.float32),
    "labels": ((_DETECTIONS,), np.int64),
    "masks": ((_DETECTIONS, _SIDE, _SIDE), np.float32),
}


class FakeTensorRT(ModuleType):
    """Fake of the module `tensorrt`."""

    ILogger = object
    ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="user")

    def __init__(self) -> None:
        super().__init__("tensorrt")
        self.__version__ = "11.4.0"
        self.__spec__ = ModuleSpec("tensorrt", None)  # torch looks for it
        # Names of functions that fail. They log an error, and return None or False, or raise.
        # `capture`: `execute_async_v3` fails if its stream is being captured.
        self.faults: set[str] = set()
        self.scratch = SCRATCH
        # Engines and contexts that are still referenced.
        self.live: weakref.WeakSet[Any] = weakref.WeakSet()

    def Runtime(self, logger: Any) -> Any:  # noqa: N802
        self._logger = logger
        return SimpleNamespace(
            engine_host_code_allowed=False,
            deserialize_cuda_engine=lambda plan: self.made(
                "deserialize_cuda_engine", lambda: FakeEngine(self, eval(plan))
            ),
        )

    @staticmethod
    def nptype(kind: Any) -> Any:
        return kind

    def fails(self, function: str) -> bool:
        if function in self.faults:
            self._logger.log(SimpleNamespace(name="ERROR"), f"{function} broke")
        return function in self.faults

    def made(self, function: str, make: Any) -> Any:
        if self.fails(function):
            return None
        result = make()
        self.live.add(result)
        return result


class FakeEngine:
    """Fake of `ICudaEngine`, for one input size."""

    def __init__(self, trt: FakeTensorRT, bucket: tuple[int, int]) -> None:
        self.trt = trt
        inputs = {"images": ((3, *bucket), np.uint8), "image_sizes": ((2,), np.int64)}
        self.tensors = inputs | _OUTPUTS

    def create_execution_context(self, strategy: str) -> Any:
        return self.trt.made("create_execution_context", lambda: FakeContext(self))

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return self.trt.scratch

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1, *self.tensors[name][0])

    def get_tensor_dtype(self, name: str) -> Any:
        return self.tensors[name][1]


class FakeContext:
    """Fake of `IExecutionContext`."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._profile = 0
        self._addresses: dict[str, int] = {}
        self._scratch = self._batch = 0
        # Batch sizes of the queued and the captured computations, in order.
        self.computed: list[int] = []

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        if self._engine.trt.fails("set_optimization_profile_async"):
            raise RuntimeError("raised instead")
        self._profile = profile
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        profile = PROFILES[self._profile]
        self._batch = shape[0]
        return profile.min <= self._batch <= profile.max

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (self._batch, *self._engine.tensors[name][0])

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._addresses[name] = address
        return not self._engine.trt.fails("set_tensor_address")

    def set_device_memory(self, address: int, size: int) -> None:
        assert size >= SCRATCH
        self._scratch = address

    def execute_async_v3(self, stream: int) -> bool:
        trt = self._engine.trt
        (_, status) = driver.cuStreamIsCapturing(stream)
        captures = status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        if trt.fails("execute_async_v3") or (captures and trt.fails("capture")):
            return False
        self.computed.append(self._batch)
        at, size = self._addresses, _bytes_of("masks")
        _copy(self._scratch, at["images"], self._batch * size, stream)
        _copy(at["masks"], self._scratch, self._batch * size, stream)
        for row in range(self._batch):
            _copy(at["num_detections"] + 8 * row, at["image_sizes"] + 16 * row, 8, stream)
            for name in ("boxes", "scores", "labels"):
                copied = _bytes_of(name)
                _copy(at[name] + row * copied, self._scratch + row * size, copied, stream)
        return True


def expected_outputs(
    images: NDArray[np.uint8], image_sizes: NDArray[np.int64]
) -> dict[str, NDArray[Any]]:
    """Return the outputs of a fake engine by name, as bytes [B, N]."""
    flat = images.reshape(len(images), -1)
    heads = {name: flat[:, : _bytes_of(name)] for name in ("boxes", "scores", "labels", "masks")}
    return heads | {"num_detections": image_sizes[:, :1].copy().view(np.uint8)}


def fake_bundle(folder: Path) -> Manifest:
    """Write a fake plan for each of `BUCKETS` to a folder. Return a manifest that lists them."""
    build = EngineBuild(
        runtime_version="11.4.0",
        compute_capabilities=("9.0",),
        cuda_version="13",
        platform="linux-x86_64",
        plugins={},
        profiles=PROFILES,
    )
    artifacts = []
    for bucket in BUCKETS:
        path = folder / f"{bucket}.plan"
        path.write_text(repr(tuple(bucket)))
        artifacts.append(
            Artifact(
                path=path.name,
                sha256=sha256_of(path),
                kind="tensorrt",
                precision="fp16",
                input_dtype="uint8",
                bucket=bucket,
                engine=build,
            )
        )
    return Manifest(
        model_name="copies",
        categories=(Category(id=1, name="any"),),
        preprocessing=Preprocessing(
            min_size=16, max_size=64, pixel_mean=(0, 0, 0), pixel_std=(1, 1, 1)
        ),
        max_detections=_DETECTIONS,
        mask_side=_SIDE,
        artifacts=tuple(artifacts),
        provenance=Provenance(
            checkpoint="",
            checkpoint_sha256="",
            iteration=0,
            metrics={},
            exported_by="",
            exported_at="",
        ),
    )


def contexts_of(trt: FakeTensorRT) -> list[FakeContext]:
    """Return the contexts that are still referenced after a garbage collection."""
    gc.collect()
    return [made for made in trt.live if isinstance(made, FakeContext)]


def _bytes_of(name: str) -> int:
    shape, dtype = _OUTPUTS[name]
    return int(np.prod(shape)) * np.dtype(dtype).itemsize


def _copy(to: int, source: int, size: int, stream: int) -> None:
    (status,) = driver.cuMemcpyDtoDAsync(to, source, size, stream)
    assert status == driver.CUresult.CUDA_SUCCESS
