"""Output folder of an export: check it, replace it atomically, and keep older exported files."""

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from ..model.bundle.manifest import (
    ARTIFACT_SUFFIXES,
    COMPILED_SUFFIX,
    MANIFEST_NAME,
    SAMPLES_FOLDER,
    Artifact,
    BundleError,
    Manifest,
    read_manifest,
    verify_artifact,
)
from ..model.image_decoding import IMAGE_SUFFIXES, read_header
from ..model.image_files import errors_of_file

# Maximum number of sample images in a bundle.
_SAMPLES = 6
# Suffixes of the files that an export writes, except the manifest.
_SUFFIXES = {*ARTIFACT_SUFFIXES.values(), COMPILED_SUFFIX}
# File in the temporary folder of an export. The export keeps this file locked until it ends.
_LOCK_NAME = ".export-lock"


def check_output_folder(bundle: Path) -> None:
    """Check that an export may create or replace the folder `bundle`.

    Raises:
        BundleError: the folder holds files that do not belong to a bundle (exported model), is a
            mount point, or is or contains the current working folder. Or `bundle` is a file, or not
            a valid path.
    """
    try:
        resolved = bundle.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, or a loop of links
        raise BundleError(f"{str(bundle)!a} is not a path of a folder: {error}") from None
    if resolved.exists() and not resolved.is_dir():
        raise BundleError(f"{bundle} is a file; choose a folder")
    if Path.cwd().is_relative_to(resolved):
        # The user's shell would stay in the deleted folder, in which relative paths do not work.
        raise BundleError(
            f"{bundle} cannot be replaced, because it is or contains the current folder; run the "
            "export in another folder"
        )
    if resolved.is_mount():
        raise BundleError(
            f"{bundle} is a mount point and cannot be replaced; choose a folder inside it"
        )
    paths = list(bundle.iterdir()) if bundle.exists() else []
    other_files = {path.name for path in paths}
    if (bundle / MANIFEST_NAME).is_file():
        other_files -= {MANIFEST_NAME, SAMPLES_FOLDER}
        try:
            other_files -= {name for a in read_manifest(bundle).artifacts for name in a.paths}
        except BundleError:  # a damaged bundle, which the new one replaces
            other_files -= {path.name for path in paths if _is_exported(path)}
    if other_files:
        raise BundleError(
            f"{bundle} already holds {min(other_files)}, a file or folder that does not belong to "
            "a bundle; choose another folder"
        )


def _is_exported(path: Path) -> bool:
    """Return whether an export may have written a file, according to its name."""
    return path.name.startswith("model-") and path.suffix in _SUFFIXES and path.is_file()


@contextmanager
def atomic_folder(path: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Context manager: yield a temporary folder, which replaces `path` after the `with` block.

    If the block raises an exception, `path` does not change. Before the temporary folder is
    created, temporary folders of earlier, killed exports to `path` are removed.

    Yields:
        The temporary folder, and a function that locks `path` until this export has replaced it.
        Call this function before reading `path`. Other exports wait for the lock before they read
        or replace `path`.

    Raises:
        OSError: the folder cannot be created or written.
    """
    path = path.resolve()  # to replace the target of a link, not the link
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        _remove_leftovers(path)
    with (
        tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch,
        _lock_in(Path(scratch)),
        ExitStack() as replacing,
    ):
        partial, older = Path(scratch, "new"), Path(scratch, "older")
        partial.mkdir()
        try:
            yield partial, lambda: replacing.enter_context(_locked(path))
        except OSError as error:
            # If the disk is full, the error has no file name. Name the folder, so that the message
            # shows the disk.
            error.filename = error.filename or str(path.parent)
            raise
        if path.exists():
            path.replace(older)
        try:
            partial.replace(path)
        except OSError:
            if older.exists() and not path.exists():
                older.replace(path)
            raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Context manager: keep other exports from reading or replacing the folder `path`.

    Wait until no other export has this lock, which is a file beside `path`. If the file system has
    no locks, `path` is not locked.

    Raises:
        OSError: the file cannot be created.
    """
    # Do not use the package `filelock`, which would leave a lock file beside each bundle.
    lock = path.with_name(f".{path.name}.replacing")
    while True:
        file = lock.open("w")
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        # If the previous lock owner has deleted this file, other exports lock a new one: try again.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                break
        file.close()
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        file.close()


@contextmanager
def _lock_in(folder: Path) -> Iterator[None]:
    """Context manager: lock an export's temporary folder, so that no other export removes it."""
    fresh = folder / f"{_LOCK_NAME}.new"
    with fresh.open("w") as file:
        # Lock the file before it gets the name that other exports search for, so that they never
        # find it unlocked. If the file system has no locks, the file keeps its first name, so that
        # no other export finds it and removes the folder.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fresh.rename(folder / _LOCK_NAME)
        yield


def _remove_leftovers(path: Path) -> None:
    """Remove the temporary folders that killed exports left beside the output folder `path`.

    If an export was killed while it replaced `path`, also restore the older folder as `path`.
    """
    # `tempfile` appends eight random characters. Match exactly eight, because with `*`, the pattern
    # of a bundle `m` would also match the temporary folders of a bundle `m.v2`.
    for lock in path.parent.glob(f".{glob.escape(path.name)}.{'?' * 8}/{_LOCK_NAME}"):
        # OSError: the export still runs and holds the lock, or another user owns the folder.
        with suppress(OSError), lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            older = lock.with_name("older")
            if older.exists() and not path.exists():  # killed between `atomic_folder`'s renames
                older.replace(path)
            shutil.rmtree(lock.parent)


def with_older_artifacts(
    manifest: Manifest, folder: Path, bundle: Path, report: Callable[[str], None]
) -> Manifest:
    """Keep models of an older bundle (folder with exported models) in the bundle that replaces it.

    A model of the older bundle is left out if the new bundle has a model of the same kind,
    precision and input size, or if one of the older model's files is missing or damaged. If the
    older bundle's manifest is damaged, or the bundle belongs to another checkpoint, model
    configuration or version of this package, none of its models is kept. The older bundle's sample
    images are kept in any case.

    Args:
        manifest: Manifest of the new bundle.
        folder: Folder of the new bundle. The older bundle's files are linked or copied into it.
        bundle: Folder of the older bundle. It may be absent.
        report: Function that is called with a message if the older bundle belongs to another
            checkpoint, model configuration or package version, and for each damaged model.

    Returns:
        The manifest of the new bundle, extended by the older models.
    """
    if (bundle / SAMPLES_FOLDER).is_dir():
        shutil.copytree(bundle / SAMPLES_FOLDER, folder / SAMPLES_FOLDER, copy_function=_link)
    try:
        older = read_manifest(bundle)
    except BundleError:
        return manifest
    if _model_of(older) != _model_of(manifest):
        report(f"replacing the bundle of another checkpoint, configuration or version in {bundle}")
        return manifest
    exported = {_key(artifact) for artifact in manifest.artifacts}
    new = {artifact.path: artifact for artifact in manifest.artifacts}
    kept = []
    for artifact in older.artifacts:
        if _key(artifact) in exported:
            continue
        try:
            verify_artifact(bundle, artifact)
        except BundleError as error:
            report(
                f"leaving out the older bundle's model in {artifact.precision} for inputs of "
                f"{artifact.bucket}: {error}"
            )
            continue
        entry = _with_file_of(new.get(artifact.path, artifact), artifact)
        for name in entry.paths:
            if not (folder / name).exists():
                _link(bundle / name, folder / name)
        kept.append(entry)
    return manifest.model_copy(update={"artifacts": (*kept, *manifest.artifacts)})


def _with_file_of(new: Artifact, older: Artifact) -> Artifact:
    """Return the manifest entry `older` with the hash and the input type of the entry `new`.

    Both entries have the same path, because fp32 and tf32 share a file. If one of them is exported
    again, the entry of the other must describe the new file.
    """
    update: dict[str, Any] = {"sha256": new.sha256, "input_dtype": new.input_dtype}
    if new.input_dtype != older.input_dtype:
        update["compiled"] = None  # it was compiled for the older input dtype
    return older.model_copy(update=update)


def sample_images(paths: Iterable[Path]) -> list[Path]:
    """Return those image files of `paths` that web browsers can display, at most the first six.

    Raises:
        ImageError: the content of one of the returned files is not an image.
    """
    shown = (path for path in paths if path.suffix.lower() in IMAGE_SUFFIXES)
    chosen = list(islice(shown, _SAMPLES))
    for path in chosen:
        with errors_of_file(path):
            read_header(path.read_bytes())
    return chosen


def copy_samples(samples: Iterable[Path], bundle: Path) -> None:
    """Replace a bundle's sample images. The server's web page offers them for detection.

    Args:
        samples: Image files to copy, as `sample_images` returns them.
        bundle: Folder of the bundle.
    """
    # Read all images first, because they may be the bundle's current sample images.
    contents: dict[str, bytes] = {}
    for path in samples:
        name = path.name
        while name in contents:  # an image of another folder
            name = f"_{name}"
        contents[name] = path.read_bytes()
    folder = bundle / SAMPLES_FOLDER
    with _locked(bundle.resolve()):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, content in contents.items():
            (folder / name).write_bytes(content)


def _model_of(manifest: Manifest) -> dict[str, Any]:
    """Return the manifest fields that identify a bundle's model and its exporter's version.

    Two bundles with equal fields contain the same model, exported by the same package version.
    """
    own: Any = {"artifacts": True, "provenance": {"checkpoint", "exported_at"}}
    return manifest.model_dump(exclude=own)


def _key(artifact: Artifact) -> tuple[str, ...]:
    return artifact.kind, artifact.precision, str(artifact.bucket)


def _link(source: str | Path, target: str | Path) -> None:
    """Create a hard link to a file, or a copy on file systems without hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
