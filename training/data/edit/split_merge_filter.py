"""Split, merge and filter the content of COCO annotation files. Unknown keys are kept."""

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ....model.bundle.spec import MAX_PIXELS
from ..coco.annotations import InvalidAnnotationError, instance_from_annotation, is_possible_area
from ..coco.dataset import CocoContent, DataError, distinct_names
from ..coco.image_paths import find_image_paths
from ..coco.numbers import id_from, integer_from

# Suffix that Roboflow adds to image names. Augmented copies of an image differ only in the suffix.
_COPY_SUFFIX = re.compile(r"\.rf\.[0-9a-zA-Z]+(?=\.\w+$)")


def split_content(content: dict[str, Any], shares: Mapping[str, float]) -> dict[str, CocoContent]:
    """Divide a data set into parts by a hash of the image file names.

    An image therefore stays in its part when the data set grows. All augmented copies that Roboflow
    made of one image are in the same part.

    The following entries are dropped. The images are listed in the `faults` of the part to which
    they would belong:

    - images without id or file name
    - images with the same id as an earlier image
    - annotations of unknown or dropped images

    Args:
        content: The data set.
        shares: Share of the images, 0 to 1, by name of the part, such as `val`. The remaining
            images become the part `train`. Each part gets at least one annotated image. If too few
            images are annotated, the last parts in `shares` stay empty, but `train` still gets one.
            An image and its augmented copies count as one image.

    Returns:
        Content by name of the part, with `train` first.
    """
    hashes = [_hash_of(str(image.get("file_name"))) for image in content["images"]]
    triples = [*zip(content["images"], hashes, _image_faults(content["images"]), strict=True)]
    valid = [(image, value) for image, value, fault in triples if fault is None]
    annotated = {id_from(annotation.get("image_id")) for annotation in content["annotations"]}
    distinct = sorted({value for image, value in valid if id_from(image["id"]) in annotated})
    distinct = distinct or sorted({value for _, value in valid})
    bounds, low, total = {}, 0.0, 0.0
    for name, share in shares.items():
        total += share
        free = [value for value in distinct if value >= low]
        high = min(max(total, free[0] + 1e-12), distinct[-1]) if len(free) > 1 else low
        bounds[name] = (low, high)
        low = high
    parts = {}
    for name, (start, end) in {"train": (low, 1.0), **bounds}.items():
        faults: dict[str, list[str]] = defaultdict(list)
        for image, value, fault in triples:
            if fault is not None and start <= value < end:
                faults[fault].append(str(image.get("file_name") or image.get("id")))
        own = [image for image, value in valid if start <= value < end]
        parts[name] = CocoContent(_with_images(content, own), faults)
    return parts


def repeated_classes(content: dict[str, Any]) -> dict[str, list[int | str | None]]:
    """Return each name that several categories of a data set have, with these categories' ids."""
    ids: dict[str, list[int | str | None]] = defaultdict(list)
    for category in content["categories"]:
        ids[str(category.get("name"))].append(id_from(category.get("id")))
    return {name: own for name, own in ids.items() if len(own) > 1}


class Merged(NamedTuple):
    """Result of `merge_contents`: the merged data set, its image folder, and missing images."""

    # Deepest folder that contains all image folders. File names in `source` are relative to it.
    root: Path
    source: CocoContent
    # File names of images whose file does not exist.
    missing: list[str]


def merge_contents(sources: Sequence[tuple[Path, dict[str, Any]]]) -> Merged:
    """Join data sets. Classes of the same name become one, and images and annotations get new ids.

    All entries of the same image file become one image with all annotations of the file. Image
    files are located with `find_image_paths`. If a file is not found, its listed path is kept. The
    following entries are dropped, and listed in the `faults` of the result:

    - images without id or file name
    - images with the same id as an earlier image of the same data set
    - annotations of unknown images or categories
    - annotations that equal an earlier one of the same image in category, box, segmentation and
      `iscrowd`

    Args:
        sources: Image folder and content of each data set, at least one.

    Raises:
        DataError: A category has no id or name, or two categories of a data set have the same id.
    """
    root = Path(os.path.commonpath([folder.resolve() for folder, _ in sources]))
    categories: dict[str, dict[str, Any]] = {}
    images: dict[str, dict[str, Any]] = {}
    annotations: list[dict[str, Any]] = []
    seen: set[Any] = set()
    missing: list[str] = []
    faults: dict[str, list[str]] = defaultdict(list)
    for folder, content in sources:
        labels = _merge_categories(content["categories"], categories, folder)
        numbers: dict[int | str | None, int] = {}
        names = {name for i in content["images"] if isinstance(name := i.get("file_name"), str)}
        base = folder.resolve()
        paths = find_image_paths(base, names).paths
        for image in content["images"]:
            listed, old = image.get("file_name"), id_from(image.get("id"))
            if old is None or not isinstance(listed, str):
                faults["images: no id or no file name"].append(str(listed or old))
                continue
            path = paths.get(listed, base / listed.replace("\\", "/"))
            name = os.path.relpath(path, root)
            if old in numbers:
                faults["images: duplicate id"].append(name)
                continue
            if listed not in paths and name not in images:
                missing.append(name)
            merged = images.setdefault(name, {**image, "id": len(images) + 1, "file_name": name})
            numbers[old] = merged["id"]
        for annotation in content["annotations"]:
            image_id = numbers.get(id_from(annotation.get("image_id")))
            category_id = labels.get(id_from(annotation.get("category_id")))
            if image_id is None or category_id is None:
                faults["annotations: unknown image or category"].append(str(annotation.get("id")))
                continue
            if (key := (image_id, category_id, _shape_of(annotation))) in seen:
                faults["annotations: equal to another of the same image"].append(
                    str(annotation.get("id"))
                )
                continue
            seen.add(key)
            ids = {"id": len(annotations) + 1, "image_id": image_id, "category_id": category_id}
            annotations.append({**annotation, **ids})
    merged_content = {
        "info": {},
        "images": [*images.values()],
        "annotations": annotations,
        "categories": sorted(categories.values(), key=lambda category: category["id"]),
    }
    return Merged(root, CocoContent(merged_content, faults), missing)


def filter_content(
    content: dict[str, Any],
    *,
    classes: Collection[str] | None = None,
    min_area: float = 0.0,
    drop_empty: bool = False,
) -> CocoContent:
    """Return a data set with only the annotations of given classes and of a minimum area.

    Annotations of unknown categories are dropped, and listed in the `faults` of the result.

    Args:
        content: The data set.
        classes: Names of the classes to keep. Their ids do not change. None: all classes. If
            several categories have the same name, `NAME` selects all of them, and `NAME (ID)` one.
            If no class has exactly this name, blanks around the name are ignored.
        min_area: Minimum area of the annotations to keep, in square pixels.
        drop_empty: Drop images without a kept annotation, even if they had no annotations before.

    Raises:
        DataError: The data set lacks a class in `classes`.
    """
    categories = content["categories"]
    if classes is not None:
        selected = _selected_classes(categories, classes)
        categories = [category for n, category in enumerate(categories) if n in selected]
    ids = {id_from(category.get("id")) for category in categories}
    images = {id_from(image.get("id")): image for image in content["images"]}
    kept = [
        annotation
        for annotation in content["annotations"]
        if id_from(annotation.get("category_id")) in ids
        and (
            not min_area
            or _area_of(annotation, images.get(id_from(annotation.get("image_id")), {})) >= min_area
        )
    ]
    filtered = {**content, "categories": categories, "annotations": kept}
    if drop_empty:
        used = {id_from(annotation.get("image_id")) for annotation in kept}
        filtered = _with_images(
            filtered, [image for image in content["images"] if id_from(image.get("id")) in used]
        )
    listed = {id_from(category.get("id")) for category in content["categories"]}
    dropped = [
        str(annotation.get("id"))
        for annotation in content["annotations"]
        if id_from(annotation.get("category_id")) not in listed
    ]
    return CocoContent(filtered, {"annotations: unknown category": dropped} if dropped else {})


def _selected_classes(
    categories: Sequence[Mapping[str, Any]], classes: Collection[str]
) -> set[int]:
    """Return the indices of the categories that `classes` selects, see `filter_content`."""
    pairs = [(id_from(own.get("id")), str(own.get("name"))) for own in categories]
    indices: dict[str, list[int]] = defaultdict(list)
    for n, (_, name) in enumerate(pairs):
        indices[name].append(n)
    for n, name in enumerate(distinct_names(pairs)):
        indices.setdefault(name, [n])
    selected: set[int] = set()
    for wanted in classes:
        # Blanks can belong to the name, or separate it from a comma.
        texts = (wanted, wanted.rstrip(), wanted.strip())
        if not (found := [text for text in texts if text in indices]):
            raise DataError(
                f"class {wanted!r} does not exist; classes: {', '.join(map(repr, indices))}"
            )
        selected.update(indices[found[0]])
    return selected


def _image_faults(images: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """Return the reason why each image is invalid. None: the image is valid."""
    faults: list[str | None] = []
    ids: set[int | str] = set()
    for image in images:
        id_ = id_from(image.get("id"))
        if id_ is None or not isinstance(image.get("file_name"), str):
            faults.append("images: no id or no file name")
        elif id_ in ids:
            faults.append("images: duplicate id")
        else:
            faults.append(None)
            ids.add(id_)
    return faults


def _hash_of(file_name: str) -> float:
    """Hash a file name to [0, 1). Roboflow's augmented copies of an image get the same number."""
    name = _COPY_SUFFIX.sub("", file_name.replace("\\", "/"))
    # JSON can contain lone surrogates, which UTF-8 cannot encode.
    encoded = name.encode(errors="surrogatepass")
    return int.from_bytes(hashlib.sha256(encoded).digest()[:6]) / 2**48


def _with_images(content: dict[str, Any], images: list[dict[str, Any]]) -> dict[str, Any]:
    ids = {id_from(image.get("id")) for image in images}
    annotations = [a for a in content["annotations"] if id_from(a.get("image_id")) in ids]
    return {**content, "images": images, "annotations": annotations}


def _merge_categories(
    entries: Sequence[dict[str, Any]], categories: dict[str, dict[str, Any]], folder: Path
) -> dict[int | str | None, int]:
    """Merge a data set's categories into `categories` by name. Return a mapping of old to new ids.

    A category whose name is not in `categories` is added to `categories`. The new category keeps
    its id if the id is an integer that no category in `categories` has.

    Args:
        entries: Categories of the data set to add.
        categories: Merged categories so far, by name. New ones are added in place.
        folder: Image folder of the data set to add, for error messages.
    """
    taken = {category["id"] for category in categories.values()}
    labels: dict[int | str | None, int] = {}
    for entry in entries:
        name, old = entry.get("name"), id_from(entry.get("id"))
        if old is None:
            raise DataError(
                f"category {name!r} of the data set with image folder {folder} has no id; add an id"
            )
        if not isinstance(name, str):
            raise DataError(
                f"category {old} of the data set with image folder {folder} has no name; add a "
                "name, because categories are merged by name"
            )
        if old in labels:
            raise DataError(
                f"the data set with image folder {folder} has two categories with id {old}; change "
                "one of the two ids"
            )
        if name not in categories:
            is_free = isinstance(old, int) and old not in taken
            categories[name] = {**entry, "id": old if is_free else max(taken, default=0) + 1}
            taken.add(categories[name]["id"])
        labels[old] = categories[name]["id"]
    return labels


def _shape_of(annotation: Mapping[str, Any]) -> bytes | int:
    """Return a value that is equal for annotations with equal box, segmentation and `iscrowd`."""
    box, segmentation = annotation.get("bbox"), annotation.get("segmentation")
    if not box and not segmentation:
        return id(annotation)  # without box and segmentation, an annotation equals no other
    shape = json.dumps([box, segmentation, annotation.get("iscrowd")], sort_keys=True)
    # A hash takes less memory than the text.
    return hashlib.blake2b(shape.encode(), digest_size=16).digest()


def _area_of(annotation: Mapping[str, Any], image: Mapping[str, Any]) -> float:
    """Return the area of an annotation in square pixels.

    Return the first of these that is valid: the value of `area`, the area of the segmentation, the
    area of the box, 0. The area of the segmentation is valid only if `image`, the image's entry in
    `images`, has a valid size.
    """
    area, box = annotation.get("area"), annotation.get("bbox")
    height, width = (integer_from(image.get(key)) or 0 for key in ("height", "width"))
    has_size = min(height, width) > 0 and height * width <= MAX_PIXELS
    # Without a valid size, accept each area that is possible in an image of any shape.
    sides = (height, width) if has_size else (1, MAX_PIXELS)
    if is_possible_area(area, *sides):
        return float(area)  # type: ignore[arg-type]
    try:
        if has_size:
            measured = {"category_id": 1, "segmentation": annotation.get("segmentation")}
            return instance_from_annotation(measured, height, width, {1: 1})[0].area
    except InvalidAnnotationError:
        pass
    try:
        return float(box[2]) * float(box[3])  # type: ignore[index]
    except (TypeError, ValueError, IndexError, OverflowError):
        return 0.0
