"""Read configuration values from presets and YAML files. Merge bases and apply overrides."""

import difflib
import os
import zipfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from ..model.config.overrides import with_overrides
from ..model.config.strict_yaml import value_from_yaml
from ..model.shell_commands import shell_path

# File in `output_dir` with the configuration of a run.
CONFIG_FILE = "config.yaml"

# Nested mapping from configuration keys to values, as parsed from YAML.
Values = dict[str, Any]


class SourceError(Exception):
    """A configuration file is missing or is not a YAML mapping, or its key `base` is invalid."""


def presets() -> tuple[str, ...]:
    """Return the names of the presets, which are the YAML files in `training/presets`."""
    folder = resources.files(__package__) / "presets"
    return tuple(
        sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))
    )


def preset_text(name: str) -> str:
    """Return the YAML text of the preset `name`."""
    return (resources.files(__package__) / "presets" / f"{name}.yaml").read_text()


def read_values(source: str, overrides: Sequence[str], sections: Values | None) -> Values:
    """Read the values of a preset or YAML file and of its base, and apply overrides.

    The key `base` is the name of a preset, or the path of a YAML file relative to the file with
    this key. The base supplies the values of keys that the file does not set. An empty mapping in
    the file replaces the base's mapping. If the file sets `solver.max_iterations`, the base's
    `solver.epochs` is not used. The merged values are not validated.

    Args:
        source: Name of a preset, or path of a YAML file.
        overrides: Overrides of the form `key.path=value`.
        sections: Values of top-level sections by name, such as `model`. They replace these sections
            of `source` before the overrides are applied.

    Raises:
        SourceError: A file is missing or is not a YAML mapping, its key `base` is not text, or it
            is its own base, directly or through other files.
        OverrideError: An override does not have the form `key.path=value`, or it sets a key such
            as `a.b` although `a` is a value, not a section.
    """
    return with_overrides({**_merged(source, Path(), ()), **(sections or {})}, overrides)


def _merged(source: str, folder: Path, above: tuple[str, ...]) -> Values:
    # `above` holds the names of the sources whose `base` led to this source. If it contains the
    # name of this source already, the bases form a cycle.
    name = source if source in presets() else os.path.normpath(folder / source)
    if name in above:
        raise SourceError(
            f"{' has base '.join((*above, name))}: these bases form a cycle; remove the key `base` "
            "from one of these configurations"
        )
    values = _read(source, Path(name))
    base = values.pop("base", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise SourceError(f"{name}: base is {base!r}, not the name of a preset or path of a file")
    solver = values.get("solver")
    if isinstance(solver, dict) and "max_iterations" in solver:
        # If the base's `epochs` were kept, it would replace `max_iterations`.
        values["solver"] = {"epochs": None, **solver}
    return _overlay(_merged(base, Path(name).parent, (*above, name)), values)


def _read(source: str, path: Path) -> Values:
    text: str | bytes
    if source in presets():
        text = preset_text(source)
    # `is_zipfile` reads pipes and devices without end.
    elif path.is_file() and zipfile.is_zipfile(path):
        raise SourceError(f"'{path}' is an archive; unpack it, and give the folder or file in it")
    elif path.is_file():
        text = path.read_bytes()
    elif path.is_dir():
        remedy = f"to train on the data set in it, run `maskrcnn train finetune {shell_path(path)}`"
        if (path / CONFIG_FILE).is_file():
            remedy = f"give the configuration file of the run in it, {path / CONFIG_FILE}"
        raise SourceError(f"'{path}' is a folder, neither a file nor a preset; {remedy}")
    else:
        close = difflib.get_close_matches(source, presets(), n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise SourceError(
            f"'{path}' is neither a file nor a preset{hint}; presets: {', '.join(presets())}"
        )
    try:
        values = value_from_yaml(text)
    except yaml.YAMLError as error:
        raise SourceError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        raise SourceError(f"{path} is empty; it must be a mapping of keys to values")
    if not isinstance(values, dict):
        raise SourceError(
            f"{path} is a {type(values).__name__}; it must be a mapping of keys to values"
        )
    return values


def _overlay(base: Values, values: Values) -> Values:
    """Return a copy of `base` updated with `values`.

    Nested mappings are merged recursively. An empty mapping in `values` replaces that of `base`.
    """
    merged = base | values
    for key, value in values.items():
        if isinstance(below := base.get(key), dict) and isinstance(value, dict) and value:
            merged[key] = _overlay(below, value)
    return merged
