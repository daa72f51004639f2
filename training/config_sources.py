"""Where a configuration's values come from: presets, YAML files, their bases, and overrides."""

import difflib
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from ..model.overrides import with_overrides
from ..model.strict_yaml import value_from_yaml

Values = dict[str, Any]
"""Keys and values of a section, as YAML gives them."""


class SourceError(Exception):
    """Values cannot be read; the message is one sentence that says why."""


def presets() -> tuple[str, ...]:
    """Names of the configurations that ship with the package."""
    folder = resources.files(__package__) / "presets"
    return tuple(
        sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))
    )


def preset_text(name: str) -> str:
    """The YAML of a preset."""
    return (resources.files(__package__) / "presets" / f"{name}.yaml").read_text()


def read_values(
    source: str, overrides: Sequence[str] = (), sections: Values | None = None
) -> Values:
    """Values of a preset or a YAML file over those of its base, with `key.path=value` overrides.

    The key `base` names a preset, or a file relative to the one that names it.

    Args:
        source: name of a preset, or path of a file.
        overrides: hold where the source says otherwise.
        sections: take the place of those of the source.

    Raises:
        SourceError: something is missing, is not YAML, or is its own base.
        OverrideError: an override is not of that form, or leads into a value.
    """
    return with_overrides({**_merged(source, Path(), ()), **(sections or {})}, overrides)


def _merged(source: str, folder: Path, above: tuple[str, ...]) -> Values:
    """Values of a source over those of its base; `above` are the sources it is a base of."""
    name = source if source in presets() else os.path.normpath(folder / source)
    if name in above:
        raise SourceError(f"{' has base '.join((*above, name))}: a configuration is its own base")
    values = _read(source, Path(name))
    base = values.pop("base", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise SourceError(f"{name}: base is {base!r}, but must be a preset or the path of a file")
    return _over(_merged(base, Path(name).parent, (*above, name)), values)


def _read(source: str, path: Path) -> Values:
    text: str | bytes
    if source in presets():
        text = preset_text(source)
    elif path.is_file():
        text = path.read_bytes()
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
        raise SourceError(f"{path} is empty; it must hold keys and values")
    if not isinstance(values, dict):
        raise SourceError(f"{path} must hold keys and values, not {type(values).__name__}")
    return values


def _over(base: Values, values: Values) -> Values:
    """A base with values laid over it, section by section."""
    merged = dict(base)
    for key, value in values.items():
        below = base.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            merged[key] = _over(below, value)
        else:
            merged[key] = value
    return merged
