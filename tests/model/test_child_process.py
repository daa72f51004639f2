import subprocess
import sys
from pathlib import Path

import pytest

from maskrcnn_trt.model.child_process import module_command


@pytest.mark.parametrize("folder", ["bin", "", "{}"])
def test_child_imports_from_the_current_folder_only_if_its_parent_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    (tmp_path / "profile.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder.format(tmp_path), *sys.path])
    command = [*module_command("cProfile"), "--help"]  # cProfile imports profile
    result = subprocess.run(command, stdout=subprocess.DEVNULL)
    assert result.returncode == (0 if folder == "bin" else 3)
