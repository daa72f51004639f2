"""The folder of a training run: checkpoints, and which of them is the last and which the best."""

from pathlib import Path

from ..model.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint
from .config import ConfigError

_LAST = "last_checkpoint"
_BEST = "best_checkpoint"
FINAL_CHECKPOINT = "model_final.pth"


class RunFolder:
    """Checkpoints `model_0002500.pth`, ..., `model_final.pth`, and the names of two of them.

    The text file `last_checkpoint` names the one to resume from, `best_checkpoint` the one that did
    best in an evaluation.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, *, resume: bool) -> Checkpoint | None:
        """Make the folder; the last checkpoint where a run is to be resumed and there is one.

        Raises:
            ConfigError: the folder holds a run that nobody asked to resume.
            CheckpointError: the last checkpoint cannot be read.
        """
        self.path.mkdir(parents=True, exist_ok=True)
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

    def save(self, checkpoint: Checkpoint, *, final: bool, best: bool = False) -> None:
        """Write a checkpoint, then name it; a crash between leaves the one before the last one."""
        name = FINAL_CHECKPOINT if final else f"model_{checkpoint.iteration:07d}.pth"
        save_checkpoint(self.path / name, checkpoint)
        if best:
            self._point(_BEST, name)
        self._point(_LAST, name)

    def _point(self, pointer: str, name: str) -> None:
        partial = self.path / f".{pointer}.partial"
        partial.write_text(f"{name}\n")
        partial.replace(self.path / pointer)

    def _way_around(self) -> str:
        """How to go on when the last checkpoint is damaged."""
        older = sorted(set(self.path.glob("model_*.pth")) - {self.last()})
        if not older:
            return "there is no other in this run, so start anew with output_dir=FOLDER"
        return (
            f"to go on from an older checkpoint, write its name, such as {older[-1].name}, into "
            f"{self.path / _LAST}"
        )
