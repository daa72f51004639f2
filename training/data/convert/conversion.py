"""Write COCO annotation files for a data set of another format."""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from ....model.atomic_files import atomic_write
from ....model.bundle.manifest import Category
from ....model.plurals import counted
from ..coco.dataset import CocoContent, DataError, read_coco_file
from ..coco.splits import is_split_name


class UnusableSourceError(Exception):
    """The annotations of one image cannot be converted. The image is left out and counted."""

    def __init__(self, reason: str, name: str) -> None:
        super().__init__(f"{name}: {reason}")
        # Reason without details, so that images with equal reasons can be counted.
        self.reason = reason
        # Name of the annotation or image file.
        self.name = name


@dataclass(frozen=True, slots=True)
class ConvertedImage:
    """Image with its converted annotations."""

    # Path of the image file relative to `SourceSplit.images`. None: the image file is the file in
    # `SourceSplit.sources`, as in YOLO.
    file_name: str | None
    height: int
    width: int
    # COCO annotations without `id` and `image_id`.
    annotations: list[dict[str, Any]]
    # Reason and name of each object that was left out.
    faults: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class SourceSplit:
    """Images and annotation files of one split, in a format other than COCO."""

    # Image folder.
    images: Path
    # One file per image: its annotation file or, in YOLO, the image file. Images get ids in this
    # order.
    sources: tuple[Path, ...]
    # Names of missing files by reason.
    faults: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ForeignDataset:
    """Data set in a format other than COCO."""

    categories: tuple[Category, ...]
    splits: Mapping[str, SourceSplit]
    # Function that reads one of `SourceSplit.sources`. It may raise `DataError`, which ends the
    # conversion, or `UnusableSourceError`, which leaves out this image only.
    read: Callable[[Path], ConvertedImage]


@dataclass(frozen=True, slots=True)
class WrittenSplit:
    """Path of a written COCO file, and the numbers of its images, objects and crowds."""

    path: Path
    images: int
    objects: int
    crowds: int
    # Names of the entries that were left out, by reason.
    faults: Mapping[str, Sequence[str]]

    @property
    def counts(self) -> str:
        """Numbers of images, objects and crowds, as in `2 images, 1 object, 0 crowds`."""
        nouns = {"image": self.images, "object": self.objects, "crowd": self.crowds}
        return ", ".join(counted(number, noun) for noun, number in nouns.items())


def write_coco_files(
    dataset: ForeignDataset,
    folder: Path,
    *,
    overwrite: bool = False,
    on_image: Callable[[], object] = lambda: None,
) -> dict[str, WrittenSplit]:
    """Convert each split and write it to `<split>.json`, see `write_splits`.

    Args:
        dataset: The data set to convert.
        folder: Output folder. It is created if it does not exist.
        overwrite: Replace existing files.
        on_image: Called before the conversion of each image.

    Returns:
        Path and counts of the written file, by name of the split.

    Raises:
        DataError: An output file exists and `overwrite` is False, or an annotation file cannot be
            read or is invalid.
        OSError: A file cannot be written.
    """
    contents = {
        name: partial(source_content, dataset, split, on_image)
        for name, split in dataset.splits.items()
    }
    return write_splits(folder, contents, overwrite=overwrite)


def write_splits(
    folder: Path,
    contents: Mapping[str, Callable[[], CocoContent]],
    *,
    overwrite: bool,
    sources: Collection[Path] = (),
) -> dict[str, WrittenSplit]:
    """Write each split to `<split>.json`. Replace existing files only when all files are complete.

    If an error or a signal comes before the final renames, existing files are unchanged. If it
    comes between the renames, a mix of old and new files remains, in which training and validation
    images might overlap. Files of other splits must not list images of the new splits.

    Args:
        folder: Output folder. It is created if it does not exist.
        contents: By name of the split, a function that returns the content of the COCO file.
        overwrite: Replace existing files.
        sources: Files from which `contents` reads. They may list images of the new splits.

    Returns:
        Path and counts of the written file, by name of the split.

    Raises:
        DataError: An output file exists and `overwrite` is False, or the file of another split in
            `folder`, such as val.json or test2017.json, lists an image of the new splits.
        OSError: A file cannot be written.
    """
    paths = {name: folder / f"{name}.json" for name in contents}
    for path in paths.values():
        if path.exists() and not overwrite:
            raise DataError(f"{path} exists; choose another folder, or pass --overwrite")
    folder.mkdir(parents=True, exist_ok=True)
    written, images = {}, set()
    with ExitStack() as files:
        for name, path in paths.items():
            source = contents[name]()
            images |= _image_names(source.content)
            written[name] = _write(files.enter_context(atomic_write(path)), path, source)
        for path in _other_splits(folder, {*paths.values(), *sources}):
            if not images.isdisjoint(_images_listed_in(path)):
                raise DataError(
                    f"{path} lists some of the images of the new files; if an earlier conversion "
                    "or division wrote this file, delete it; otherwise, choose another folder"
                )
    return written


def _other_splits(folder: Path, known: Collection[Path]) -> list[Path]:
    """Return the files in `folder` with names of splits, such as val.json, except `known`."""
    paths = {path.resolve() for path in known}
    files = [file for file in folder.glob("*.json") if is_split_name(file.stem)]
    return [file for file in files if file.resolve() not in paths]


def _images_listed_in(path: Path) -> set[str]:
    """Return the file names of the images in a COCO file. Empty: it is not a COCO file."""
    try:
        return _image_names(read_coco_file(path))
    except DataError:
        return set()


def _image_names(content: Mapping[str, Any]) -> set[str]:
    return {str(image.get("file_name")) for image in content["images"]}


def write_coco_file(path: Path, source: CocoContent) -> WrittenSplit:
    """Write the content of a split to a COCO file atomically. Return its path and counts."""
    with atomic_write(path) as file:
        return _write(file, path, source)


def coco_json(source: CocoContent) -> bytes:
    """Return the content of a split as the bytes of a COCO file."""
    return json.dumps(source.content).encode()


def _write(file: BinaryIO, path: Path, source: CocoContent) -> WrittenSplit:
    content = source.content
    file.write(coco_json(source))
    # Flush to the disk now. Afterwards, only the rename can fail.
    file.flush()
    os.fsync(file.fileno())
    crowds = sum(annotation.get("iscrowd") == 1 for annotation in content["annotations"])
    objects = len(content["annotations"]) - crowds
    return WrittenSplit(path, len(content["images"]), objects, crowds, source.faults)


def source_content(
    dataset: ForeignDataset, split: SourceSplit, on_image: Callable[[], object] = lambda: None
) -> CocoContent:
    """Convert a split to the content of a COCO file. Call `on_image` before each image.

    Raises:
        DataError: An annotation file cannot be read or is invalid.
    """
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    faults: dict[str, list[str]] = defaultdict(list)
    faults.update({reason: [*names] for reason, names in split.faults.items()})
    for image_id, source in enumerate(split.sources, start=1):
        on_image()
        try:
            image = dataset.read(source)
        except UnusableSourceError as error:
            faults[error.reason].append(error.name)
            continue
        # In YOLO, an image can be in several splits with different image folders. `read` does not
        # know the split, so it returns `file_name` None.
        file_name = image.file_name or source.relative_to(split.images).as_posix()
        size = {"height": image.height, "width": image.width}
        images.append({"id": image_id, "file_name": file_name, **size})
        for annotation in image.annotations:
            annotations.append({"id": len(annotations) + 1, "image_id": image_id, **annotation})
        for reason, name in image.faults:
            faults[reason].append(name)
    content = {
        "info": {},
        "images": images,
        "annotations": annotations,
        "categories": [category.model_dump() for category in dataset.categories],
    }
    return CocoContent(content, faults)
