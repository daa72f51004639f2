import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image


def quickstart(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "maskrcnn_trt", "quickstart", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=580)


def test_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    result = quickstart("-o", str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.startswith("Error: ")
    assert "holds something else than a quickstart" in result.stderr
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.slow
def test_whole_path_leaves_what_it_promises(tmp_path: Path) -> None:
    folder = tmp_path / "quickstart"
    result = quickstart("-o", str(folder), "--images", "8", "--iterations", "50")
    assert result.returncode == 0, result.stderr
    metrics = json.loads((folder / "metrics.json").read_text())
    assert {"bbox/AP", "bbox/AP50", "segm/AP", "segm/AP50"} <= metrics.keys()
    assert "segm/AR100" in result.stdout
    assert metrics["infer/batch_8/images_per_second"] > 0
    assert metrics["serve/clients_8/p99_ms"] > 0
    assert (folder / "bundle" / "manifest.json").is_file()
    for name in ("loss.png", "predictions.png"):
        with Image.open(folder / name) as picture:
            assert picture.width > 400
        assert str(folder / name) in result.stdout
