"""The steps in which a batch of images becomes detections."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ...model.images import ImageError
from ...model.spec import ShapeBucket
from ..detections import DetectionOptions, Detections
from .preprocessing import PlannedImage

Outcome = Detections | ImageError
"""What became of an image."""


class Job(NamedTuple):
    """An image to detect in, and what to answer with."""

    image: PlannedImage
    options: DetectionOptions

    @property
    def bucket(self) -> ShapeBucket:
        """Input size that the image is padded to."""
        return self.image.bucket


Form = Callable[[Detections], Any]
"""Makes of detections what they are wanted as. It is a function of a module, so that another
process can do that."""


class Order(NamedTuple):
    """A job for an engine, and the form in which it is to answer."""

    job: Job
    form: Form

    @property
    def bucket(self) -> ShapeBucket:
        """Input size that the image is padded to."""
        return self.job.bucket


Source = Job | ImageError
"""A place in a batch; a damaged image leaves it black, so that the others keep theirs."""

MODEL_STEP = "model"
"""Name of the step in which the backend computes."""


class Step(NamedTuple):
    """What is done with a batch before the next step gets it."""

    name: str
    run: Callable[[Any], Any]
    """The first takes jobs of one bucket, the last gives the outcome of each."""
    threads: int
    """Batches that it works at, at once; where it is one, they come in their order."""


class BatchSteps(Protocol):
    """A way from encoded images to detections."""

    @property
    def steps(self) -> tuple[Step, ...]:
        """In the order in which a batch goes through them."""

    def synchronize(self) -> None:
        """Wait for what steps have set going on a device."""
