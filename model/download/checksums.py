"""Checksums of downloaded files."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .progress import ByteProgress

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Checksum:
    """Hash of a file. `digest` holds all hexadecimal digits of the hash, or only the first few."""

    algorithm: Literal["md5", "sha256"]
    digest: str

    def __str__(self) -> str:
        return f"{'MD5' if self.algorithm == 'md5' else 'SHA-256'} {self.digest}"

    def of(self, path: Path, step: str, on_progress: ByteProgress) -> "Checksum":
        """Return the checksum of a file, truncated to as many digits as `self` has.

        Args:
            path: Path of an existing file.
            step: Name of the computation for `on_progress`, such as `checking val2017.zip`.
            on_progress: Called repeatedly with `step`, and the bytes read so far and in total.
        """
        digest, size = hashlib.new(self.algorithm, usedforsecurity=False), path.stat().st_size
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                on_progress(step, file.tell(), size)
        return Checksum(self.algorithm, digest.hexdigest()[: len(self.digest)])


def read_checksums(path: Path) -> dict[str, Checksum]:
    """Read a file in the format of `md5sum` or `sha256sum`. Return checksums by file name.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line does not have this format.
    """
    checksums = {}
    for line in path.read_text(errors="replace").splitlines():
        match = re.fullmatch(r"([0-9a-fA-F]{32}|[0-9a-fA-F]{64}) [ *](?:.*/)?([^/]+)", line)
        if match is None:
            raise ValueError(f"{path}: {line!r} does not have the form `CHECKSUM  FILE` of md5sum")
        algorithm: Literal["md5", "sha256"] = "md5" if len(match[1]) == 32 else "sha256"
        checksums[match[2]] = Checksum(algorithm, match[1].lower())
    return checksums
