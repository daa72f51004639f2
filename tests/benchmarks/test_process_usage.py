import os
import signal
import subprocess
import sys
import time

import pytest

from maskrcnn_trt.benchmarks.process_usage import usage_between

_BUSY = (
    "import time\nx = bytearray(200 << 20)\nend = time.time() + 60\nwhile time.time() < end: pass"
)
_PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {_BUSY!r}])"


def test_children_count() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], start_new_session=True) as process:
        try:
            start = time.monotonic() + 0.5
            usage = usage_between(process.pid, start, start + 0.5)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert 0.1 < usage.cores < 1.2
    assert usage.memory_mib[-1] > 200


def test_process_that_ended_takes_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    now = time.monotonic()
    usage = usage_between(process.pid, now, now + 0.05)
    assert usage.cores == 0
    assert usage.memory_mib == pytest.approx([0] * len(usage.memory_mib))
