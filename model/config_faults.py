"""What is wrong with a configuration, in one sentence."""

import difflib
from itertools import accumulate

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from .config_reference import Key, sections


def sentence_from_fault(error: ValidationError, model: type[BaseModel]) -> str:
    """The first fault of a validation as one sentence.

    Args:
        error: raised by the validation.
        model: what was validated.
    """
    fault = error.errors()[0]
    name = _name_of(fault)
    match fault["type"]:
        case "extra_forbidden" | "invalid_key":
            return _unknown(fault, model)
        case "value_error":
            message = fault["msg"].removeprefix("Value error, ")
            return f"{name}: {message}" if name else message
        case "missing":
            found = "is missing"
        case _:
            found = f"is {fault['input']!r}"
    return f"{name} {found}; {_allowed(fault, model)}"


def _name_of(fault: ErrorDetails) -> str:
    return ".".join(map(str, fault["loc"]))


def _unknown(fault: ErrorDetails, model: type[BaseModel]) -> str:
    name = _name_of(fault)
    *above, leaf = map(str, fault["loc"])  # which may have dots in it
    known = _keys(model)
    elsewhere = [other for other in known if other.rpartition(".")[2] == leaf]
    close = elsewhere or difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    allowed = ", ".join(_names_within(".".join(above), model))
    return f"unknown key {name}{hint}; allowed here: {allowed}"


def _allowed(fault: ErrorDetails, model: type[BaseModel]) -> str:
    """What the key at fault may be; the fault may lie within its value."""
    known = _keys(model)
    prefixes = list(accumulate(map(str, fault["loc"]), "{}.{}".format))
    name = next((prefix for prefix in prefixes if prefix in known), None)
    if name is None:
        return f"it is a section with the keys {', '.join(_names_within(prefixes[-1], model))}"
    of = "" if name == prefixes[-1] else f" for {name}"
    return f"allowed{of}: {known[name].allowed}"


def _keys(model: type[BaseModel]) -> dict[str, Key]:
    return {f"{s.name}.{key.name}".lstrip("."): key for s in sections(model) for key in s.keys}


def _names_within(section: str, model: type[BaseModel]) -> tuple[str, ...]:
    """Names of a section's keys and sections, in order."""
    return next(tuple(s.model.model_fields) for s in sections(model) if s.name == section)
