"""Configuration overrides by dotted key, such as `backbone.stride_in_1x1=true`."""

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from .strict_yaml import value_from_yaml


class OverrideError(ValueError):
    """An override is malformed, or sets a key `a.b` although `a` is a value, not a section."""


def checked_overrides(overrides: Iterable[str]) -> tuple[str, ...]:
    """Check the types of `key.path=value` overrides, and return them as a tuple.

    Raises:
        OverrideError: `overrides` is a string, bytes or a mapping, is not iterable, or has an item
            that is not a string.
    """
    if isinstance(overrides, str | bytes | Mapping) or not isinstance(overrides, Iterable):
        raise OverrideError(f"the overrides are {overrides!r}; give a list of strings")
    overrides = tuple(overrides)  # an iterator can be read only once
    for override in overrides:
        if not isinstance(override, str):
            raise OverrideError(f"the override {override!r} is not a string, as in 'seed=1'")
    return overrides


def with_overrides(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Apply `key.path=value` overrides to a copy of a nested mapping, and return the copy.

    The value of each override is parsed as YAML.

    Raises:
        OverrideError: an override is not of the form `key.path=value`, its value is not valid YAML,
            or it sets a key such as `a.b` although `a` is a value, not a section (group of keys).
            Or `checked_overrides` rejects `overrides`.
    """
    result = dict(values)
    for override in checked_overrides(overrides):
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise OverrideError(f"override {override!r} is not of the form key.path=value")
        try:
            result = with_value(result, key, value_from_yaml(text))
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            raise OverrideError(
                f"the value of override {override!r} is not YAML: {reason}"
            ) from None
    return result


def with_value(values: Mapping[str, Any], key: str, value: Any, prefix: str = "") -> dict[str, Any]:
    """Return a copy of a nested mapping in which the value at a dotted key is `value`.

    `prefix`, such as `roi.`, stands before the keys in an error message.

    Raises:
        OverrideError: the key is nested, such as `a.b`, but `a` is a value, not a section (group of
            keys).
    """
    first, _, rest = key.partition(".")
    if not rest:
        return {**values, first: value}
    section = values.get(first)
    if section is None:
        section = {}
    if not isinstance(section, Mapping):
        raise OverrideError(
            f"{prefix}{key} cannot be set, because {prefix}{first} is a value, not a section"
        )
    return {**values, first: with_value(section, rest, value, f"{prefix}{first}.")}


def values_by_key(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested values into one dictionary by dotted key.

    `prefix`, such as `roi.`, is prepended to each key.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= values_by_key(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
