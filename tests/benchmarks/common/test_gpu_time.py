"""GPU time by stage and by kind of constructed and of real kernels."""

import pytest
import torch

from maskrcnn_trt.benchmarks.common.gpu_time import (
    IDLE,
    KERNEL_KINDS,
    NCCL,
    STAGES,
    GpuActivity,
    KernelTotal,
    communication_milliseconds,
    costliest_kernels,
    mean_milliseconds_by_stage,
    milliseconds_by_kind,
    milliseconds_by_stage,
    profile_gpu,
)

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


def test_communication_beside_other_kernels_is_not_exposed():
    activities = [
        GpuActivity("gemm", start=0, duration=2000),
        GpuActivity("ncclDevKernel_AllReduce", start=1000, duration=4000),
        GpuActivity("ncclDevKernel_AllReduce", start=2000, duration=1000),
        GpuActivity("adam", start=4000, duration=500),
        GpuActivity("adam", start=9000, duration=500),
    ]
    assert communication_milliseconds(activities) == 4.0
    # Nothing else runs from 2 to 4 ms, and from 4.5 to 5 ms.
    assert milliseconds_by_kind(activities)[NCCL] == 2.5


def test_kinds_are_recognised_by_name_and_sum_up():
    names = {
        "triton_poi_fused_convolution_relu_3": "element-wise",
        "void at::native::vectorized_elementwise_kernel<4, ...>": "element-wise",
        "sm90_xmma_dgrad_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc": "convolutions",
        "_pointwise_convolution": "convolutions",
        "nvjet_sm90_hsh_128x256_64x4_2x1_v_bz_coopA_relubias_TNN": "matrix products",
        "pyramid_roi_align_backward": "RoIAlign",
        "void at::native::multi_tensor_apply_kernel<...>": "optimiser",
        "Memset (Device)": "copies",
        "nms_keep": "other",
    }
    # Each lasts 1 ms, and 1 ms is idle before the next.
    activities = [GpuActivity(name, 2000 * i, 1000) for i, name in enumerate(names)]
    end = 2000 * len(names)
    activities += [
        GpuActivity("ncclDevKernel_AllReduce", end, 4000),
        GpuActivity("gemm", end + 1000, 1000),  # hides a quarter of the communication
    ]
    times = milliseconds_by_kind(activities)
    expected = dict.fromkeys((*KERNEL_KINDS, IDLE), 1.0)
    expected |= {"element-wise": 2.0, "convolutions": 2.0, "matrix products": 2.0}
    assert times == expected | {"NCCL": 3.0, IDLE: len(names)}
    assert sum(times.values()) == pytest.approx((end + 4000) / 1000)
