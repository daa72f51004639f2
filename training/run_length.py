"""Convert a run's length from epochs to iterations, and warn if the run is far too long."""

import logging
import math

from .config import TrainConfig
from .data.coco.dataset import CocoDataset
from .data.loading.loader import train_loader

logger = logging.getLogger(__name__)

# Epochs that fine-tuning needs for 1,000 images. Smaller data sets need more, so that the number of
# steps grows with the square root of the number of images.
_EPOCHS, _REFERENCE_IMAGES = 12, 1000
_MIN_EPOCHS, _MAX_EPOCHS = 6, 100
# A warning is logged if a run has more than this multiple of the epochs that fine-tuning needs.
# Training from random weights needs 6 times as many, and strong augmentation several times more.
_EXCESS = 50


def finetuning_epochs(images: int) -> float:
    """Estimate the number of epochs for fine-tuning on `images` images."""
    epochs = _EPOCHS * math.sqrt(_REFERENCE_IMAGES / images)
    return min(max(epochs, _MIN_EPOCHS), _MAX_EPOCHS)


def with_run_length(dataset: CocoDataset, config: TrainConfig) -> TrainConfig:
    """Convert `solver.epochs`, if set, to `solver.max_iterations`. Return the configuration.

    If the run has more than 50 times the epochs that `finetuning_epochs` estimates for its number
    of training images, log a warning.

    Raises:
        DataError: `solver.epochs` is set, and the data set has no image for training.
    """
    solver, key = config.solver, "max_iterations"
    if solver.epochs is not None:
        key = "epochs"
        solver = solver.with_epoch_length(train_loader(dataset, config).iterations_per_epoch)
    images = sum(config.data.keep_empty or bool(record.objects) for record in dataset.records)
    epochs = solver.max_iterations * solver.images_per_batch / max(images, 1)
    enough = finetuning_epochs(max(images, 1))
    if epochs > _EXCESS * enough:
        logger.warning(
            "solver.%s=%d means %.0f epochs of %d training images; about %.0f epochs are "
            "enough to fine-tune on so few images, so consider solver.epochs=%.0f",
            key,
            getattr(config.solver, key),
            epochs,
            images,
            enough,
            enough,
        )
    return config.model_copy(update={"solver": solver})
