"""Choose the training and the validation set of a fine-tuning from the splits of a data set."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import ConfigError, DatasetConfig
from ..config_sources import CONFIG_FILE
from ..data.coco.dataset import CocoContent, DataError
from ..data.coco.splits import splits_named
from ..data.convert.conversion import coco_json, write_coco_file
from ..data.convert.labelme import is_labelme_file
from ..data.convert.layouts import DataLayout, LayoutSplit
from ..data.edit.split_merge_filter import split_content

# Share of the training images that is held out if there is no validation split.
_HELD_OUT = 0.1


@dataclass(frozen=True, slots=True)
class ChosenSplits:
    """Training and validation set of a fine-tuning, as COCO files."""

    train: DatasetConfig
    # None: there is only one image.
    val: DatasetConfig | None
    # Description for the user, such as "training: split train; validation: split valid".
    description: str
    # Names of the entries that were left out, by reason.
    faults: Mapping[str, Sequence[str]]
    # Annotations to write, by path of the COCO file.
    converted: Mapping[Path, CocoContent]

    def write(self) -> None:
        """Write the converted annotations.

        Raises:
            ConfigError: A file exists, and is not one that an earlier call may have written.
        """
        for path, source in self.converted.items():
            # After the first call, a training writes its configuration beside the folder of `path`.
            is_of_run = (path.parent.parent / CONFIG_FILE).exists()
            if path.exists() and not is_of_run and path.read_bytes() != coco_json(source):
                raise ConfigError(
                    f"{path} exists, and the run would replace it; move it, or choose another "
                    "folder for the run with output_dir=FOLDER"
                )
        for path, source in self.converted.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_coco_file(path, source)


def choose_splits(layout: DataLayout, folder: Path) -> ChosenSplits:
    """Choose the training and the validation set, and convert their annotations if necessary.

    If there is no validation split, 10 % of the training images are held out for validation. They
    are selected by a hash of the file name, so they stay held out when images are added to the data
    set. Other splits, such as `test`, are not used.

    Args:
        layout: Layout and splits of the data set, from `recognize_layout`.
        folder: Folder for COCO annotation files. Each split that must be converted gets a file with
            the name of the split, such as `valid.json`. If there is no validation split, the
            training and the held-out images get the files `train.json` and `val.json`.

    Raises:
        DataError: There are several splits, and no name contains "train". More than one split could
            be the training or the validation set. The annotations cannot be read.
        ConfigError: The data set has files in `folder`, and annotations must be written.
    """
    names = list(layout.splits)
    train = _split_named(names, "train") or (names[0] if len(names) == 1 else None)
    if train is None:
        raise DataError(
            f"the data set has the splits {', '.join(names)}, none of which is named train; train "
            "with a YAML file that sets data.train and data.val"
        )
    val = _split_named([name for name in names if name != train], "val")
    if val is None:
        return _held_out(train, layout.splits[train], folder)
    faults: dict[str, Sequence[str]] = {}
    converted: dict[Path, CocoContent] = {}
    configs = {}
    for name in (train, val):
        split = layout.splits[name]
        configs[name] = split.config
        if split.convert is not None:
            source = split.convert()
            faults |= {f"{name}: {reason}": names for reason, names in source.faults.items()}
            path = _checked(folder / f"{name}.json", split)
            configs[name] = DatasetConfig(images=split.images, annotations=path)
            converted[path] = CocoContent(source.content, {})
    return ChosenSplits(
        train=configs[train],
        val=configs[val],
        description=f"training: split {train}; validation: split {val}",
        faults=faults,
        converted=converted,
    )


def _split_named(names: Sequence[str], word: str) -> str | None:
    """Return the name that equals `word`, else the shortest name that contains it, else None.

    The case of the names is ignored.

    Raises:
        DataError: Several names contain `word`, none equals it, and the shortest is not unique.
    """
    matches = splits_named(names, word)
    if len(matches) > 1 and len(matches[0]) == len(matches[1]) and matches[0].lower() != word:
        raise DataError(
            f"the splits {' and '.join(matches[:2])} could each be the {word} set; train with a "
            "YAML file that sets data.train and data.val"
        )
    return matches[0] if matches else None


def _checked(path: Path, split: LayoutSplit) -> Path:
    """Check that annotations can be written to `path`. Return `path`.

    Raises:
        ConfigError: `split` has files in the folder of `path`, or `path` is a file of LabelMe.
    """
    inputs = [split.images, split.annotations]
    # The annotations of LabelMe are a folder, and `path` can be below it.
    if split.annotations.is_dir() and is_labelme_file(path):
        inputs.append(path)
    for file in inputs:
        if file.resolve().is_relative_to(path.parent.resolve()):
            raise ConfigError(
                f"{file} is in {path.parent}, where the run writes its own annotations; choose "
                "another folder for the run with output_dir=FOLDER"
            )
    return path


def _held_out(name: str, split: LayoutSplit, folder: Path) -> ChosenSplits:
    source = split.content()
    parts = split_content(source.content, {"val": _HELD_OUT})
    faults: dict[str, list[str]] = defaultdict(list)
    for found in (source, *parts.values()):
        for reason, names in found.faults.items():
            faults[reason].extend(names)
    train, val = (CocoContent(parts[part].content, {}) for part in ("train", "val"))
    counts = [len(part.content["images"]) for part in (train, val)]
    parts_to_write = {"train": train, "val": val} if counts[1] else {"train": train}
    converted = {
        _checked(folder / f"{part}.json", split): content
        for part, content in parts_to_write.items()
    }
    configs = [DatasetConfig(images=split.images, annotations=path) for path in converted]
    description = f"in the split {name}, {counts[1]} of {sum(counts)} images are held out"
    return ChosenSplits(
        train=configs[0],
        val=configs[1] if counts[1] else None,
        description=f"no validation split; {description} for validation, by hash of the file name",
        faults=faults,
        converted=converted,
    )
