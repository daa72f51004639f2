"""Reference of all configuration keys: meaning, allowed values and default of each."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python


@dataclass(frozen=True)
class Key:
    """Description of a configuration key that holds a value, not a section (group of keys)."""

    # Without its section, such as `norm_eps` of `backbone.norm_eps`.
    name: str
    meaning: str
    # Allowed values in words, such as `whole number, >= 1`.
    allowed: str
    required: bool
    # None if `required`.
    default: Any


@dataclass(frozen=True)
class ConfigSection:
    """Description of a configuration section (group of keys), without its subsections."""

    # Dotted path; empty for the top level.
    name: str
    meaning: str
    model: type[BaseModel]
    keys: tuple[Key, ...]


def sections(model: type[BaseModel], name: str = "", meaning: str = "") -> Iterator[ConfigSection]:
    """Yield descriptions of a configuration class and its subsections, in order of definition.

    Args:
        model: configuration class.
        name: dotted path of the section that the class describes; empty for the top level.
        meaning: description of that section. If it is empty, the docstring of the class is used.
    """
    inner: list[tuple[str, type[BaseModel], str]] = []
    keys: list[Key] = []
    for field_name, field in model.model_fields.items():
        own_meaning = _meaning_of(field_name, model)
        section = _section_in(field.annotation)
        if section is None:
            required = field.is_required()
            default = None if required else field.get_default(call_default_factory=True)
            keys.append(Key(field_name, own_meaning, _allowed(field), required, default))
        else:
            inner.append((f"{name}.{field_name}".lstrip("."), section, own_meaning))
    yield ConfigSection(name, meaning or _paragraph(model.__doc__), model, tuple(keys))
    for inner_name, section, own_meaning in inner:
        yield from sections(section, inner_name, own_meaning)


def text_from_value(value: Any) -> str:
    """Format a configuration value as YAML, as in a file or after `key=` in an override."""
    plain = to_jsonable_python(value)
    return plain if isinstance(plain, str) else json.dumps(plain)


def _paragraph(text: str | None) -> str:
    return " ".join((text or "").split())


def _meaning_of(field: str, model: type[BaseModel]) -> str:
    # If a subclass overrides only a field's default, its parent has the field's docstring.
    owners = [base for base in model.__mro__ if issubclass(base, BaseModel)]
    fields = (owner.model_fields[field] for owner in owners if field in owner.model_fields)
    return _paragraph(next((f.description for f in fields if f.description), None))


def _section_in(annotation: Any) -> type[BaseModel] | None:
    kinds = (kind for kind in _alternatives(annotation) if isinstance(kind, type))
    return next((kind for kind in kinds if issubclass(kind, BaseModel)), None)


def _allowed(field: FieldInfo) -> str:
    kinds = [arg for arg in _alternatives(field.annotation) if arg is not NoneType]
    bounds = [_bound(rule) for rule in field.metadata]
    words = ", ".join([*map(_kind, kinds), *filter(None, bounds)])
    return f"{words}, or null" if NoneType in _alternatives(field.annotation) else words


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


_KINDS = {bool: "true | false", int: "whole number", float: "number", str: "text", Path: "path"}
_SIGNS = {"ge": ">= {}", "gt": "> {}", "le": "<= {}", "lt": "< {}", "multiple_of": "multiple of {}"}


def _kind(annotation: Any) -> str:
    """Describe a type annotation in words, such as `list of 3 numbers`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(args[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin is tuple:
        count = "" if args[-1] is Ellipsis else f"{len(args)} "
        return f"list of {count}{_plural(args[0])}"
    if origin is dict:
        return f"{_plural(args[1])} by name"
    if (fields := getattr(annotation, "_fields", None)) is not None:
        return f"[{', '.join(fields)}]"
    return _KINDS.get(annotation) or str(annotation.__name__)


def _plural(annotation: Any) -> str:
    """Describe a type annotation in words, as a plural with its bounds, as in `numbers > 0`."""
    kind = _kind(annotation)
    plural = f"{kind}s" if kind in (*_KINDS.values(), "mapping") else kind
    fields = (x for x in getattr(annotation, "__metadata__", ()) if isinstance(x, FieldInfo))
    bounds = (_bound(rule) for field in fields for rule in field.metadata)
    return " ".join([plural, *bounds])


def _bound(rule: Any) -> str:
    """Describe a pydantic constraint, as in `>= 1`. Return "" if it is not a bound."""
    for name, sign in _SIGNS.items():
        if hasattr(rule, name):
            return sign.format(getattr(rule, name))
    return "not empty" if hasattr(rule, "min_length") else ""
