import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from driver_stubs import needs_compiler, stubbed_driver

from maskrcnn_trt.serving.engines.worker_pool import assign_resources

CORES = set(os.sched_getaffinity(0))

PROGRAM = """
import json, sys
from maskrcnn_trt.serving.engines.worker_pool import assign_resources
workers = assign_resources(json.loads(sys.argv[1]))
gpus = [[w.environment["CUDA_VISIBLE_DEVICES"], w.gpu, w.is_for_gpu] for w in workers]
print(json.dumps(gpus))
"""


def gpus_of(gpus: int, workers: int | None, folder: Path, **environment: str) -> list[list[object]]:
    """Return the GPU of each worker on a machine with `gpus` GPUs."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(workers)],
        env=stubbed_driver(folder, gpus) | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assigned: list[list[object]] = json.loads(result.stdout)
    return assigned


@needs_compiler
@pytest.mark.parametrize(
    ("gpus", "visible", "workers", "expected"),
    [
        (1, None, None, [["0", 0, False]]),
        (3, None, None, [["0", 0, False], ["1", 1, True], ["2", 2, True]]),
        (2, None, 3, [["0", 0, False], ["1", 1, False], ["0", 0, False]]),
        (8, "5,3", None, [["5", 0, False], ["3", 1, True]]),
        (8, "GPU-8932f937,MIG-1", 2, [["GPU-8932f937", 0, False], ["MIG-1", 1, False]]),
    ],
)
def test_workers_are_spread_over_gpus(
    gpus: int,
    visible: str | None,
    workers: int | None,
    expected: list[list[object]],
    tmp_path: Path,
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpus_of(gpus, workers, tmp_path, **environment) == expected


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
