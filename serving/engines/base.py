"""What computes batches: the interface of it."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from ...model.images import ImageError
from ...model.spec import ShapeBucket
from ..backends.base import Outputs
from ..detections import Answer
from ..steps.base import Order
from ..steps.preprocessing import ModelInput

EngineItem = ModelInput | Order
EngineResult = Outputs | Answer[Any] | ImageError

Item = TypeVar("Item", contravariant=True)
Result = TypeVar("Result", covariant=True)


class EngineInfo(NamedTuple):
    """What is known of an engine once it is loaded."""

    backend: str
    """As it is called on the command line."""
    device: Literal["cpu", "cuda"]
    """Where it computes."""
    concurrency: int
    """Threads that may call it at once, which is how batches overlap."""
    busy_from: int
    """Batches that keep it busy. With so many begun, only full ones still gain by beginning."""
    buckets: tuple[ShapeBucket, ...]
    """Input sizes of the items that it takes."""
    takes_orders: bool
    """Whether its items are orders and its results answers, which is when its device decodes images
    and encodes masks; else they are images that the CPU prepared, and the model's outputs for a
    batch of one."""


class Engine(Protocol[Item, Result]):
    """Turns the items of a batch into results.

    Until it is loaded it is a mere description, which can be pickled. So can items and results.
    """

    def load(self) -> EngineInfo:
        """Load the model, before anything else is done.

        Raises:
            BundleError: the bundle is damaged or lacks the precision.
            BackendError: the backend does not run here, or not with such batches.
        """

    def warm_up(self, max_batch: int) -> None:
        """Compute batches, so that no request pays for what the first of a size costs."""

    def compute(self, items: Sequence[Item]) -> Sequence[Result]:
        """A result for each item of a batch, which are of one bucket.

        Arrays of the items do not outlive the call.
        """

    def close(self) -> None:
        """Release what it holds; it is not used after."""
