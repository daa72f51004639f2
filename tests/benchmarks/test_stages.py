"""Time by stage from made-up kernels, and on a GPU from real ones."""

import pytest

from maskrcnn_trt.benchmarks.stages import (
    IDLE,
    STAGES,
    Kernel,
    KernelTotal,
    costliest_kernels,
    kernels_of,
    mean_milliseconds_by_stage,
    milliseconds_by_stage,
)

BATCH = [
    Kernel("convolve", 0, 1000),
    Kernel("prune_top_k", 1000, 10),
    Kernel("sort_top_k", 1010, 20),
    Kernel("nms_keep", 1040, 30),  # 10 idle before it
    Kernel("sort_top_k", 1070, 5),
    Kernel("pyramid_roi_align", 1075, 100),
    Kernel("multiply", 1175, 200),
    Kernel("sort_top_k", 1375, 7),
    Kernel("nms_keep", 1382, 8),
    Kernel("void pyramid_roi_align<half>", 1400, 50),  # 10 idle before it
    Kernel("convolve", 1450, 150),
]


def test_stages_end_with_their_landmarks_and_add_up():
    times = milliseconds_by_stage(BATCH)
    assert tuple(times) == (*STAGES, IDLE)
    assert times == pytest.approx(
        {
            "trunk": 1.0,
            "proposals": 0.065,
            "box head": 0.3,
            "selection": 0.015,
            "mask head": 0.2,
            "idle": 0.02,
        }
    )
    assert sum(times.values()) == pytest.approx(1.6)


def test_overlap_counts_once():
    times = milliseconds_by_stage([Kernel("a", 5, 10), Kernel("b", 7, 3), Kernel("c", 12, 8)])
    assert times["trunk"] == pytest.approx(0.015)
    assert times[IDLE] == 0


def test_stages_that_never_come_take_no_time():
    times = milliseconds_by_stage([Kernel("convolve", 0, 10), Kernel("sort_top_k", 10, 5)])
    assert times == dict.fromkeys(times, 0) | {"trunk": 0.01, "proposals": 0.005}


def test_means_are_of_whole_batches_and_not_of_the_time_between():
    slower = [Kernel(k.name, 3000 + 2 * k.start, 2 * k.duration) for k in BATCH]
    times = mean_milliseconds_by_stage([*BATCH, *slower], 2)
    once = milliseconds_by_stage(BATCH)
    assert times == pytest.approx({stage: 1.5 * once[stage] for stage in once})


@pytest.mark.parametrize(("kernels", "batches"), [(BATCH, 2), ([], 3)])
def test_unequal_batches_are_an_error(kernels: list[Kernel], batches: int):
    with pytest.raises(ValueError, match=f"{len(kernels)} kernels are not those of {batches}"):
        mean_milliseconds_by_stage(kernels, batches)


def test_costliest_kernels_come_first():
    assert costliest_kernels([*BATCH, *BATCH], 2, 3) == [
        KernelTotal("convolve", 2, 1.15),
        KernelTotal("multiply", 1, 0.2),
        KernelTotal("pyramid_roi_align", 1, 0.1),
    ]


@pytest.mark.gpu
def test_kernels_of_a_gpu_are_read():
    import torch

    matrix = torch.randn(512, 512, device="cuda")

    def call() -> None:
        (matrix @ matrix).relu_()
        torch.cuda.synchronize()

    call()
    kernels = kernels_of(call, 4)
    names = [kernel.name for kernel in kernels]
    assert len(names) >= 8  # a product may take several
    assert names == names[: len(names) // 4] * 4
    assert all(kernel.duration > 0 for kernel in kernels)
    assert [k.start for k in kernels] == sorted(k.start for k in kernels)
    assert sum(mean_milliseconds_by_stage(kernels, 4).values()) > 0
