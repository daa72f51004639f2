"""Zip archives of data sets: every file whole, in its place, and nowhere else."""

import shutil
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from .coco import DataError
from .disk import ByteProgress, exclusive, no_progress, require_room


def missing_members(
    archive: Path, folder: Path, on_progress: ByteProgress = no_progress
) -> list[str]:
    """Names in an archive of the files that its extracted folder lacks or holds otherwise.

    Args:
        archive: a zip file.
        folder: where its only top folder, of the same name, is extracted.
        on_progress: see `ByteProgress`.

    Raises:
        DataError: the archive cannot be read, or holds something outside of that folder.
    """
    with _opened(archive) as source:
        missing = _missing(source, archive, folder, on_progress)
        return [member.filename for member in missing]


def extract_archive(archive: Path, folder: Path, on_progress: ByteProgress = no_progress) -> int:
    """Extract what is not there yet.

    Files are written into a hidden folder beside, and moved when all of them are whole and their
    CRCs right: a crash leaves nothing half-written in `folder`.

    Args:
        archive: a zip file whose only top folder has the name of `folder`.
        folder: where that is to be; other files in it stay.
        on_progress: see `ByteProgress`.

    Returns:
        The number of files that were extracted.

    Raises:
        DataError: the archive cannot be read, holds something outside of that folder, or has no
            room.
    """
    with _opened(archive) as source, exclusive(folder):
        members = _missing(source, archive, folder, on_progress)
        if not members:
            return 0
        require_room(folder, sum(member.file_size for member in members))
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            _write_members(source, members, partial, f"extracting {archive.name}", on_progress)
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
    """An archive; whatever is wrong with it becomes one sentence."""
    if not archive.exists():
        raise DataError(f"{archive} is not there; `maskrcnn data download` fetches it")
    try:
        with zipfile.ZipFile(archive) as source:
            yield source
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DataError(f"{archive} is damaged ({error}); delete it and download it anew") from None
    except RuntimeError as error:  # all that zipfile says of these archives
        raise DataError(
            f"{archive} is encrypted, or compressed in a way that Python does not know, and so not "
            "what COCO publishes; delete it and download it anew"
        ) from error


def _missing(
    source: zipfile.ZipFile, archive: Path, folder: Path, on_progress: ByteProgress
) -> list[zipfile.ZipInfo]:
    members = [member for member in source.infolist() if not member.is_dir()]
    for member in members:
        path = PurePosixPath(member.filename)
        if path.parts[:1] != (folder.name,) or ".." in path.parts or "\\" in member.filename:
            raise DataError(
                f"{archive} holds {member.filename!r}, which lies outside of {folder.name}/; "
                "it is not what COCO publishes, and nothing was extracted"
            )
    if not folder.exists():
        return members
    missing, done, total = [], 0, sum(member.file_size for member in members)
    for member in members:
        if not _is_right(folder.parent / member.filename, member):
            missing.append(member)
        done += member.file_size
        on_progress(f"comparing {folder.name}", done, total)
    return missing


def _is_right(path: Path, member: zipfile.ZipInfo) -> bool:
    if not path.is_file() or path.stat().st_size != member.file_size:
        return False
    return zlib.crc32(path.read_bytes()) == member.CRC


def _write_members(
    source: zipfile.ZipFile,
    members: Sequence[zipfile.ZipInfo],
    partial: Path,
    step: str,
    on_progress: ByteProgress,
) -> None:
    done, total = 0, sum(member.file_size for member in members)
    for member in members:
        source.extract(member, partial)  # compares CRCs
        done += member.file_size
        on_progress(step, done, total)


def _move(source: Path, target: Path) -> None:
    """Move a folder, or where there is one already, each of its files."""
    if not target.exists():
        source.rename(target)
        return
    for path in source.rglob("*"):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)
