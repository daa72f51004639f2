"""Configuration values set one by one, as in `backbone.stride_in_1x1=true`."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from .config import FrozenConfig
from .strict_yaml import value_from_yaml


class OverrideError(ValueError):
    """An override is not of the form `key.path=value`, or leads into a value."""


def with_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Nested values with `key.path=value` overrides applied; values are YAML.

    Raises:
        OverrideError: an override has no such form, or its key leads into a value.
    """
    result = dict(values)
    for override in overrides:
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


def with_value(values: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Nested values with the one at a dotted key set.

    Raises:
        OverrideError: the key leads into a value.
    """
    first, _, rest = key.partition(".")
    if not rest:
        return {**values, first: value}
    section = values.get(first)
    if section is None:
        section = {}
    if not isinstance(section, Mapping):
        raise OverrideError(f"{key}: {first} is a value, not a section")
    return {**values, first: with_value(section, rest, value)}


def values_by_key(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted key."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= values_by_key(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def value_at(config: FrozenConfig, key: str) -> Any:
    """Value of a configuration at a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def text_from_value(value: Any) -> str:
    """A value as an override says it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{','.join(map(text_from_value, value))}]"
    return f"{value:.8g}" if isinstance(value, float) else str(value)
