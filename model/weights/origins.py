"""Programs that write weights files (origins), and renaming of their tensors for this model."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..bundle.spec import ResizeRule
from ..plurals import abbreviated
from .files import WeightsError

# Renaming rules: (regular expression of a whole tensor name, our name). The first match applies.
Rules = Sequence[tuple[str, str]]

# Values of `ModelConfig`, and of `InputConfig` below `preprocessing`, by dotted key.
Settings = dict[str, Any]

# Maximum number of convolutions of a box or mask head that the renaming rules cover.
MAX_HEAD_CONVS = 8


@dataclass(frozen=True, kw_only=True)
class WeightsOrigin:
    """Framework whose weights files can be read, with the rules to convert them."""

    name: str
    # Regular expression of a tensor name. Every file of this origin has such a tensor. Files of
    # other origins do not.
    signature: str
    rules: Rules
    # Regular expression of the names of tensors that do not affect detections.
    ignored: str
    # Converts renamed tensors to our layout. Arguments: renamed tensors, tensors of the file.
    layout: Callable[[dict[str, Tensor], Mapping[str, Tensor]], dict[str, Tensor]]
    # Returns settings that files of this origin imply but do not store. Arguments: settings
    # inferred from the tensors, tensors of the file.
    conventions: Callable[[Settings, Mapping[str, Tensor]], Settings]
    # Rule by which this implementation resizes images.
    resize: ResizeRule = "pillow"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Tensors of a weights file, in this program's names and layout, with the model's settings."""

    origin: str
    tensors: dict[str, Tensor]
    # Settings that were inferred from names and shapes of the tensors, or are stated in the
    # checkpoint or in detectron2's `config.yaml`.
    structure: Settings
    # Assumed settings: defaults of the origin, or values of the published model in `zoo.py`.
    assumed: Settings
    # Names of tensors in the file that do not affect detections.
    ignored: tuple[str, ...] = ()

    @property
    def settings(self) -> Settings:
        """Settings of the model and its input. Those in `structure` override those in `assumed`."""
        return self.assumed | self.structure

    @property
    def has_heads(self) -> bool:
        """Whether the tensors include an RPN or RoI heads, not only a backbone."""
        return any(name.startswith(("rpn.", "roi_heads.")) for name in self.tensors)


def rename_tensors(
    state: Mapping[str, Tensor], origin: WeightsOrigin
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Rename a file's tensors to the names of this program's model.

    Tensors that do not affect detections are left out.

    Args:
        state: tensors of the file, by the names that they have in the file.
        origin: program that wrote the file, with its renaming rules.

    Returns:
        tensors by this model's names, and the names of the ignored tensors in the file.

    Raises:
        WeightsError: a tensor that may affect detections has no counterpart in this model, or two
            tensors with different values have the same counterpart.
    """
    tensors: dict[str, Tensor] = {}
    ignored, unknown = [], []
    for name, tensor in state.items():
        matches = ((re.fullmatch(pattern, name), new) for pattern, new in origin.rules)
        ours = next((match.expand(new) for match, new in matches if match), None)
        if re.fullmatch(origin.ignored, name):
            ignored.append(name)
        elif ours is None:
            unknown.append(name)
        elif ours in tensors and not torch.equal(tensors[ours], tensor):
            raise WeightsError(
                f"tensor {name} and an earlier tensor of the file differ, but this program's model "
                f"has only one tensor, {ours}, for both; models whose heads do not share this "
                "tensor are not supported"
            )
        else:
            tensors[ours] = tensor
    if unknown:
        raise WeightsError(
            f"the {origin.name} tensors {abbreviated(unknown)} have no counterpart in this "
            f"program's model, so its results would differ from those of {origin.name}; only Mask "
            "R-CNN on ResNet with FPN, C4 or C5 is supported"
        )
    return tensors, tuple(ignored)
