"""Choose the training and the validation set of a recognised data set."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import DatasetConfig
from ..data.coco.dataset import DataError, SourceContent
from ..data.coco.numbers import id_from
from ..data.convert.conversion import write_coco_file
from ..data.convert.layouts import DataLayout, LayoutSplit

# Share of the images that is held out for validation if there is only one split.
_HELD_OUT = 0.1
# Suffix that Roboflow adds to the name of an image. Augmented copies differ only in it.
_COPY_SUFFIX = re.compile(r"\.rf\.[0-9a-zA-Z]+(?=\.\w+$)")


@dataclass(frozen=True, slots=True)
class ChosenSplits:
    """Training and validation set of a fine-tuning, as COCO files."""

    train: DatasetConfig
    # None: there is only one image.
    val: DatasetConfig | None
    # Description for the user, such as "train: split train; validation: split valid".
    description: str
    # Names of the source's entries that were left out, by reason.
    faults: Mapping[str, Sequence[str]]


def choose_splits(layout: DataLayout, folder: Path) -> ChosenSplits:
    """Choose the training and the validation set, and write the converted annotations.

    If there is no validation split, 10 % of the training images are held out by a hash of their
    file names, so that a larger version of the data set holds out the same ones. A split `test` is
    not used.

    Args:
        layout: The data set.
        folder: Folder for annotation files that must be converted or divided.

    Raises:
        DataError: Several splits may be the training set, or the annotations cannot be read.
    """
    names = list(layout.splits)
    train = _only(names, "train") or (names[0] if len(names) == 1 else None)
    if train is None:
        raise DataError(
            f"the data set has the splits {', '.join(names)}, none of which is named train; train "
            "with a YAML file that sets data.train and data.val"
        )
    val = _only([name for name in names if name != train], "val")
    if val is None:
        return _held_out(train, layout.splits[train], folder)
    faults: dict[str, Sequence[str]] = {}
    return ChosenSplits(
        train=_prepared(train, layout.splits[train], folder, faults),
        val=_prepared(val, layout.splits[val], folder, faults),
        description=f"training: split {train}; validation: split {val}",
        faults=faults,
    )


def hold_out(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide the content of a COCO file into a training and a validation set.

    The validation set has the images of which the hash of the file name is in the first tenth, and
    at least one image if there are two.
    """
    images = content["images"]
    hashes = [_hash_of(str(image.get("file_name"))) for image in images]
    limit = _HELD_OUT
    if len(set(hashes)) > 1:
        # At least one source image on either side.
        limit = min(max(limit, min(hashes) + 1e-12), max(hashes))
    is_held_out = [value < limit for value in hashes]
    parts = []
    for part in (False, True):
        chosen = [i for i, held in zip(images, is_held_out, strict=True) if held is part]
        ids = {id_from(image.get("id")) for image in chosen}
        annotations = [a for a in content["annotations"] if id_from(a.get("image_id")) in ids]
        parts.append({**content, "images": chosen, "annotations": annotations})
    return parts[0], parts[1]


def _hash_of(file_name: str) -> float:
    """Return a number in [0, 1) that depends on the name of the source image only."""
    name = _COPY_SUFFIX.sub("", file_name.replace("\\", "/").rpartition("/")[2])
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6]) / 2**48


def _only(names: Sequence[str], word: str) -> str | None:
    """Return the name that is `word`, else the shortest that contains it. None: there is none."""
    matches = [name for name in names if word in name.lower()]
    matches.sort(key=lambda name: (name.lower() != word, len(name)))
    if len(matches) > 1 and len(matches[0]) == len(matches[1]) and matches[0].lower() != word:
        raise DataError(
            f"the splits {' and '.join(matches[:2])} may both be the {word} set; train with a YAML "
            "file that sets data.train and data.val"
        )
    return matches[0] if matches else None


def _prepared(
    name: str, split: LayoutSplit, folder: Path, faults: dict[str, Sequence[str]]
) -> DatasetConfig:
    """Return the paths of a split. Write its annotations if they must be converted."""
    if split.convert is None:
        return split.config
    source = split.convert()
    faults |= {f"{name}: {reason}": names for reason, names in source.faults.items()}
    return _written(folder / f"{name}.json", source, split.images)


def _written(path: Path, source: SourceContent, images: Path) -> DatasetConfig:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_coco_file(path, source)
    return DatasetConfig(images=images, annotations=path)


def _held_out(name: str, split: LayoutSplit, folder: Path) -> ChosenSplits:
    source = split.content()
    train, val = (SourceContent(part, {}) for part in hold_out(source.content))
    counts = [len(part.content["images"]) for part in (train, val)]
    description = f"only one split, {name}: {counts[1]} of {sum(counts)} images are held out"
    return ChosenSplits(
        train=_written(folder / "train.json", train, split.images),
        val=_written(folder / "val.json", val, split.images) if counts[1] else None,
        description=f"{description} for validation, by a hash of the file name",
        faults=source.faults,
    )
