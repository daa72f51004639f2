"""Read data sets in YOLO's segmentation format: a YAML file, and a label file per image."""

import logging
import os
import reprlib
from collections.abc import Mapping
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ....model.bundle.manifest import Category
from ....model.config.strict_yaml import value_from_yaml
from ....model.image_limits import ImageError
from ....model.plurals import counted
from ..coco.annotations import FAR_OUTSIDE, MAX_EXTENT
from ..coco.dataset import DataError
from ..coco.numbers import integer_from
from ..folders import relative_name
from ..image_sizes import read_header_size
from .conversion import ConvertedImage, ForeignDataset, SourceSplit, UnusableSourceError
from .polygons import annotation_from_polygons
from .yolo_paths import FoundImages, find_images, label_paths, labels_without_image

logger = logging.getLogger(__name__)

_SPLITS = ("train", "val", "test")
# A label with a class and this number of values is a box without an outline.
_BOX_VALUES = 4
_USE_OF_EMPTY = "training leaves out images without objects unless data.keep_empty=true"


class _TextLoader(yaml.SafeLoader):
    """YAML loader that returns each scalar as the text in the file."""

    # Keep only the rule for the merge key `<<`. Other rules convert numbers, dates and booleans.
    yaml_implicit_resolvers = {"<": yaml.SafeLoader.yaml_implicit_resolvers["<"]}  # noqa: RUF012


def yolo_file(folder: Path) -> Path | None:
    """Return the YAML file of a YOLO folder, preferably `data.yaml`. None: there is none."""
    files = sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])
    files.sort(key=lambda path: path.stem != "data")
    return next((path for path in files if _is_yolo(path)), None)


def yolo(file: Path) -> ForeignDataset:
    """Find images and labels of the data set that a YAML file of YOLO describes.

    The value of each of the keys `train`, `val` and `test` is a folder of images, a text file that
    lists images, or a list of these. The labels of `images/a.jpg` are in `labels/a.txt`,
    `images/a.txt` or `images/labels/a.txt`.

    Raises:
        DataError: The file cannot be read, is invalid, or has no classes. No split has images,
            or `train` is listed but has no images. No image of `train` has a label file.
    """
    content = _read_yaml(file)
    found = _find_splits(file, content)
    images = {image for one in found.values() for image in one.files}
    paths = {image: next(filter(Path.is_file, label_paths(image)), None) for image in images}
    labels = {image: path for image, path in paths.items() if path is not None}
    splits = _source_splits(file, found, labels)
    for name, split in splits.items():
        _check_labels(file, name, split, labels)
    _warn_of_shared_images(file, splits)
    categories = _categories_from(content.get("names"), file)
    if (count := content.get("nc", len(categories))) != len(categories):
        text = f"nc is {count}, but `names` has {counted(len(categories), 'name')}; nc is ignored"
        logger.warning("%s: %s", file, text)
    known = {category.id for category in categories}
    read = partial(_convert, labels=labels, folder=file.parent, known=known)
    return ForeignDataset(categories, splits, read)


def _find_splits(file: Path, content: Mapping[Any, Any]) -> dict[str, FoundImages]:
    root = str(content.get("path") or "")
    given = {name: content[name] for name in _SPLITS if content.get(name)}
    found = {name: find_images(file.parent, root, value) for name, value in given.items()}
    missing = {name: value for name, value in given.items() if not found[name].files}
    missing_text = "; ".join(f"{name}: {value}" for name, value in missing.items())
    if len(missing) == len(given) or "train" in missing:
        raise DataError(
            f"{file}: no images found for {missing_text or 'train, val or test'}; give folders of "
            "images, or text files that list images, as paths relative to the folder of the YAML "
            "file"
        )
    if missing:
        logger.warning(
            "%s: no images found for %s; splits without images are left out", file, missing_text
        )
    return {name: images for name, images in found.items() if name not in missing}


def _source_splits(
    file: Path, found: Mapping[str, FoundImages], labels: Mapping[Path, Path]
) -> dict[str, SourceSplit]:
    """Return the images and faults of each split, by name of the split.

    The faults are the missing images, and the label files without an image.

    Args:
        file: YAML file. The names of label files in the faults are relative to its folder.
        found: Image files and missing images, by name of the split.
        labels: Label file by image file.
    """
    splits = {}
    reported: set[Path] = set()
    for name, (images, faults) in found.items():
        # The image folder is the deepest folder that contains all images of the split.
        root = Path(os.path.commonpath([image.parent for image in images]))
        alone = labels_without_image({image: labels[image] for image in images if image in labels})
        # Splits whose images are listed in text files can share folders, so report each label file
        # for one split only.
        if new := [path for path in alone if path not in reported]:
            reported.update(new)
            faults["files: image missing"] = [relative_name(p, file.parent) for p in new]
        splits[name] = SourceSplit(root, images, faults)
    return splits


def _check_labels(file: Path, name: str, split: SourceSplit, labels: Mapping[Path, Path]) -> None:
    """Log a warning if images of a split have no label file.

    Raises:
        DataError: No image of the split `train` has a label file.
    """
    without = [image for image in split.sources if image not in labels]
    if not without:
        return
    looked_for = relative_name(label_paths(without[0])[0], file.parent)
    counts = f"no label file for {len(without)} of {counted(len(split.sources), 'image')} of {name}"
    text = f"{counts}; looked for {looked_for}"
    if name == "train" and len(without) == len(split.sources):
        raise DataError(f"{file}: {text}; create this file and those of the other images")
    logger.warning("%s: %s; %s", file, text, _USE_OF_EMPTY)


def _warn_of_shared_images(file: Path, splits: Mapping[str, SourceSplit]) -> None:
    for (name, one), (other_name, other) in combinations(splits.items(), 2):
        if shared := sorted({*one.sources}.intersection(other.sources)):
            first = relative_name(shared[0], file.parent)
            text = f"{name} and {other_name} share {counted(len(shared), 'image')}, such as {first}"
            logger.warning("%s: %s; remove shared images from one of the splits", file, text)


def _is_yolo(path: Path) -> bool:
    try:
        content = _read_yaml(path)
    except DataError:
        # Treat an invalid `data.yaml` as the YAML file of YOLO, so that `yolo` raises the error.
        return path.stem == "data"
    return ("names" in content or path.stem == "data") and any(s in content for s in _SPLITS)


def _read_yaml(path: Path) -> dict[Any, Any]:
    try:
        text = path.read_bytes()
        content = value_from_yaml(text)
        if isinstance(content, dict) and "names" in content:
            # Read names as text, because `no` would become False, and `1e3` would become 1000.0.
            content["names"] = yaml.load(text, _TextLoader)["names"]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise DataError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a YAML file of YOLO: it must be a mapping with `names`")
    return content


def _categories_from(names: Any, file: Path) -> tuple[Category, ...]:
    """Return the categories for `names`: a list of names, or a dictionary of names by number."""
    pairs = {str(n): name for n, name in enumerate(names)} if isinstance(names, list) else names
    if (
        not isinstance(pairs, dict)
        or not pairs
        or not all(
            integer_from(str(n)) is not None and isinstance(name, str) for n, name in pairs.items()
        )
    ):
        given = "missing" if names is None else reprlib.repr(names)
        raise DataError(
            f"{file}: `names` must be a list of names, or map class numbers to names; it is {given}"
        )
    by_id = {int(number): name for number, name in pairs.items()}
    return tuple(Category(id=number, name=by_id[number]) for number in sorted(by_id))


def _convert(
    image: Path, labels: Mapping[Path, Path], folder: Path, known: set[int]
) -> ConvertedImage:
    """Return an image with the annotations from its label file. Invalid lines become faults.

    Args:
        image: Image file.
        labels: Label file by image file. An image without an entry has no objects.
        folder: Folder to which the paths in faults and errors are relative.
        known: Valid class numbers.

    Raises:
        UnusableSourceError: The image's header cannot be read.
    """
    try:
        # Coordinates in label files refer to the image after its EXIF rotation.
        height, width = read_header_size(image).upright
    except ImageError as error:
        raise UnusableSourceError(
            f"images: header not readable: {error}", relative_name(image, folder)
        ) from None
    annotations, faults = [], []
    path = labels.get(image)
    # Programs on Windows write a byte order mark.
    lines = path.read_text("utf-8-sig", errors="replace").splitlines() if path else []
    name = relative_name(path or image, folder)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        result = _annotation_from(line, height, width, known)
        if isinstance(result, str):
            faults.append((f"labels: {result}", f"{name}:{number}"))
        else:
            annotations.append(result)
    return ConvertedImage(None, height, width, annotations, faults)


def _annotation_from(line: str, height: int, width: int, known: set[int]) -> dict[str, Any] | str:
    """Return the COCO annotation for a line of a label file, or the reason why it is invalid.

    `height` and `width` are the size of the image in pixels; `known` are the valid class numbers.
    """
    try:
        number, *values = (float(word) for word in line.split())
    except ValueError:
        return "not a class number followed by coordinates"
    if number not in known:
        return "unknown class"
    if len(values) == _BOX_VALUES:
        return "box without an outline"
    if len(values) < 6 or len(values) % 2:
        return "polygon of fewer than three points, or with an odd number of coordinates"
    points = np.array(values).reshape(-1, 2)
    if not np.isfinite(points).all():
        return "not a class number followed by coordinates"
    if np.abs(points).max() > MAX_EXTENT:
        return FAR_OUTSIDE
    return annotation_from_polygons(int(number), [points * (width, height)])
