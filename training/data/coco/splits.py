"""Find the splits of a data set folder: pairs of an annotation file and an image folder."""

from pathlib import Path

from ...config import DatasetConfig
from .dataset import DataError

_PREFIX = "instances_"


def find_splits(folder: Path) -> dict[str, DatasetConfig]:
    """Find the annotation files `annotations/[instances_]<split>.json` and their image folders.

    The image folder of a split is the one with the longest name that its name ends with (`val2014/`
    for `minival2014`), else `images/`. Splits without an image folder are skipped.

    Raises:
        DataError: There is no split.
    """
    files = sorted((folder / "annotations").glob("*.json"))
    # COCO also publishes files with captions and keypoints here, which are ignored.
    files = [file for file in files if file.name.startswith(_PREFIX)] or files
    if not files:
        raise DataError(
            f"{folder} has no annotations/*.json; pass a folder that has them, or --images and "
            "--annotations"
        )
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir())
    splits = {}
    for file in files:
        split = file.stem.removeprefix(_PREFIX)
        candidates = [name for name in folders if split.endswith(name)] or (
            ["images"] if "images" in folders else []
        )
        if candidates:
            images = folder / max(candidates, key=len)
            splits[split] = DatasetConfig(images=images, annotations=file)
    if not splits:
        names = " or ".join(f"{file.stem.removeprefix(_PREFIX)}/" for file in files)
        raise DataError(
            f"{folder} has annotations but no image folder {names}; pass another folder, or "
            "--images and --annotations"
        )
    return splits


def find_validation_split(folder: Path) -> DatasetConfig:
    """Return the split `val`, else the only split with `val` in its name, else the only split.

    Raises:
        DataError: There is no split, or several match.
    """
    splits = find_splits(folder)
    names = [s for s in splits if s == "val"] or [s for s in splits if "val" in s] or [*splits]
    if len(names) > 1:
        raise DataError(
            f"{folder} has the splits {', '.join(splits)}; select one with --images and "
            "--annotations"
        )
    return splits[names[0]]
