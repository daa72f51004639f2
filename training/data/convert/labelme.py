"""Read annotations of LabelMe: a JSON file per image."""

import base64
import io
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ....model.bundle.manifest import Category
from ....model.image_files import IMAGE_FILE_SUFFIXES
from ....model.image_limits import ImageError
from ....model.masks import coco_from_rle, rle_from_mask
from ..coco.annotations import FAR_OUTSIDE, MAX_EXTENT
from ..coco.dataset import DataError, read_json
from ..coco.image_paths import existing_path
from ..coco.numbers import integer_from
from ..folders import relative_name
from ..image_sizes import read_header_size
from .conversion import ConvertedImage, ForeignDataset, SourceSplit, UnusableSourceError
from .polygons import Points, annotation_from_polygons

# Labels that mark regions without objects.
_NO_OBJECTS = frozenset({"__ignore__", "_background_"})
# Number of vertices of the polygon that replaces a circle.
_CIRCLE_POINTS = 64
# Split of the files in a folder, by the folder's name in lower case.
_SPLIT_BY_FOLDER = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val",
    "test": "test",
}  # fmt: skip
_ONLY_SPLIT = "all"
# Types of shapes that have an area.
_AREA_TYPES = frozenset({"polygon", "rectangle", "oriented_rectangle", "circle", "mask"})


@dataclass(frozen=True, slots=True)
class _LabelmeFile:
    shapes: Sequence[Mapping[str, Any]]
    image_path: str
    # Size in pixels. None: the file does not contain it.
    height: int | None
    width: int | None
    # Whether the file contains the image in base64.
    has_image_data: bool


def is_labelme(content: Any) -> bool:
    """Return whether the content of a JSON file is in the format of LabelMe."""
    return isinstance(content, Mapping) and isinstance(content.get("shapes"), list)


def is_labelme_file(path: Path) -> bool:
    """Return whether a file exists and is a JSON file in the format of LabelMe."""
    try:
        return is_labelme(read_json(path))
    except DataError:
        return False


def labelme(folder: Path, files: Iterable[Path]) -> ForeignDataset:
    """Read the LabelMe files `files` of the data set in `folder`.

    A file below a folder such as `train`, `val` or `test` belongs to the split of this name. All
    other files belong to the split `all`. In a file, shapes with the same label and `group_id` form
    one object. Shapes without `group_id` and shapes of type `mask` are separate objects. Labels
    become classes in alphabetical order.

    Raises:
        DataError: No file has a labelled shape that encloses an area, such as a `polygon`.
    """
    parsed: dict[Path, _LabelmeFile | str] = {path: _parsed(path) for path in files}
    files_read = (file for file in parsed.values() if not isinstance(file, str))
    shapes = [shape for file in files_read for shape in file.shapes]
    labels = {_label_of(shape) for shape in shapes if _type_of(shape) in _AREA_TYPES}
    labels -= {"", *_NO_OBJECTS}
    if not labels:
        types = ", ".join(sorted(_AREA_TYPES))
        raise DataError(
            f"the LabelMe files in {folder} have no labelled shape that encloses an area"
            f"{_found_shapes(shapes)}; draw shapes of type {types}, and give each a label"
        )
    categories = tuple(Category(id=n, name=name) for n, name in enumerate(sorted(labels), start=1))
    ids = {category.name: category.id for category in categories}
    by_split: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(parsed):
        by_split[_split_of(path.relative_to(folder))].append(path)
    splits = {name: SourceSplit(folder, tuple(paths)) for name, paths in by_split.items()}
    return ForeignDataset(
        categories, splits, lambda path: _convert(folder, path, parsed[path], ids)
    )


def _found_shapes(shapes: Iterable[Mapping[str, Any]]) -> str:
    """Return a text with the number of shapes of each type. Empty: there are no shapes."""
    kinds = Counter(
        _type_of(shape) + ("" if _label_of(shape) else " without label") for shape in shapes
    )
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return f"; their shapes: {counts}" if counts else ""


def _split_of(path: Path) -> str:
    names = (_SPLIT_BY_FOLDER.get(part.lower()) for part in path.parts[:-1])
    return next((name for name in names if name), _ONLY_SPLIT)


def _parsed(path: Path) -> _LabelmeFile | str:
    """Read a LabelMe file. If it is invalid, return the reason as a string."""
    try:
        content = read_json(path)
    except DataError:
        return "files: not readable as JSON"
    if not is_labelme(content):
        return "files: not in the format of LabelMe"
    return _LabelmeFile(
        shapes=[shape for shape in content["shapes"] if isinstance(shape, Mapping)],
        image_path=str(content.get("imagePath") or ""),
        height=integer_from(content.get("imageHeight")) or None,
        width=integer_from(content.get("imageWidth")) or None,
        has_image_data=bool(content.get("imageData")),
    )


def _convert(
    folder: Path, path: Path, file: _LabelmeFile | str, ids: Mapping[str, int]
) -> ConvertedImage:
    name = path.relative_to(folder).as_posix()
    if isinstance(file, str):
        raise UnusableSourceError(file, name)
    image = _image_of(path, file.image_path, folder)
    if image is None:
        hint = "; the embedded imageData is not read, so save the image beside the JSON file"
        raise UnusableSourceError(f"files: image missing{hint * file.has_image_data}", name)
    height, width = file.height, file.width
    if height is None or width is None:
        try:
            height, width = read_header_size(image).upright
        except ImageError:
            raise UnusableSourceError("files: image not readable", name) from None
    annotations, faults = [], []
    groups: dict[tuple[str, str], list[Points]] = defaultdict(list)
    for number, shape in enumerate(file.shapes, start=1):
        label = _label_of(shape)
        if label in _NO_OBJECTS:
            continue
        try:
            if _type_of(shape) not in _AREA_TYPES:
                raise _InvalidShapeError(f"shape_type {_type_of(shape)} has no area")
            if label not in ids:
                raise _InvalidShapeError("no label")
            if shape.get("shape_type") == "mask":
                annotations.append(_annotation_from_mask(shape, ids[label], height, width))
                continue
            group = shape.get("group_id")
            # Each shape without a group is an object of its own.
            key = f"shape {number}" if group is None else f"group {group}"
            polygon = _polygon_from(shape)
            if not np.abs(polygon).max() <= MAX_EXTENT * max(height, width):
                raise _InvalidShapeError(FAR_OUTSIDE)
            groups[label, key].append(polygon)
        except _InvalidShapeError as error:
            faults.append((f"shapes: {error}", f"{name}:{number}"))
    annotations += [annotation_from_polygons(ids[k[0]], group) for k, group in groups.items()]
    return ConvertedImage(relative_name(image, folder), height, width, annotations, faults)


def _image_of(path: Path, image_path: str, folder: Path) -> Path | None:
    """Return the path of the image that a LabelMe file annotates. None: the image is missing.

    Args:
        path: LabelMe file.
        image_path: Value of the key `imagePath` in this file.
        folder: Folder of the data set.
    """
    # Search several folders, because files are often moved after annotation. `imagePath` may come
    # from Windows, so it may contain backslashes.
    written = image_path.replace("\\", "/")
    name = written.rpartition("/")[2]
    places = [path.parent, path.parent / "images", path.parent.parent / "images"]
    places += [folder / "images" / path.parent.name, folder / "images", folder]
    candidates = [(path.parent, written)] if written else []
    candidates += [(place, name) for place in places if name]
    candidates += [
        (place, path.stem + suffix) for place in places for suffix in IMAGE_FILE_SUFFIXES
    ]
    return next(filter(None, (existing_path(*candidate) for candidate in candidates)), None)


class _InvalidShapeError(Exception):
    """A shape in a LabelMe file is invalid.

    The message depends only on the kind of fault, so that a report can count the faults of each
    kind.
    """


def _label_of(shape: Mapping[str, Any]) -> str:
    """Return a shape's label, stripped of leading and trailing blanks. Empty: it has no label.

    Labels of a type other than string or number count as missing.
    """
    label = shape.get("label")
    is_label = isinstance(label, (str, int, float)) and not isinstance(label, bool)
    return str(label).strip() if is_label else ""


def _type_of(shape: Mapping[str, Any]) -> str:
    return str(shape.get("shape_type") or "polygon")


def _polygon_from(shape: Mapping[str, Any]) -> Points:
    try:
        points = np.array(shape.get("points"), np.float64).reshape(-1, 2)
    except (TypeError, ValueError, OverflowError):
        raise _InvalidShapeError("points are not pairs of numbers") from None
    if not np.isfinite(points).all():
        raise _InvalidShapeError("points are not pairs of numbers")
    kind = _type_of(shape)
    if kind == "rectangle" and len(points) == 2:
        (left, top), (right, bottom) = points
        return np.array([[left, top], [right, top], [right, bottom], [left, bottom]])
    if kind == "circle" and len(points) == 2:
        centre, edge = points
        angles = np.linspace(0, 2 * math.pi, _CIRCLE_POINTS, endpoint=False)
        circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        polygon: Points = centre + np.hypot(*(edge - centre)) * circle
        return polygon
    if len(points) < 3:
        raise _InvalidShapeError("polygon of fewer than three points")
    return points


def _annotation_from_mask(
    shape: Mapping[str, Any], category_id: int, height: int, width: int
) -> dict[str, Any]:
    """Convert a shape of type `mask` (a PNG in base64, and its box) to a COCO annotation."""
    try:
        with Image.open(io.BytesIO(base64.b64decode(shape["mask"])), formats=["PNG"]) as image:
            crop = np.asarray(image.convert("L")) != 0
        left, top = (round(value) for value in shape["points"][0])
        mask = np.zeros((height, width), np.bool_)
        mask[top : top + crop.shape[0], left : left + crop.shape[1]] = crop
    except Exception as error:  # on damaged data, decoders raise exceptions of any type
        raise _InvalidShapeError("mask is damaged, or does not fit the image") from error
    if not mask.any():
        raise _InvalidShapeError("mask is empty")
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    x, y = int(columns[0]), int(rows[0])
    return {
        "category_id": category_id,
        "bbox": [x, y, int(columns[-1]) + 1 - x, int(rows[-1]) + 1 - y],
        "area": int(mask.sum()),
        "iscrowd": 0,
        "segmentation": coco_from_rle(rle_from_mask(mask)),
    }
