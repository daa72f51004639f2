"""Configuration of the training devices: keys `device` and `processes`. Does not import torch."""

import os
import re
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator

# Kind of device, or GPU indices.
Device = Literal["auto", "cpu", "cuda"] | tuple[int, ...]


def device_from(value: Any) -> Device:
    """Validate a value of the configuration key `device`.

    Args:
        value: "auto", "cpu", "cuda", or GPU indices as text ("0,1"), a number or a sequence.

    Returns:
        "auto", "cpu", "cuda", or a tuple of GPU indices.

    Raises:
        ValueError: The value has another form, or contains a GPU twice.
    """
    if value in ("auto", "cpu", "cuda"):
        return cast(Device, value)
    # YAML reads `0` as a number and `0,1` as text, so convert both to text.
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError(f"{value!r} is neither auto, cpu, cuda nor GPU numbers such as 0,1")
    numbers = tuple(map(int, text.split(",")))
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"{text} names a GPU twice")
    return numbers


DeviceField = Annotated[Device, BeforeValidator(device_from)]


def number_of_processes(device: Device, processes: int | None) -> int:
    """Return the number of processes that train on this machine.

    Args:
        device: Key `device` of the configuration.
        processes: Key `processes`. None: one process per GPU index in `device`, or one process if
            `device` has no GPU indices.

    Raises:
        ValueError: `device` lists GPU indices, and `processes` differs from their count.
    """
    gpus = len(device) if isinstance(device, tuple) else processes or 1
    if processes not in (None, gpus):
        raise ValueError(
            f"processes={processes} differs from the number of GPUs in device ({gpus}); set "
            f"processes={gpus}, or do not set it"
        )
    return gpus


def processes_to_start(device: Device, processes: int | None) -> int:
    """Return the number of training processes that the current process must start.

    If the result is 1, the current process starts no other process and runs the training. The
    result is 1 if the run has only one process, or if `torchrun` or `maskrcnn train` started the
    current process as one of several.

    Raises:
        ValueError: `device` lists GPU indices, and `processes` differs from their count.
    """
    return 1 if "WORLD_SIZE" in os.environ else number_of_processes(device, processes)
