import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from maskrcnn_trt.serving.placement import places_for

CORES = set(os.sched_getaffinity(0))

# What is asked of it; it finds as many GPUs as it is compiled for, or those of the environment.
DRIVER = """
#include <stdlib.h>
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    *count = GPUS;
    if (visible)
        for (*count = *visible != 0; *visible; visible++)
            *count += *visible == ',';
    return 0;
}
"""
PROGRAM = """
import json, sys
from maskrcnn_trt.serving.placement import places_for
places = places_for(json.loads(sys.argv[1]))
print(json.dumps([[p.environment["CUDA_VISIBLE_DEVICES"], p.is_for_gpu] for p in places]))
"""


def gpus_of(gpus: int, workers: int | None, folder: Path, **environment: str) -> list[list[object]]:
    """The GPU of each worker on a machine with so many."""
    source = folder / "driver.c"
    source.write_text(DRIVER)
    library = folder / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", f"-DGPUS={gpus}", "-o", library, source], check=True)
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(workers)],
        env=os.environ | {"LD_LIBRARY_PATH": str(folder)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    places: list[list[object]] = json.loads(found.stdout)
    return places


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a compiler of C")
@pytest.mark.parametrize(
    ("gpus", "visible", "workers", "expected"),
    [
        (1, None, None, [["0", False]]),
        (3, None, None, [["0", False], ["1", True], ["2", True]]),
        (2, None, 3, [["0", False], ["1", False], ["0", False]]),
        (8, "5,3", None, [["5", False], ["3", True]]),
        (8, "GPU-8932f937,MIG-1", 2, [["GPU-8932f937", False], ["MIG-1", False]]),
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
def test_gpus_are_those_that_torch_finds() -> None:
    import torch

    assert len(places_for(None)) == torch.cuda.device_count()


def test_without_gpus_workers_share_the_cores_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [place.cores for place in places_for(None)] == [CORES]
    for workers in (2, len(CORES), len(CORES) + 1):
        shares = [place.cores for place in places_for(workers)]
        assert len(shares) == workers
        assert set().union(*shares) == CORES
        assert all(shares)
        if workers <= len(CORES):
            assert sum(map(len, shares)) == len(CORES)
