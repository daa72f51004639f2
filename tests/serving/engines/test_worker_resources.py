import os
from pathlib import Path

import pytest
from driver_stubs import needs_compiler, stubbed_driver

from maskrcnn_trt.serving.engines.worker_process import assign_resources

CORES = set(os.sched_getaffinity(0))


@needs_compiler
def test_workers_are_spread_over_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def assigned(gpus: int, visible: str | None, workers: int | None) -> list[tuple[object, ...]]:
        for name, value in stubbed_driver(tmp_path, gpus).items():
            monkeypatch.setenv(name, value)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return [
            (worker.environment["CUDA_VISIBLE_DEVICES"], worker.gpu, worker.is_for_gpu)
            for worker in assign_resources(workers)
        ]

    assert assigned(1, None, None) == [("0", 0, False)]
    assert assigned(3, None, None) == [("0", 0, False), ("1", 1, True), ("2", 2, True)]
    assert assigned(2, None, 3) == [("0", 0, False), ("1", 1, False), ("0", 0, False)]
    assert assigned(8, "5,3", None) == [("5", 0, False), ("3", 1, True)]
    names = "GPU-8932f937", "MIG-1"
    assert assigned(8, ",".join(names), 2) == [(names[0], 0, False), (names[1], 1, False)]


@pytest.mark.gpu
def test_one_worker_per_gpu_of_torch() -> None:
    import torch

    assert len(assign_resources(None)) == torch.cuda.device_count()


def test_without_gpus_workers_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [(own.cores, own.gpu) for own in assign_resources(None)] == [(CORES, None)]
    for workers in (2, len(CORES), len(CORES) + 1):
        shares = [own.cores for own in assign_resources(workers)]
        assert len(shares) == workers
        assert set().union(*shares) == CORES
        assert all(shares)
        if workers <= len(CORES):
            assert sum(map(len, shares)) == len(CORES)
