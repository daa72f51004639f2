"""Extract the files of a zip archive that are missing or altered in the target folder."""

import shutil
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from ....model.download.local_files import check_free_space, exclusive_lock
from ....model.download.progress import ByteProgress, no_progress
from ..coco.dataset import DataError


def missing_members(
    archive: Path, folder: Path, on_progress: ByteProgress = no_progress
) -> list[str]:
    """Return the names of archive members that are missing or altered in the extracted folder.

    Args:
        archive: Existing zip file with one top-level folder.
        folder: Extracted copy of the top-level folder, with the same name.
        on_progress: Called repeatedly with a step's name, processed bytes and total bytes.

    Raises:
        DataError: The archive cannot be read, or has members outside its top-level folder.
    """
    with _opened(archive) as source:
        missing = _missing(source, archive, folder, on_progress)
        return [member.filename for member in missing]


def extract_archive(archive: Path, folder: Path, on_progress: ByteProgress = no_progress) -> int:
    """Extract the members of an archive that are missing or altered in a folder.

    Files are first written to a hidden folder. When the CRCs of all files have been checked, the
    files are moved to `folder`. A crash therefore leaves no partial file in `folder`.

    Args:
        archive: Zip file with one top-level folder of the same name as `folder`.
        folder: Folder to create or complete. Other files in the folder are kept.
        on_progress: Called repeatedly with a step's name, processed bytes and total bytes.

    Returns:
        Number of extracted files.

    Raises:
        DataError: The archive cannot be read or extracted, or has members outside its top-level
            folder.
        DownloadError: The disk has too little free space, or another process extracts the archive.
    """
    with _opened(archive) as source, exclusive_lock(folder):
        members = _missing(source, archive, folder, on_progress)
        if not members:
            return 0
        done, total = 0, sum(member.file_size for member in members)
        check_free_space(folder, total)
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            for member in members:
                source.extract(member, partial)  # raises BadZipFile if the CRC differs
                done += member.file_size
                on_progress(f"extracting {archive.name}", done, total)
        except OSError as error:
            raise DataError(
                f"cannot extract {archive} into {folder.parent}: {error.strerror}"
            ) from error
        else:
            _move(partial / folder.name, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return len(members)


@contextmanager
def _opened(archive: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip file. In the `with` block, errors of `zipfile` are converted to `DataError`."""
    if not archive.exists():
        raise DataError(f"{archive} does not exist; download it with `maskrcnn data download`")
    try:
        with zipfile.ZipFile(archive) as source:
            yield source
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DataError(
            f"{archive} is damaged ({error}); delete it and download it again"
        ) from None
    except RuntimeError as error:
        # `zipfile` raises this for encryption and for unknown compression methods.
        raise DataError(
            f"{archive} is encrypted, or compressed with a method that Python does not support; "
            "published COCO archives are neither; delete it and download it again"
        ) from error


def _missing(
    source: zipfile.ZipFile, archive: Path, folder: Path, on_progress: ByteProgress
) -> list[zipfile.ZipInfo]:
    members = [member for member in source.infolist() if not member.is_dir()]
    for member in members:
        path = PurePosixPath(member.filename)
        if path.parts[:1] != (folder.name,) or ".." in path.parts or "\\" in member.filename:
            raise DataError(
                f"{archive} contains {member.filename!r}, a path outside of {folder.name}/; the "
                "archive is not a published COCO archive, and nothing was extracted"
            )
    if not folder.exists():
        return members
    missing, done, total = [], 0, sum(member.file_size for member in members)
    for member in members:
        if not _is_intact(folder.parent / member.filename, member):
            missing.append(member)
        done += member.file_size
        on_progress(f"comparing {folder.name}", done, total)
    return missing


def _is_intact(path: Path, member: zipfile.ZipInfo) -> bool:
    if not path.is_file() or path.stat().st_size != member.file_size:
        return False
    return zlib.crc32(path.read_bytes()) == member.CRC


def _move(source: Path, target: Path) -> None:
    """Move a folder to `target`. If `target` exists, move the files into it."""
    if not target.exists():
        source.rename(target)
        return
    for path in source.rglob("*"):
        if path.is_file():
            destination = target / path.relative_to(source)
            destination.parent.mkdir(parents=True, exist_ok=True)
            path.replace(destination)
