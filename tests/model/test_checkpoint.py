import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from maskrcnn_trt.model.checkpoint import (
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
    whole_file,
)


def test_what_is_saved_is_loaded(tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = replace(
        load_checkpoint(tiny_checkpoint),
        iteration=7,
        metrics={"bbox/AP": 0.25},
        training_state={"seed": 3, "optimizer": {"state": {0: torch.arange(3.0)}}},
    )
    save_checkpoint(tmp_path / "again.pth", checkpoint)
    loaded = load_checkpoint(tmp_path / "again.pth")
    for name in ("model_config", "categories", "preprocessing", "buckets", "iteration", "metrics"):
        assert getattr(loaded, name) == getattr(checkpoint, name)
    torch.testing.assert_close(loaded.weights, checkpoint.weights, rtol=0, atol=0)
    assert loaded.training_state["seed"] == 3
    assert loaded.training_state["optimizer"]["state"][0].tolist() == [0, 1, 2]
    model = loaded.build_model()
    assert not model.training
    torch.testing.assert_close(dict(model.state_dict()), checkpoint.weights, rtol=0, atol=0)


def test_a_crash_while_writing_leaves_what_was_there(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pth"
    checkpoint = load_checkpoint(tiny_checkpoint)
    save_checkpoint(path, replace(checkpoint, iteration=1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _fail)
        with pytest.raises(OSError, match="no space"):
            save_checkpoint(path, replace(checkpoint, iteration=2))
    assert load_checkpoint(path).iteration == 1
    save_checkpoint(path, replace(checkpoint, iteration=3))
    assert load_checkpoint(path).iteration == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.pth"]


def _fail(_: int) -> None:
    raise OSError("no space left on device")


def test_the_file_is_on_the_disk_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "name"
    synced = []

    def note(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), path.exists()))

    monkeypatch.setattr(os, "fsync", note)
    with whole_file(path) as file:
        file.write(b"content")
    assert path.read_bytes() == b"content"
    assert synced == [(str(tmp_path / ".name.partial"), False), (str(tmp_path), True)]


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


STRANGE = {
    "truncated": _cut,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not a checkpoint"),
    "weights alone": lambda path: torch.save({"conv.weight": torch.ones(1)}, path),
    "a tensor": lambda path: torch.save(torch.ones(1), path),
    "a missing key": lambda path: torch.save({"format": 2}, path),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_a_strange_file_is_refused_in_one_sentence(
    tiny_checkpoint: Path, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "strange.pth"
    path.write_bytes(tiny_checkpoint.read_bytes())
    STRANGE[kind](path)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert str(caught.value) == (
        f"{path} is damaged or no checkpoint of this program; give a .pth file that training wrote"
    )


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.pth does not exist; give a \.pth file"):
        load_checkpoint(tmp_path / "none.pth")


def test_another_format_is_refused(tmp_path: Path) -> None:
    torch.save({"format": 99}, tmp_path / "future.pth")
    with pytest.raises(CheckpointError, match="format 99, but this version reads format 2"):
        load_checkpoint(tmp_path / "future.pth")


class _Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def test_a_file_cannot_run_code(tmp_path: Path) -> None:
    path, target = tmp_path / "malicious.pth", tmp_path / "made"
    torch.save({"format": 2, "model_config": _Malicious(target)}, path)
    with pytest.raises(CheckpointError):
        load_checkpoint(path)
    assert not target.exists()
    torch.load(path, weights_only=False)
    assert target.exists()


def test_a_folder_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is a folder; give a \.pth file"):
        load_checkpoint(tmp_path)
