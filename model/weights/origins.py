"""What is known of an origin of weights, and what a file of it becomes."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .files import WeightsError

Rules = Sequence[tuple[str, str]]
"""Regular expressions of whole names, and what the name is here; the first that fits applies."""

Settings = dict[str, Any]
"""Values of `ModelConfig` by dotted key."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """An implementation whose files are understood."""

    name: str
    signature: str
    """Regular expression of a name that every file of this origin has, and none of another."""
    rules: Rules
    ignored: str
    """Regular expression of names that detections do not depend on."""
    layout: Callable[[dict[str, Tensor], Mapping[str, Tensor]], dict[str, Tensor]]
    """Renamed tensors, and those of the file, to tensors laid out as ours."""
    conventions: Callable[[Settings, Mapping[str, Tensor]], Settings]
    """What files of this origin do not say but mean, by what they say and the file's tensors."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Tensors under our names and in our layout, and by what configuration they compute."""

    origin: str
    tensors: dict[str, Tensor]
    structure: Settings
    """What the tensors say themselves."""
    assumed: Settings
    """What only the origin's defaults say."""
    left_over: tuple[str, ...] = ()
    """Names in the file that detections do not depend on."""

    @property
    def settings(self) -> Settings:
        """All that is known or assumed."""
        return self.structure | self.assumed

    @property
    def has_heads(self) -> bool:
        """Whether there is more than a backbone."""
        return any(name.startswith(("rpn.", "roi_heads.")) for name in self.tensors)


def renamed(
    state: Mapping[str, Tensor], origin: Origin
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Tensors under our names, and the names that were left over.

    Raises:
        WeightsError: a name that detections may depend on has no place here.
    """
    tensors: dict[str, Tensor] = {}
    left_over, unknown = [], []
    for name, tensor in state.items():
        ours = _name_here(name, origin.rules)
        if re.fullmatch(origin.ignored, name):
            left_over.append(name)
        elif ours is None:
            unknown.append(name)
        elif ours in tensors and not torch.equal(tensors[ours], tensor):
            raise WeightsError(
                f"{name} differs from another tensor of the file that has the same place, "
                f"{ours}; heads that do not share their layers are not supported"
            )
        else:
            tensors[ours] = tensor
    if unknown:
        raise WeightsError(
            f"{listed(unknown)} of {origin.name} have no place in this model, which would compute "
            "something else without them; only Mask R-CNN on ResNet with FPN, C4 or C5 is supported"
        )
    return tensors, tuple(left_over)


def _name_here(name: str, rules: Rules) -> str | None:
    for pattern, replacement in rules:
        match = re.fullmatch(pattern, name)
        if match:
            return match.expand(replacement)
    return None


def listed(names: Sequence[str]) -> str:
    """The first few of many names."""
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")
