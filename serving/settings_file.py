"""Settings of the server from a file of YAML."""

from pathlib import Path
from typing import Any

import click
import yaml
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError, to_json

from ..model.config_faults import sentence_from_fault
from ..model.strict_yaml import value_from_yaml
from .config import ServeFields


def settings_from_file(path: Path) -> dict[str, Any]:
    """The settings that a file has, by name.

    Raises:
        click.UsageError: the file is no YAML, or a key or value of it is not allowed.
    """
    try:
        values = value_from_yaml(path.read_text())
        values = {} if values is None else values
        text = to_json(values, inf_nan_mode="constants")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    except PydanticSerializationError:
        raise click.UsageError(
            f"{path} holds what is no value of a setting, as lists too deep within lists; it must "
            "be a mapping of settings to values, as in port: 8500"
        ) from None
    if not isinstance(values, dict):
        raise click.UsageError(f"{path} is no mapping of settings to values, as in port: 8500")
    try:  # as JSON, whose lists and texts are strictly what tuples and paths are made of
        fields = ServeFields.model_validate_json(text, strict=True)
    except ValidationError as error:
        fault = sentence_from_fault(error, ServeFields)
        raise click.UsageError(f"{path}: {fault}") from None
    return fields.model_dump(exclude_unset=True)
