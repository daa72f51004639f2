"""Write, find and remove the checkpoints in the folder of a training run."""

import fcntl
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..model.atomic_files import atomic_write, check_creatable
from ..model.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint
from .config import ConfigError

_LAST = "last_checkpoint"
# Lock file. The process that trains in the folder holds the lock.
_LOCK = ".lock"
FINAL_CHECKPOINT = "model_final.pth"
BEST_CHECKPOINT = "model_best.pth"


class RunFolder:
    """Folder with checkpoints `model_0002500.pth`, ..., `model_final.pth` and `model_best.pth`.

    The text file `last_checkpoint` contains the name of the checkpoint from which a run resumes.
    `model_best.pth` is a copy of the checkpoint with the best evaluation result. It is kept when
    numbered checkpoints are removed.
    """

    def __init__(self, path: Path, keep: int | None = None) -> None:
        self.path = path
        # Number of latest numbered checkpoints to keep. None: keep all.
        self._keep = keep

    def open(self, *, resume: bool) -> Checkpoint | None:
        """Create the folder if it does not exist, and load its last checkpoint if it has one.

        Returns:
            The last checkpoint. None: the folder contains no run.

        Raises:
            ConfigError: The folder contains a run and `resume` is False, or the folder cannot be
                created or written.
            CheckpointError: The last checkpoint cannot be read.
        """
        create_output_folder(self.path)
        if not self.contains_run():
            return None
        if not resume:
            raise ConfigError(
                f"{self.path} contains a run with checkpoint {self.last().name}; resume it with "
                "--resume (in Python, resume=True), or choose another folder with output_dir=FOLDER"
            )
        try:
            return load_checkpoint(self.last())
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {self._advice_after_damage()}") from error

    def contains_run(self) -> bool:
        """Whether the folder contains a run with a checkpoint."""
        return (self.path / _LAST).is_file() or bool(self._checkpoints())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder in a `with` block, so that no other process trains in it.

        Incomplete files of a killed run are removed after locking. If the file system has no locks,
        the folder is not locked.

        Raises:
            ConfigError: Another process trains in the folder.
        """
        with (self.path / _LOCK).open("a+") as file:
            try:
                # Use `lockf`, because child processes do not inherit its locks. With `flock`, the
                # data-loading processes of a killed run would hold the lock for some seconds.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                file.seek(0)
                raise ConfigError(
                    f"{file.read().strip() or 'another process'} is training in {self.path}; stop "
                    "it first, or choose another folder with output_dir=FOLDER"
                ) from None
            except OSError:  # the file system has no locks
                pass
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n")
            file.flush()
            self._remove_partial_files()
            yield

    def _remove_partial_files(self) -> None:
        """Remove the incomplete files that a killed run left in the folder."""
        for path in self.path.glob(".*.partial"):
            if path.is_file():
                path.unlink()

    def last(self) -> Path:
        """Return the path of the checkpoint that the file `last_checkpoint` names.

        If this file is missing, return the most recently modified checkpoint.

        Raises:
            FileNotFoundError: The folder contains no checkpoint.
        """
        pointer = self.path / _LAST
        # The file is missing if a run was killed before writing it, or if only checkpoints were
        # copied.
        if not pointer.exists() and (checkpoints := self._checkpoints()):
            return max(checkpoints, key=_modified)
        return self.path / pointer.read_text(errors="replace").strip()

    def save(self, checkpoint: Checkpoint, *, final: bool = False, best: bool = False) -> None:
        """Write a checkpoint atomically, and its name to `last_checkpoint`.

        Then delete older files `model_<iteration>.pth`, except for the latest ones. The
        constructor's argument `keep` is the number of files to keep. If it is None, delete nothing.

        Args:
            checkpoint: Checkpoint to write.
            final: Write the checkpoint as `model_final.pth` instead of `model_<iteration>.pth`.
            best: Write the checkpoint as `model_best.pth` too.
        """
        if best:
            save_checkpoint(self.path / BEST_CHECKPOINT, checkpoint)
        last = FINAL_CHECKPOINT if final else _numbered(checkpoint.iteration)
        save_checkpoint(self.path / last, checkpoint)
        with atomic_write(self.path / _LAST) as file:
            file.write(f"{last}\n".encode())
        self._remove_older_than(checkpoint.iteration)

    def _remove_older_than(self, iteration: int) -> None:
        """Remove numbered checkpoints up to an iteration, but keep the latest of them.

        The constructor's argument `keep` is the number to keep. If it is None, remove nothing.
        Checkpoints of later iterations are neither counted nor removed.
        """
        # Later checkpoints exist if the user resumed from an older one. Keep them, because this run
        # did not write them.
        if self._keep is None:
            return
        matches = (re.fullmatch(r"model_(\d{7,})\.pth", path.name) for path in self.path.iterdir())
        past = sorted(n for match in matches if match and (n := int(match[1])) <= iteration)
        for number in past[: -self._keep]:
            (self.path / _numbered(number)).unlink()

    def _checkpoints(self) -> set[Path]:
        return set(self.path.glob("model_*.pth"))

    def _advice_after_damage(self) -> str:
        others = self._checkpoints() - {self.last()}
        if not others:
            return "this run has no other checkpoint; start a new run with output_dir=FOLDER"
        newest = max(others, key=_modified)
        return (
            f"to resume from an older checkpoint, write its name, such as {newest.name}, to "
            f"{self.path / _LAST}"
        )


def create_output_folder(path: Path) -> None:
    """Create `output_dir` if it does not exist.

    Raises:
        ConfigError: The folder cannot be created, or no file can be created in it.
    """
    try:
        check_creatable(path)
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output_dir {path}: {error.strerror}; choose another folder with output_dir=FOLDER"
        ) from None


def _modified(path: Path) -> float:
    return path.stat().st_mtime


def _numbered(iteration: int) -> str:
    return f"model_{iteration:07d}.pth"
