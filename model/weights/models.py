"""Models by the name of their body, with weights of any origin."""

from pathlib import Path

from ..checkpoint import Checkpoint, load_checkpoint
from ..config import ModelConfig
from ..mask_rcnn import MaskRCNN
from .conversion import checkpoint_from_weights
from .files import WeightsError
from .recognition import OWN, read_weights
from .sources import local_path


def build_model(
    name: str, features: str, source: str | Path | None = None, num_classes: int = 80
) -> MaskRCNN:
    """A model in evaluation mode on the CPU.

    Args:
        name: residual network, as of `BackboneConfig`.
        features: what the heads see of it, as of `BackboneConfig`.
        source: file or http(s) address of a checkpoint or of another program's weights; none,
            random weights.
        num_classes: foreground classes, where no weights say.

    Raises:
        CheckpointError: the weights cannot be had or read, or are of another body.
    """
    if source is None:
        values = {"num_classes": num_classes, "backbone": {"name": name, "features": features}}
        # Pooled features of C4 pass through the fifth stage, which halves them.
        roi = {"roi": {"box_pool": 14}} if features == "c4" else {}
        return MaskRCNN(ModelConfig.model_validate(values | roi)).eval()
    checkpoint = _checkpoint_from_file(local_path(source))
    backbone = checkpoint.model_config.backbone
    if (backbone.name, backbone.features) != (name, features):
        raise WeightsError(
            f"{source} is a {backbone.name} {backbone.features}, not a {name} {features}; "
            f"ask for maskrcnn_{backbone.name}_{backbone.features}"
        )
    return checkpoint.build_model()


def _checkpoint_from_file(path: Path) -> Checkpoint:
    weights = read_weights(path)
    if weights.origin == OWN:
        return load_checkpoint(path)
    try:
        return checkpoint_from_weights(weights).checkpoint
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from None
