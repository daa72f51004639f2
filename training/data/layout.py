"""Where the images and the annotation files of a data set folder are."""

from pathlib import Path

from ..config import DatasetConfig
from .coco import DataError

_PREFIX = "instances_"


def find_splits(folder: Path) -> dict[str, DatasetConfig]:
    """The splits of a folder laid out as `annotations/[instances_]<split>.json` and `<split>/`.

    Where there are files that begin with `instances_`, others (captions, key points) are no splits.
    A split that has no image folder of its own takes the one whose name its own ends with, as
    `minival2014` does `val2014`, or else `images/`; without one it is left out.

    Raises:
        DataError: there is no split.
    """
    files = sorted((folder / "annotations").glob("*.json"))
    files = [file for file in files if file.name.startswith(_PREFIX)] or files
    if not files:
        raise DataError(
            f"{folder} has no annotations/*.json; give such a folder, or --images and --annotations"
        )
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir())
    splits = {}
    for file in files:
        split = file.stem.removeprefix(_PREFIX)
        fitting = [name for name in folders if split.endswith(name)] or (
            ["images"] if "images" in folders else []
        )
        if fitting:
            images = folder / max(fitting, key=len)
            splits[split] = DatasetConfig(images=images, annotations=file)
    if not splits:
        names = " or ".join(f"{file.stem.removeprefix(_PREFIX)}/" for file in files)
        raise DataError(
            f"{folder} has annotations but no images: no folder {names}; give another folder, or "
            "--images and --annotations"
        )
    return splits


def find_validation_split(folder: Path) -> DatasetConfig:
    """The split of a folder that is named `val`, the only one with that in its name, or the only.

    Raises:
        DataError: there is no split, or several of which none stands out.
    """
    splits = find_splits(folder)
    fitting = [s for s in splits if s == "val"] or [s for s in splits if "val" in s] or [*splits]
    if len(fitting) > 1:
        raise DataError(
            f"{folder} has the splits {', '.join(splits)}; name the one to measure on with "
            "--images and --annotations"
        )
    return splits[fitting[0]]
