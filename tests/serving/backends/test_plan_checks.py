import importlib
from typing import Any

import pytest

from maskrcnn_trt.model.bundle.manifest import Artifact, BatchProfile, EngineBuild, EngineKind
from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.serving.backends.plan_checks import (
    RTX_MAJORS,
    PlanTarget,
    check_memory,
    check_plans,
    gpu_warning,
    remedy_from_reason,
)
from maskrcnn_trt.serving.errors import BackendError

H100 = PlanTarget("11.4.0.106", "9.0", "linux-x86_64", 80 << 30, "NVIDIA H100 80GB HBM3", 13000)
RTX_4090 = PlanTarget(
    "1.7.1.116", "8.9", "linux-x86_64", 24 << 30, "NVIDIA GeForce RTX 4090", 13000
)


def plan(kind: EngineKind = "tensorrt", **build: Any) -> Artifact:
    facts = {
        "runtime_version": "11.4.0.106" if kind == "tensorrt" else "1.7.1.116",
        "compute_capabilities": ("9.0",) if kind == "tensorrt" else ("8.6", "8.9"),
        "cuda_version": "13",
        "platform": "linux-x86_64",
        "plugins": {},
        "profiles": (BatchProfile(min=1, opt=1, max=1), BatchProfile(min=2, opt=8, max=8)),
    }
    return Artifact(
        path="model.plan",
        sha256="0" * 64,
        kind=kind,
        precision="fp16",
        input_dtype="uint8",
        bucket=ShapeBucket(800, 1344),
        engine=EngineBuild(**facts | build),  # type: ignore[arg-type]
    )


def test_matching_plans_pass() -> None:
    check_plans("tensorrt", [plan(), plan()], H100, 10**9)
    check_plans("tensorrt-rtx", [plan("tensorrt-rtx")], RTX_4090, 10**9)


@pytest.mark.parametrize(
    ("build", "machine", "fits"),
    [
        ({"version_compatible": True, "runtime_version": "10.16.1"}, {}, True),
        ({"version_compatible": True, "runtime_version": "11.5.0"}, {}, False),
        ({"hardware_compatibility": "ampere-plus"}, {"compute_capability": "8.6"}, True),
        ({"hardware_compatibility": "ampere-plus"}, {"compute_capability": "7.5"}, False),
        ({"hardware_compatibility": "same-compute-capability"}, {"gpu_name": "NVIDIA H200"}, True),
        ({"ptx_version": "9.0", "ptx_cuda_version": 13000}, {}, True),
        ({"ptx_version": "9.1", "ptx_cuda_version": 13010}, {"cuda_version": 13010}, True),
    ],
)
def test_compatible_plans(build: dict[str, Any], machine: dict[str, Any], fits: bool) -> None:
    def check() -> None:
        check_plans("tensorrt", [plan(**build)], H100._replace(**machine), 0)

    if fits:
        check()
    else:
        with pytest.raises(BackendError, match="maskrcnn export"):
            check()


def test_ptx_that_is_too_new_for_the_driver() -> None:
    built = plan(ptx_version="9.1", ptx_cuda_version=13010)
    with pytest.raises(BackendError) as caught:
        check_plans("tensorrt", [built], H100, 0)
    for part in ("PTX 9.1", "driver for CUDA 13.1", "CUDA 13.0", '"nvidia-cuda-nvrtc<13.1"'):
        assert part in str(caught.value)


def test_plan_without_weights() -> None:
    with pytest.raises(BackendError, match="maskrcnn engine refit"):
        check_plans("tensorrt", [plan(stripped=True)], H100, 0)


def test_plan_of_another_gpu_is_reported() -> None:
    built = plan(gpu_name=H100.gpu_name)
    assert not gpu_warning(built, H100.gpu_name)
    assert not gpu_warning(plan(), H100.gpu_name)
    assert all(name in gpu_warning(built, "NVIDIA H200") for name in (H100.gpu_name, "NVIDIA H200"))


COMMAND = "`maskrcnn export CHECKPOINT -o BUNDLE --engine tensorrt --precision fp16 --batch 1 8`"
OLD_TENSORRT = {"runtime_version": "11.2.0.5"}


@pytest.mark.parametrize(
    ("build", "built", "here"),
    [
        (OLD_TENSORRT, "model.plan was built with TensorRT 11.2.0.5", "TensorRT 11.4.0.106"),
        (
            {"compute_capabilities": ("8.0", "8.6")},
            "for compute capability 8.0, 8.6",
            "compute capability 9.0; ",
        ),
        ({"platform": "windows-amd64"}, "was built on windows-amd64", "linux-x86_64; "),
        (
            OLD_TENSORRT | {"compute_capabilities": ("8.0",)},
            "with TensorRT 11.2.0.5 for compute capability 8.0",
            "TensorRT 11.4.0.106, compute capability 9.0; build",
        ),
    ],
)
def test_mismatches_name_both_sides_and_the_command(
    build: dict[str, Any], built: str, here: str
) -> None:
    with pytest.raises(BackendError) as caught:
        check_plans("tensorrt", [plan(), plan(**build)], H100, 0)
    assert all(part in str(caught.value) for part in (built, here, COMMAND))


@pytest.mark.parametrize("capability", ["9.0", "10.0"])
def test_unsupported_gpus_of_tensorrt_rtx(capability: str) -> None:
    built = plan("tensorrt-rtx", compute_capabilities=(capability,))
    with pytest.raises(BackendError, match=f"does not run on compute capability {capability}.*use"):
        check_plans("tensorrt-rtx", [built], RTX_4090._replace(compute_capability=capability), 0)


def test_rtx_majors_are_those_of_its_builder() -> None:
    trt = importlib.import_module("tensorrt_rtx")
    names = [n for n in trt.ComputeCapability.__members__ if n.startswith("SM")]
    assert {name[2:-1] for name in names} == set(RTX_MAJORS)


def test_plans_larger_than_the_free_memory() -> None:
    check_memory(100 << 20, 100 << 20)
    with pytest.raises(BackendError, match=r"need 300 MiB .* only 200 MiB are free; .*--max-batch"):
        check_plans("tensorrt", [plan()], H100._replace(free_memory=200 << 20), 300 << 20)


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("Error Code 2: OutOfMemory (Requested size was 2147483648 bytes.)", "lower --max-batch"),
        ("[defaultAllocator.cpp::allocate::58] Cuda Runtime (out of memory)", "lower --max-batch"),
        ("Cannot find plugin: NmsKeep, version: 1, namespace: maskrcnn", "embeds the plugins"),
        ("getPluginCreator could not find plugin: NmsKeep version: 1", "embeds the plugins"),
        ("Serialization assertion plan.header.size == blobSize failed.", None),
    ],
)
def test_remedy_from_the_message_of_tensorrt(reason: str, remedy: str | None) -> None:
    actual = remedy_from_reason(reason)
    assert actual is None if remedy is None else actual is not None and remedy in actual
