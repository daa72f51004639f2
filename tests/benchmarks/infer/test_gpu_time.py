"""GPU time by stage of constructed and of real kernels; matmul rate and operations of a model."""

import pytest
import torch

from maskrcnn_trt.benchmarks.infer.gpu_time import (
    IDLE,
    STAGES,
    GpuActivity,
    KernelTotal,
    MatmulRoofline,
    communication_milliseconds,
    costliest_kernels,
    flops_per_image,
    matmul_teraflops,
    mean_milliseconds_by_stage,
    measure_matmul_rooflines,
    milliseconds_by_stage,
    profile_gpu,
)
from maskrcnn_trt.model.bundle.manifest import Precision
from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.model.config.schema import ModelConfig, RoiConfig

BATCH = [
    GpuActivity("convolve", 0, 1000),
    GpuActivity("prune_top_k", 1000, 10),
    GpuActivity("sort_top_k", 1010, 20),
    GpuActivity("nms_keep", 1040, 30),  # 10 idle before it
    GpuActivity("sort_top_k", 1070, 5),
    GpuActivity("pyramid_roi_align", 1075, 100),
    GpuActivity("multiply", 1175, 200),
    GpuActivity("sort_top_k", 1375, 7),
    GpuActivity("nms_keep", 1382, 8),
    GpuActivity("void pyramid_roi_align<half>", 1400, 50),  # 10 idle before it
    GpuActivity("convolve", 1450, 150),
]


def test_stages_start_with_their_kernel_and_sum_up():
    times = milliseconds_by_stage(BATCH)
    assert tuple(times) == (*STAGES, IDLE)
    assert list(times.values()) == pytest.approx([1.0, 0.065, 0.3, 0.015, 0.2, 0.02])
    assert sum(times.values()) == pytest.approx(1.6)


def test_overlap_counts_once_and_missing_stages_take_no_time():
    overlapping = [GpuActivity("a", 5, 10), GpuActivity("b", 7, 3), GpuActivity("c", 12, 8)]
    times = milliseconds_by_stage(overlapping)
    assert times == pytest.approx(dict.fromkeys((*STAGES, IDLE), 0) | {"trunk": 0.015})
    activities = [GpuActivity("convolve", 0, 10), GpuActivity("sort_top_k", 10, 5)]
    times = milliseconds_by_stage(activities)
    assert times == dict.fromkeys(times, 0) | {"trunk": 0.01, "proposals": 0.005}


def test_mean_excludes_time_between_batches():
    slower = [GpuActivity(k.name, 3000 + 2 * k.start, 2 * k.duration) for k in BATCH]
    times = mean_milliseconds_by_stage([*BATCH, *slower], 2)
    once = milliseconds_by_stage(BATCH)
    assert times == pytest.approx({stage: 1.5 * once[stage] for stage in once})


@pytest.mark.parametrize(("kernels", "batches"), [(BATCH, 2), ([], 3)])
def test_unequal_batches_are_an_error(kernels: list[GpuActivity], batches: int):
    with pytest.raises(ValueError, match=f"{len(kernels)} GPU kernels.* {batches} "):
        mean_milliseconds_by_stage(kernels, batches)


def test_costliest_kernels_come_first():
    assert costliest_kernels([*BATCH, *BATCH], 2, 3) == [
        KernelTotal("convolve", 2, 1.15),
        KernelTotal("multiply", 1, 0.2),
        KernelTotal("pyramid_roi_align", 1, 0.1),
    ]


@pytest.mark.gpu
def test_profile_of_a_gpu():
    matrix = torch.randn(512, 512, device="cuda")

    def call() -> None:
        (matrix @ matrix).relu_()
        torch.cuda.synchronize()

    call()
    kernels = profile_gpu(call, 4)
    names = [kernel.name for kernel in kernels]
    assert len(names) >= 8  # a product may take several
    assert names == names[: len(names) // 4] * 4
    assert all(kernel.duration > 0 for kernel in kernels)
    assert [k.start for k in kernels] == sorted(k.start for k in kernels)
    assert sum(mean_milliseconds_by_stage(kernels, 4).values()) > 0


def test_operations_grow_with_detections():
    """Per detection: four 3x3 convolutions at 14x14, a deconvolution, and one class of a 1x1."""
    few, many = (
        flops_per_image(ModelConfig(roi=RoiConfig(max_detections=count)), ShapeBucket(96, 96))
        for count in (10, 60)
    )
    convolutions = 4 * 14**2 * 9 * 256 * 256 + 28**2 * 256 * 256 + 28**2 * 256
    assert many - few == 50 * 2 * convolutions


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_matmul_rate_is_measured(precision: Precision):
    before = torch.backends.cuda.matmul.allow_tf32
    assert matmul_teraflops(precision, 64, "cpu", seconds=0.01) > 0
    assert torch.backends.cuda.matmul.allow_tf32 == (precision == "tf32")
    torch.backends.cuda.matmul.allow_tf32 = before


def test_roofline_is_rate_divided_by_operations():
    """The operations were counted by hand: 267 GMAC, with 1000 proposals and 100 detections."""
    flops = flops_per_image(ModelConfig(), ShapeBucket(800, 1344))
    assert flops == pytest.approx(2 * 267e9, rel=0.01)
    roofline = MatmulRoofline("fp16", teraflops_per_second=800.0, flops_per_image=500_000_000_000)
    assert roofline.images_per_second == pytest.approx(1600)


@pytest.mark.gpu
def test_rooflines_of_a_gpu():
    floors = list(measure_matmul_rooflines(["fp16", "fp32"], ModelConfig(), ShapeBucket(96, 96)))
    assert [floor.precision for floor in floors] == ["fp16", "fp32"]
    assert floors[0].images_per_second > floors[1].images_per_second > 0


def test_communication_beside_other_kernels_is_not_exposed():
    activities = [
        GpuActivity("gemm", start=0, duration=2000),
        GpuActivity("ncclDevKernel_AllReduce", start=1000, duration=4000),
        GpuActivity("ncclDevKernel_AllReduce", start=2000, duration=1000),
        GpuActivity("adam", start=4000, duration=500),
        GpuActivity("adam", start=9000, duration=500),
    ]
    # Exposed: 2 to 4 ms, and 4.5 to 5 ms.
    assert communication_milliseconds(activities) == (4.0, 2.5)
