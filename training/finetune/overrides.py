"""Configuration values that the user sets for a fine-tuning. Does not import torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...model.config.error_messages import details_message
from ...model.config.overrides import OverrideError, values_by_key, with_overrides
from ..config import ConfigError, TrainConfig, load_config
from ..config_sources import CONFIG_FILE


def given_values(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Validate overrides of `TrainConfig`. Return only the overridden values, by dotted key.

    A value that contradicts the default of another key is accepted, because the other key can be
    fitted to the value.

    Args:
        path: Path of the data set, used as the required paths in `data.train`.
        overrides: Overrides of the form `key.path=value`.

    Raises:
        ConfigError: An override does not have the form `key.path=value`, a key is unknown, or a
            value does not have the type of its key or is out of range. Or a key of `data.train` or
            `data.val` is overridden.
    """
    try:
        given = values_by_key(with_overrides({}, overrides))
        for key in given:
            if key.startswith(("data.train", "data.val")):
                raise ConfigError(
                    f"{key} cannot be set, because DATA determines the images and annotations; to "
                    "set it, train with a YAML file (maskrcnn train FILE). To train without "
                    "validation, set evaluation.skip_test=true"
                )
        paths = {"images": str(path), "annotations": str(path)}
        TrainConfig.model_validate(with_overrides({"data": {"train": paths}}, overrides))
    except OverrideError as error:
        raise ConfigError(str(error)) from None
    except ValidationError as error:
        # Ignore contradictions between keys, because a fitted value of the other key may agree.
        for details in error.errors():
            if details["type"] != "value_error" or details["loc"] == ("device",):
                raise ConfigError(details_message(details, TrainConfig)) from None
    return given


def output_folder(path: Path, given: dict[str, Any]) -> Path:
    """Return the folder of the run: `output_dir` if set, else `runs/finetune-NAME`.

    NAME is the name of the data set's folder. `path` is the path of the data set. `given` contains
    the values that the user has set, by dotted key.
    """
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    return Path(given.get("output_dir") or Path("runs") / f"finetune-{folder.name}")


def resumed_config(output: Path, overrides: Sequence[str], given: Mapping[str, Any]) -> TrainConfig:
    """Load the configuration of the run in the folder `output`, and apply overrides.

    If the overrides change the length of the run, but not `solver.steps`, the steps are scaled to
    the new length.

    Args:
        output: Folder of the run.
        overrides: Values that the user sets, as `key.path=value`.
        given: The values in `overrides` by dotted key.

    Raises:
        ConfigError: The run's configuration file is missing or invalid, or an override is invalid.
    """
    source = str(output / CONFIG_FILE)
    config = load_config(source, overrides)
    if "solver.steps" in given:
        return config
    solver = config.solver
    steps = load_config(source).solver.with_length(solver.max_iterations).steps
    return config.model_copy(update={"solver": solver.model_copy(update={"steps": steps})})
