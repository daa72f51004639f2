"""The folder of a training run: checkpoints, and which of them is the last."""

from pathlib import Path

from ..model.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint
from .config import ConfigError

_POINTER = "last_checkpoint"
FINAL_CHECKPOINT = "model_final.pth"


class RunFolder:
    """Checkpoints `model_0002500.pth`, ..., `model_final.pth`, and the name of the last one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pointer = path / _POINTER

    def open(self, *, resume: bool) -> Checkpoint | None:
        """Make the folder; the last checkpoint where a run is to be resumed and there is one.

        Raises:
            ConfigError: the folder holds a run that nobody asked to resume.
            CheckpointError: the last checkpoint cannot be read.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if not self._pointer.is_file():
            return None
        if not resume:
            raise ConfigError(
                f"{self.path} holds a run that got to {self.last().name}; continue it with "
                "--resume, or choose another folder with output_dir=FOLDER"
            )
        try:
            return load_checkpoint(self.last())
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; to go on from an older checkpoint, write its name into {self._pointer}"
            ) from error

    def last(self) -> Path:
        """The last checkpoint that was written.

        Raises:
            FileNotFoundError: there is none.
        """
        return self.path / self._pointer.read_text().strip()

    def save(self, checkpoint: Checkpoint, *, final: bool) -> None:
        """Write a checkpoint, then name it the last one; a crash between leaves the one before."""
        name = FINAL_CHECKPOINT if final else f"model_{checkpoint.iteration:07d}.pth"
        save_checkpoint(self.path / name, checkpoint)
        partial = self._pointer.with_name(f".{_POINTER}.partial")
        partial.write_text(f"{name}\n")
        partial.replace(self._pointer)
