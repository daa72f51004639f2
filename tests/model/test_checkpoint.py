import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from maskrcnn_trt.model.checkpoint import CheckpointError, load_checkpoint, save_checkpoint


def test_saved_checkpoint_is_loaded(tiny_checkpoint: Path, tmp_path: Path) -> None:
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


def test_crash_while_saving_keeps_the_previous_file(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pth"
    checkpoint = load_checkpoint(tiny_checkpoint)
    save_checkpoint(path, replace(checkpoint, iteration=1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _fail)
        with pytest.raises(CheckpointError, match="no space"):
            save_checkpoint(path, replace(checkpoint, iteration=2))
    assert load_checkpoint(path).iteration == 1
    save_checkpoint(path, replace(checkpoint, iteration=3))
    assert load_checkpoint(path).iteration == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.pth"]


def _fail(_: int) -> None:
    raise OSError("no space left on device")


DAMAGED_FILES = {
    "cut off at its beginning": lambda path: os.truncate(path, 10_000),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not a checkpoint"),
    "a changed byte": lambda path: change_byte(path),
    "weights alone": lambda path: torch.save({"conv.weight": torch.ones(1)}, path),
    "a tensor": lambda path: torch.save(torch.ones(1), path),
    "a missing key": lambda path: torch.save({"format": 2}, path),
    "no weights": lambda path: _set(path, "model", 3),
    "weights without tensors": lambda path: _set(path, "model", {"conv.weight": 3}),
    "an iteration as text": lambda path: _set(path, "iteration", "x"),
    "a configuration as list": lambda path: _set(path, "model_config", []),
    "a training state as number": lambda path: _set(path, "training_state", 3),
}


def change_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF  # in a weight
    path.write_bytes(content)


def _set(path: Path, key: str, value: object) -> None:
    torch.save(torch.load(path, weights_only=True) | {key: value}, path)


@pytest.mark.parametrize("kind", DAMAGED_FILES)
def test_damaged_files_are_rejected_in_one_sentence(
    tiny_checkpoint: Path, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "damaged.pth"
    path.write_bytes(tiny_checkpoint.read_bytes())
    DAMAGED_FILES[kind](path)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert str(caught.value).startswith(f"{path} is damaged")
    assert "\n" not in str(caught.value)


def test_wrong_checksums_are_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged.pth"
    path.write_bytes(tiny_checkpoint.read_bytes())
    change_byte(path)
    with pytest.raises(CheckpointError, match=r"member \S*/data\S* has a wrong checksum"):
        load_checkpoint(path)


def test_unusable_paths_and_versions_are_rejected(tmp_path: Path) -> None:
    torch.save({"format": 99}, tmp_path / "future.pth")
    for path, message in (
        (tmp_path / "none.pth", r"none\.pth does not exist.*\.pth file"),
        (tmp_path, r"is a folder.*\.pth file"),
        (tmp_path / "future.pth", r"format 99.* format 2"),
        (Path("/proc/self/mem"), r"cannot read /proc/self/mem: Input/output error; make the"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(path)


def test_unsupported_settings_are_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    content = torch.load(tiny_checkpoint, weights_only=True)
    content["model_config"]["rpn"]["nms_iou"] = 2
    torch.save(content, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match=r"rpn\.nms_iou is 2; allowed: .*; use the version"):
        load_checkpoint(tmp_path / "other.pth")


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
    # The attack itself works: an unsafe load runs it.
    torch.load(path, weights_only=False)
    assert target.exists()
