"""The folder of a training run: checkpoints, and which of them is the last."""

import re
from pathlib import Path

from ..model.checkpoint import (
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
    whole_file,
)
from .config import ConfigError

_LAST = "last_checkpoint"
FINAL_CHECKPOINT = "model_final.pth"
BEST_CHECKPOINT = "model_best.pth"


class RunFolder:
    """Checkpoints `model_0002500.pth`, ..., `model_final.pth` and `model_best.pth`.

    The text file `last_checkpoint` names the one to resume from. The best has a file of its own, so
    that it stays whatever becomes of the others.
    """

    def __init__(self, path: Path, keep: int | None = None) -> None:
        """Refer to a folder, which need not be there.

        Args:
            path: where it is.
            keep: numbered checkpoints that are kept, the latest ones; none, all.
        """
        self.path = path
        self._keep = keep

    def open(self, *, resume: bool) -> Checkpoint | None:
        """Make the folder; the last checkpoint where a run is to be resumed and there is one.

        Raises:
            ConfigError: the folder holds a run that nobody asked to resume.
            CheckpointError: the last checkpoint cannot be read.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(
                f"output_dir: {error.filename} is a file; choose a folder with output_dir=FOLDER"
            ) from None
        if not (self.path / _LAST).is_file():
            return None
        if not resume:
            raise ConfigError(
                f"{self.path} holds a run that got to {self.last().name}; continue it with "
                "--resume, or choose another folder with output_dir=FOLDER"
            )
        try:
            return load_checkpoint(self.last())
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {self._way_around()}") from error

    def remove_partial_files(self) -> None:
        """Remove what a run left half-written when it was killed."""
        for path in self.path.glob(".*.partial"):
            if path.is_file():
                path.unlink()

    def last(self) -> Path:
        """The last checkpoint that was written.

        Raises:
            FileNotFoundError: there is none.
        """
        return self.path / (self.path / _LAST).read_text().strip()

    def save(self, checkpoint: Checkpoint, *, final: bool = False, best: bool = False) -> None:
        """Write a checkpoint, then name it; a crash between leaves the one before the last one.

        Args:
            checkpoint: written under its number, or as the final one.
            final: whether the run ends here.
            best: whether it did best so far in an evaluation; it is written as such too.
        """
        if best:
            save_checkpoint(self.path / BEST_CHECKPOINT, checkpoint)
        last = FINAL_CHECKPOINT if final else _numbered(checkpoint.iteration)
        save_checkpoint(self.path / last, checkpoint)
        with whole_file(self.path / _LAST) as file:
            file.write(f"{last}\n".encode())
        self._remove_older_than(checkpoint.iteration)

    def _remove_older_than(self, iteration: int) -> None:
        """Remove numbered checkpoints up to an iteration, but for the latest ones.

        Those of later iterations are of a branch that was given up, and are left to its user.
        """
        if self._keep is None:
            return
        matches = (re.fullmatch(r"model_(\d{7,})\.pth", path.name) for path in self.path.iterdir())
        past = sorted(n for match in matches if match and (n := int(match[1])) <= iteration)
        for number in past[: -self._keep]:
            (self.path / _numbered(number)).unlink()

    def _way_around(self) -> str:
        """How to go on when the last checkpoint is damaged."""
        others = set(self.path.glob("model_*.pth")) - {self.last()}
        if not others:
            return "there is no other in this run, so start anew with output_dir=FOLDER"
        newest = max(others, key=lambda path: path.stat().st_mtime)
        return (
            f"to go on from an older checkpoint, write its name, such as {newest.name}, into "
            f"{self.path / _LAST}"
        )


def _numbered(iteration: int) -> str:
    return f"model_{iteration:07d}.pth"
