"""A file that has arrived in part, and which version of it that was."""

import os
from pathlib import Path

from pydantic import ValidationError

from ...model.config import FrozenConfig


class Origin(FrozenConfig):
    """What a server says of the version of a file that it sends; none, it does not say."""

    etag: str | None = None
    """Strong entity tag: equal tags promise equal bytes."""
    last_modified: str | None = None
    """Date, as the server writes it."""
    total: int | None = None
    """Bytes of the whole file."""

    @property
    def validator(self) -> str | None:
        """By what the server knows the version again."""
        return self.etag or self.last_modified

    def agrees_with(self, other: "Origin") -> bool:
        """Whether nothing that both know differs."""
        pairs = ((getattr(self, key), getattr(other, key)) for key in Origin.model_fields)
        return all(mine == theirs or None in (mine, theirs) for mine, theirs in pairs)


class PartialFile:
    """What has arrived of a file in `NAME.partial`, and its origin in `NAME.partial.json`."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(f"{path.name}.partial")
        self._origin_path = path.with_name(f"{path.name}.partial.json")

    @property
    def size(self) -> int:
        """Bytes that have arrived."""
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def origin(self) -> Origin:
        """Where they came from; an unknown version if nobody wrote it down."""
        try:
            return Origin.model_validate_json(self._origin_path.read_bytes())
        except (FileNotFoundError, ValidationError):
            return Origin()

    def restart(self, origin: Origin) -> None:
        """Begin with nothing, before the new origin is written: a crash must not mix versions."""
        self.path.write_bytes(b"")
        self._origin_path.write_text(origin.model_dump_json())

    def publish(self, path: Path) -> None:
        """Give it its name, once the disk has it."""
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        self.path.replace(path)
        self.remove()

    def remove(self) -> None:
        """Delete what is left of it."""
        self.path.unlink(missing_ok=True)
        self._origin_path.unlink(missing_ok=True)
