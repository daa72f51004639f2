import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from maskrcnn_trt.model.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from maskrcnn_trt.training.config import ConfigError
from maskrcnn_trt.training.run_folder import RunFolder


@pytest.fixture
def checkpoint(tiny_checkpoint: Path) -> Checkpoint:
    return load_checkpoint(tiny_checkpoint)


@pytest.fixture
def folder(tmp_path: Path, checkpoint: Checkpoint) -> RunFolder:
    """Folder of a run that wrote two checkpoints and was killed while writing a third."""
    folder = RunFolder(tmp_path / "run")
    assert folder.open(resume=False) is None
    for iteration in (10, 20):
        folder.save(replace(checkpoint, iteration=iteration))
    (folder.path / ".model_0000030.pth.partial").write_bytes(b"half a checkpoi")
    (folder.path / ".last_checkpoint.partial").write_text("model_00")
    return folder


def _iteration_resumed(folder: RunFolder) -> int:
    last = folder.open(resume=True)
    assert last is not None
    return last.iteration


def test_resuming_without_a_run_starts_one(tmp_path: Path) -> None:
    assert RunFolder(tmp_path / "a" / "b").open(resume=True) is None
    assert (tmp_path / "a" / "b").is_dir()


def test_the_last_whole_checkpoint_is_resumed(folder: RunFolder, checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=r"model_0000020\.pth.*--resume.*output_dir=FOLDER"):
        folder.open(resume=False)
    assert _iteration_resumed(folder) == 20
    folder.save(replace(checkpoint, iteration=30), final=True)
    assert folder.last() == folder.path / "model_final.pth"
    assert _iteration_resumed(folder) == 30


def test_checkpoints_without_the_file_of_the_last_are_a_run(folder: RunFolder) -> None:
    (folder.path / "last_checkpoint").unlink()
    with pytest.raises(ConfigError, match=r"model_0000020\.pth.*--resume.*resume=True"):
        folder.open(resume=False)
    assert _iteration_resumed(folder) == 20


def test_one_process_trains_in_a_folder(folder: RunFolder) -> None:
    code = (
        "import sys, time; from pathlib import Path; "
        "from maskrcnn_trt.training.run_folder import RunFolder\n"
        f"with RunFolder(Path({str(folder.path)!r})).locked(): print('locked', flush=True); "
        "time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "locked\n"
    with pytest.raises(ConfigError, match=rf"process {other.pid} .*output_dir=FOLDER"):
        folder.locked().__enter__()
    other.kill()
    other.communicate()
    with folder.locked():
        pass


def test_an_older_checkpoint_replaces_a_damaged_one(folder: RunFolder) -> None:
    os.truncate(folder.last(), folder.last().stat().st_size // 2)
    pattern = r"model_0000020\.pth.*such as model_0000010\.pth.*last_checkpoint"
    with pytest.raises(CheckpointError, match=pattern):
        folder.open(resume=True)
    (folder.path / "last_checkpoint").write_text("model_0000010.pth")
    assert _iteration_resumed(folder) == 10


def test_the_newest_other_checkpoint_is_suggested(
    folder: RunFolder, checkpoint: Checkpoint
) -> None:
    """Not the final checkpoint, if the run was extended afterwards."""
    folder.save(replace(checkpoint, iteration=30), final=True)
    for number, name in enumerate(("final", "0000010", "0000020")):
        os.utime(folder.path / f"model_{name}.pth", (number, number))
    folder.save(replace(checkpoint, iteration=40))
    os.truncate(folder.last(), 100)
    with pytest.raises(CheckpointError, match=r"such as model_0000020\.pth"):
        folder.open(resume=True)


def _names(folder: RunFolder) -> list[str]:
    paths = folder.path.glob("model_*.pth")
    return sorted(path.stem.removeprefix("model_") for path in paths)


def test_older_checkpoints_are_removed(tmp_path: Path, checkpoint: Checkpoint) -> None:
    """Except the best, the final one, and those of an abandoned branch."""
    folder = RunFolder(tmp_path / "run", keep=2)
    folder.open(resume=False)
    for iteration in (10, 20, 30, 40):
        folder.save(replace(checkpoint, iteration=iteration), best=iteration == 10)
    folder.save(replace(checkpoint, iteration=45), final=True)
    assert _names(folder) == ["0000030", "0000040", "best", "final"]
    folder.save(replace(checkpoint, iteration=35))
    assert _names(folder) == ["0000030", "0000035", "0000040", "best", "final"]
    assert load_checkpoint(folder.path / "model_best.pth").iteration == 10
    assert folder.last().name == "model_0000035.pth"


def test_the_best_checkpoint_is_separate_from_the_final_one(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.open(resume=False)
    folder.save(replace(checkpoint, iteration=10), final=True, best=True)
    folder.save(replace(checkpoint, iteration=20), final=True)
    assert load_checkpoint(folder.path / "model_best.pth").iteration == 10
    assert load_checkpoint(folder.path / "model_final.pth").iteration == 20


@pytest.mark.parametrize("name", ["model_0000099.pth", ""])
def test_a_missing_checkpoint_is_named(folder: RunFolder, name: str) -> None:
    (folder.path / "last_checkpoint").write_text(name)
    with pytest.raises(CheckpointError, match="an older checkpoint"):
        folder.open(resume=True)


@pytest.mark.parametrize(
    ("path", "fact"),
    [
        ("taken", "/taken: File exists"),
        ("taken/run", "in .*/taken .Not a directory"),
        ("taken/runs/first", "in .*/taken .Not a directory"),
        ("/proc/run", "in /proc .No such file or directory"),
    ],
)
def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path, path: str, fact: str) -> None:
    (tmp_path / "taken").write_text("something")
    with pytest.raises(ConfigError, match=rf"{fact}.*output_dir=FOLDER"):
        RunFolder(tmp_path / path).open(resume=False)
