"""What a backend must offer."""

import math
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...model.manifest import BundleError, Manifest
from ...model.spec import ShapeBucket


class TensorSpec(NamedTuple):
    """Shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def batch_sizes(max_batch: int) -> list[int]:
    """Sizes to compute batches at, to the next of which a batch is padded: powers of two.

    They end with `max_batch`. Few sizes are enough, and each costs time and memory.
    """
    return sorted({*(1 << n for n in range(max_batch.bit_length())), max_batch})


def black_batch(bucket: ShapeBucket, count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Black images [count, 3, H, W] that fill a bucket, and their sizes [count, 2]."""
    return np.zeros((count, 3, *bucket), np.uint8), np.full((count, 2), bucket, np.int64)


class Outputs(NamedTuple):
    """Outputs of the model for B images, in the order of `model.spec.OUTPUT_NAMES`."""

    num_detections: NDArray[np.int64]
    """[B]."""
    boxes: NDArray[np.float32]
    """[B, D, 4] xyxy in pixels of the resized image."""
    scores: NDArray[np.float32]
    """[B, D] by descending score."""
    labels: NDArray[np.int64]
    """[B, D]; 1 is the first class."""
    masks: NDArray[np.float32]
    """[B, D, M, M] probabilities."""


def check_outputs(outputs: Outputs, manifest: Manifest) -> None:
    """Refuse a model whose detections have other shapes than its bundle says.

    Raises:
        BundleError: they have.
    """
    rows, side = manifest.max_detections, manifest.mask_side
    expected, found = (rows, side, side), outputs.masks.shape[1:]
    if found != expected:
        raise BundleError(
            f"the model's masks are of shape {list(found)}, and by the manifest's max_detections "
            f"and mask_side of {list(expected)}; export the bundle again"
        )


class Backend(Protocol):
    """Computes detections for the shape buckets of one precision."""

    @property
    def name(self) -> str:
        """What computes, as it is called on the command line."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Where it computes."""

    @property
    def concurrency(self) -> int:
        """Threads that may call `infer` and `warm_up` at once, which is how batches overlap."""

    @property
    def buckets(self) -> tuple[ShapeBucket, ...]:
        """Input sizes that `infer` accepts."""

    def warm_up(self, max_batch: int) -> None:
        """Run every bucket, so that no request pays for what the first run of a size costs.

        Raises:
            BundleError: what comes out does not fit the manifest.
        """

    def infer(
        self, bucket: ShapeBucket, images: NDArray[np.uint8], image_sizes: NDArray[np.int64]
    ) -> Outputs:
        """Detect in a batch of one bucket.

        Args:
            bucket: One of `buckets`.
            images: [B, 3, bucket.height, bucket.width] RGB.
            image_sizes: [B, 2] height and width before padding.
        """

    def close(self) -> None:
        """Release what the backend holds; it is not used after."""
