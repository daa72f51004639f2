import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fuzz_images.py")


def test_damaged_images_are_decoded_or_rejected(tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    # No memory limit: the fuzzer's peak memory includes that of the test process that forked it.
    limits = ["-runs=4000", "-seed=1", "-timeout=60", "-rss_limit_mb=0"]
    run = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "corpus", *limits],
        cwd=tmp_path, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    assert "Done 4000 runs" in run.stderr
