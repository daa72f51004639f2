"""One-sentence error messages for invalid configurations."""

import difflib
from datetime import date
from itertools import accumulate

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from .reference import Key, sections


def validation_message(error: ValidationError, model: type[BaseModel]) -> str:
    """Describe the first error of a configuration in one sentence, with the allowed values.

    Args:
        error: error that pydantic raised.
        model: the validated configuration class.
    """
    return details_message(error.errors()[0], model)


def details_message(details: ErrorDetails, model: type[BaseModel]) -> str:
    """Describe one error of a configuration in one sentence, with the allowed values.

    Args:
        details: an element of `ValidationError.errors()`.
        model: the validated configuration class.
    """
    name = _key_of(details)
    match details["type"]:
        case "extra_forbidden" | "invalid_key":
            return _unknown_key_message(details, model)
        case "value_error":
            message = details["msg"].removeprefix("Value error, ")
            return f"{name}: {message}" if name else message
        case "path_type" | "string_type" if isinstance(details["input"], int | float | date):
            problem = f"is {details['input']}, which YAML does not read as text"
            return f"{name} {problem}; put the text in quotes, as in 'KEY=\"TEXT\"'"
        case "missing":
            problem = "is missing"
        case _:
            problem = f"is {details['input']!r}"
    return f"{name} {problem}; {_allowed_values(details, model)}"


def _key_of(details: ErrorDetails) -> str:
    return ".".join(map(str, details["loc"]))


def _unknown_key_message(details: ErrorDetails, model: type[BaseModel]) -> str:
    name = _key_of(details)
    *above, leaf = map(str, details["loc"])  # a key in YAML may contain dots: do not split `name`
    known = _all_keys(model)
    elsewhere = [other for other in known if other.rpartition(".")[2] == leaf]
    close = elsewhere or difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    names = _names_within(".".join(above), model)
    allowed = f"allowed here: {', '.join(names)}" if names else _allowed_values(details, model)
    return f"unknown key {name}{hint}; {allowed}"


def _allowed_values(details: ErrorDetails, model: type[BaseModel]) -> str:
    """Describe the allowed values of the configuration key that a validation error names."""
    known = _all_keys(model)
    prefixes = list(accumulate(map(str, details["loc"]), "{}.{}".format))
    # The path of an error in an element of a list begins with the list's key.
    name = next((prefix for prefix in prefixes if prefix in known), None)
    if name is None:
        return f"it is a section with the keys {', '.join(_names_within(prefixes[-1], model))}"
    of = "" if name == prefixes[-1] else f" for {name}"
    return f"allowed{of}: {known[name].allowed}"


def _all_keys(model: type[BaseModel]) -> dict[str, Key]:
    return {f"{s.name}.{key.name}".lstrip("."): key for s in sections(model) for key in s.keys}


def _names_within(section: str, model: type[BaseModel]) -> tuple[str, ...]:
    """Return the names of the keys and subsections of a configuration section (group of keys).

    They are in order of definition. If there is no section of this name, return an empty tuple.
    """
    names = (tuple(s.model.model_fields) for s in sections(model) if s.name == section)
    return next(names, ())
