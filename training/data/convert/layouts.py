"""Recognise the layout of a data set folder: COCO, Roboflow, CVAT, LabelMe or YOLO."""

import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ...config import DatasetConfig
from ..coco.dataset import CocoContent, CocoDataset, DataError, read_coco_file, read_json
from ..coco.numbers import id_from
from ..coco.splits import annotation_files, find_splits, image_folder, pair_splits, splits_named
from ..folders import files_below
from .conversion import ForeignDataset, source_content
from .labelme import is_labelme, labelme
from .yolo import yolo, yolo_file

_ROBOFLOW_FILE = "_annotations.coco.json"
# Recognition of a layout reads at most `_OWN_SAMPLES` JSON files directly in the data set folder,
# and at most `_SAMPLES` JSON files at any depth.
_OWN_SAMPLES = 20
_SAMPLES = 5


@dataclass(frozen=True, slots=True)
class LayoutSplit:
    """Split of a data set whose layout was recognised."""

    images: Path
    # COCO file, YAML file of YOLO, or folder of LabelMe files.
    annotations: Path
    # Function that returns the annotations as the content of a COCO file. None: `annotations` is a
    # COCO file that can be used unchanged.
    convert: Callable[[], CocoContent] | None = None

    @property
    def config(self) -> DatasetConfig:
        """Paths of the split's image folder and annotations (not always in COCO format)."""
        return DatasetConfig(images=self.images, annotations=self.annotations)

    def content(self) -> CocoContent:
        """Return the split's annotations as the content of a COCO file."""
        if self.convert is not None:
            return self.convert()
        return CocoContent(read_coco_file(self.annotations), {})

    def load(self, on_broken: Literal["skip", "refuse"] = "skip") -> CocoDataset:
        """Read and validate the split's annotations. If necessary, convert them to COCO format.

        Args:
            on_broken: "skip": skip invalid entries with a warning. "refuse": raise `DataError` if
                an entry is invalid.

        Raises:
            DataError: The conversion fails, or `CocoDataset` rejects the annotations.
        """
        source = None if self.convert is None else self.convert()
        return CocoDataset(self.config, on_broken, source)


@dataclass(frozen=True, slots=True)
class DataLayout:
    """Recognised data set: the name of its layout, and its splits."""

    name: str
    splits: Mapping[str, LayoutSplit]


def recognize_layout(path: Path) -> DataLayout:
    """Recognise the layout of a data set, and find its splits.

    `path` is the data set's folder, YAML file (YOLO) or COCO file. The images of a COCO file must
    be in the folder of this file or in its subfolders.

    Raises:
        DataError: The layout is unknown, or the data set is incomplete.
    """
    if path.is_file() and path.suffix.lower() in (".yaml", ".yml"):
        return _foreign("YOLO", yolo(path), path)
    if path.is_file() and path.suffix.lower() == ".json":
        return DataLayout("COCO", _splits_beside_images(path.parent, {path.stem: path}))
    if not path.is_dir():
        problem = "is not a folder" if path.exists() else "does not exist"
        remedy = "give the folder of a data set"
        # `is_zipfile` reads pipes and devices without end.
        if path.is_file() and zipfile.is_zipfile(path):
            remedy = "unpack the archive, and give the unpacked folder"
        raise DataError(f"{path} {problem}; {remedy}")
    if files := _roboflow_files(path):
        return DataLayout("COCO as exported by Roboflow", _roboflow_splits(files))
    coco = annotation_files(path)
    # Files `instances_*.json` count as COCO without being read, because they may have hundreds of
    # megabytes.
    if coco and (coco[0].name.startswith("instances_") or not is_labelme(_content_of(coco[0]))):
        return _coco_layout(path)
    if (file := yolo_file(path)) is not None:
        return _foreign("YOLO", yolo(file), file)
    json_files = _json_files(path)
    own = [file for file in json_files if file.parent == path]
    chosen = {*own[:_OWN_SAMPLES], *json_files[:_SAMPLES]}
    samples = {json_file: _content_of(json_file) for json_file in sorted(chosen)}
    if any(map(is_labelme, samples.values())):
        return _foreign("LabelMe", labelme(path, json_files), path)
    files = {
        one.stem: one
        for one, content in samples.items()
        if one.parent == path and isinstance(content, dict) and "annotations" in content
    }
    damaged = [one for one, content in samples.items() if one.parent == path and content is None]
    if damaged and (files or (path / damaged[0].stem).is_dir()):
        read_json(damaged[0])  # probably the COCO file of a split; raises the error
    if files:
        return DataLayout("COCO", _splits_beside_images(path, files))
    # Archives often contain a single folder that holds the data set, so search this folder. Ignore
    # `runs`, the default folder for training runs.
    folders = [p for p in path.iterdir() if p.is_dir() and not p.name.startswith((".", "__"))]
    folders = [folder for folder in folders if folder.name != "runs"]
    if len(folders) == 1:
        return recognize_layout(folders[0])
    raise DataError(
        f"{path} has none of the known layouts: COCO (annotations/instances_*.json), Roboflow "
        f"(train/{_ROBOFLOW_FILE}), CVAT (annotations/instances_default.json and images/), LabelMe "
        "(a JSON file per image), YOLO (data.yaml); pass the folder that directly contains "
        "these files"
    )


def find_validation_split(path: Path) -> LayoutSplit:
    """Return the validation split of a data set folder, or of a YAML file of YOLO.

    The validation split is `val`. If `val` is missing, it is the only split with `val` in its name.
    If no name contains `val`, it is the only split. The case of the names is ignored.

    Raises:
        DataError: The layout is unknown, the data set is incomplete, or the choice is not unique.
    """
    splits = recognize_layout(path).splits
    names = splits_named(splits, "val") or [*splits]
    if len(names) > 1 and names[0].lower() != "val":
        raise DataError(
            f"{path} has several splits: {', '.join(splits)}; if they are in COCO format, select "
            "one with --images and --annotations"
        )
    return splits[names[0]]


def _foreign(name: str, dataset: ForeignDataset, annotations: Path) -> DataLayout:
    converters = {s: partial(source_content, dataset, files) for s, files in dataset.splits.items()}
    return DataLayout(
        name,
        {
            split: LayoutSplit(files.images, annotations, converters[split])
            for split, files in dataset.splits.items()
        },
    )


def _coco_layout(folder: Path) -> DataLayout:
    splits = _layout_splits(find_splits(folder))
    # CVAT is recognised by images in `images/` or its subfolders.
    is_cvat = all(folder / "images" in (s.images, s.images.parent) for s in splits.values())
    return DataLayout("COCO as exported by CVAT" if is_cvat else "COCO", splits)


def _splits_beside_images(folder: Path, files: Mapping[str, Path]) -> dict[str, LayoutSplit]:
    """Return the splits of a data set whose COCO files are directly in its folder.

    `folder` is the folder of the data set, and is searched for image folders. `files` maps the
    names of splits to COCO files.
    """
    if len(files) > 1:
        return _layout_splits(pair_splits(folder, files))
    return {
        split: LayoutSplit(image_folder(folder, split, file, files) or folder, file)
        for split, file in files.items()
    }


def _layout_splits(configs: Mapping[str, DatasetConfig]) -> dict[str, LayoutSplit]:
    return {name: LayoutSplit(c.images, c.annotations) for name, c in configs.items()}


def _roboflow_files(folder: Path) -> dict[str, Path]:
    files = [*folder.glob(f"*/{_ROBOFLOW_FILE}"), *folder.glob(_ROBOFLOW_FILE)]
    return {"all" if file.parent == folder else file.parent.name: file for file in sorted(files)}


def _roboflow_splits(files: Mapping[str, Path]) -> dict[str, LayoutSplit]:
    contents = {name: read_coco_file(file) for name, file in files.items()}
    groups = _group_categories(list(contents.values()))
    return {
        name: LayoutSplit(file.parent, file, partial(_without, contents[name], groups))
        for name, file in files.items()
    }


def _group_categories(contents: Sequence[Mapping[str, Any]]) -> frozenset[int | str | None]:
    """Return the ids of categories that are not classes, but only group other categories.

    A group has no annotations, has the supercategory "none", and is itself the supercategory of
    another category. Roboflow adds such a category with id 0.

    `contents` holds one parsed COCO file per split.
    """
    used = {id_from(a.get("category_id")) for c in contents for a in c["annotations"]}
    categories = [category for c in contents for category in c["categories"]]
    parents = [category.get("supercategory") for category in categories]
    return frozenset(
        id_
        for c in categories
        if (id_ := id_from(c.get("id"))) not in used
        and c.get("name") in parents
        and c.get("supercategory") == "none"
    )


def _without(content: dict[str, Any], groups: frozenset[int | str | None]) -> CocoContent:
    kept = [c for c in content["categories"] if id_from(c.get("id")) not in groups]
    return CocoContent({**content, "categories": kept}, {})


def _json_files(folder: Path) -> list[Path]:
    files = (path for path in files_below(folder) if path.suffix == ".json")
    return sorted(path for path in files if not path.name.startswith("."))


def _content_of(path: Path) -> Any:
    """Return the content of a JSON file. None: the file cannot be read, or is not JSON."""
    try:
        return read_json(path)
    except DataError:
        return None
