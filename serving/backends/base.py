"""Interface of all inference backends, and helpers that they share."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ...model.bundle.manifest import BundleError, Manifest
from ...model.bundle.spec import ShapeBucket
from ...model.resizing import Pixels
from ..errors import BackendError

# A torch tensor or a NumPy array.
Array = TypeVar("Array")

# Seconds between two queries of a CUDA event.
_POLL_S = 1e-4


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class ModelOutputs(NamedTuple, Generic[Array]):
    """Outputs of the model for B images, in the order of `model.bundle.spec.OUTPUT_NAMES`.

    Each tensor except `num_detections` has D rows per image, where D is `max_detections` in the
    exported model's manifest: first the `num_detections[image]` detections, then padding. A
    mask has M x M probabilities that cover the detection's box; M is the manifest's `mask_side`.
    """

    # [B] int64.
    num_detections: Array
    # [B, D, 4] float32 xyxy in pixels of the resized image.
    boxes: Array
    # [B, D] float32 by descending score.
    scores: Array
    # [B, D] int64; 1 is the first class.
    labels: Array
    # [B, D, M, M] float32 probabilities.
    masks: Array


HostOutputs = ModelOutputs[NDArray[Any]]


def batch_sizes(max_batch: int) -> list[int]:
    """Return the batch sizes that backends run on a GPU: `max_batch` and all smaller powers of two.

    A batch of another size is padded to the next larger size in this list. The list is short,
    because each batch size costs start-up time and GPU memory.
    """
    return sorted({*(1 << n for n in range(max_batch.bit_length())), max_batch})


def black_batch(bucket: ShapeBucket, count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return a batch of black images for warm-up, and the images' sizes.

    The images are [count, 3, H, W] uint8, where H and W are the height and width of `bucket`. The
    sizes are [count, 2] int64: H and W of each image.
    """
    return np.zeros((count, 3, *bucket), np.uint8), np.full((count, 2), bucket, np.int64)


def check_outputs(outputs: ModelOutputs[Any], manifest: Manifest) -> None:
    """Check that output masks have the shape that the exported model's manifest states.

    Only shapes are compared, so each batch can be checked without a copy to the host.

    Raises:
        BundleError: the shapes differ.
    """
    rows, side = manifest.max_detections, manifest.mask_side
    expected, actual = (rows, side, side), tuple(outputs.masks.shape[1:])
    if actual != expected:
        raise BundleError(
            f"the model's masks have shape {list(actual)}, but max_detections and mask_side in the "
            f"manifest give {list(expected)}; export the bundle again"
        )


def wait_until(is_done: Callable[[], bool]) -> None:
    """Poll a function, such as a CUDA event's `query`, until it returns True."""
    # CUDA's own waits are worse: spinning takes a core from decoding and encoding, and blocking
    # until an interrupt took 10 ms on a virtual machine.
    while not is_done():
        time.sleep(_POLL_S)


@contextlib.contextmanager
def import_errors(name: str, extra: str) -> Iterator[None]:
    """Context manager: convert errors of an import to BackendErrors with a remedy.

    Args:
        name: Imported library, for the message.
        extra: Extra of the package `maskrcnn-trt` that installs the library, for the message.

    Raises:
        BackendError: the library is not installed, or cannot be loaded.
    """
    install = f'pip install "maskrcnn-trt[{extra}]"'
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or name).partition(".")[0]
        raise BackendError(f"{missing} is not installed; install it with {install}") from None
    except (ImportError, OSError) as error:  # OSError: a library of CUDA is missing
        raise BackendError(
            f"cannot import {name} ({error}); install an NVIDIA driver if nvidia-smi finds no GPU, "
            f"else reinstall the package with {install}"
        ) from None


class Backend(Protocol):
    """Interface of all inference backends. A backend runs an exported model in one precision."""

    @property
    def name(self) -> str:
        """Value of the command-line option `--backend` that selects this backend."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Type of the device on which the model runs."""

    @property
    def concurrency(self) -> int:
        """Number of batches that can be in flight at once, each in a thread that calls `infer`."""

    @property
    def buckets(self) -> tuple[ShapeBucket, ...]:
        """Input sizes that `infer` accepts."""

    def warm_up(self, max_batch: int) -> None:
        """Run the model on black images, for each input size.

        On a GPU, run at least one batch for each of the backend's batch sizes. For a batch size
        above `max_batch`, pad `max_batch` images to this size. On the CPU, run one image. The first
        requests then need not wait for compilation or memory allocation. The method raises the same
        errors as `infer`.
        """

    def infer(
        self, bucket: ShapeBucket, images: Pixels, image_sizes: NDArray[np.int64]
    ) -> HostOutputs:
        """Run the model on a batch of images that are padded to the input size `bucket`.

        Args:
            bucket: One of `buckets`.
            images: [B, 3, bucket.height, bucket.width] RGB in 0..255, uint8 or float32. The backend
                converts them to the model's dtype.
            image_sizes: [B, 2] height and width before padding.

        Returns:
            Outputs for the B images, in host memory.

        Raises:
            BackendError: the batch is too large, memory runs out, or TensorRT fails. Other runtimes
                raise exceptions of their own.
            BundleError: the output masks do not have the shape that the bundle's manifest states.
        """

    def close(self) -> None:
        """Release the backend's resources. The backend cannot be used afterwards."""


@runtime_checkable
class DeviceBackend(Backend, Protocol[Array]):
    """Backend that also accepts batches that are already in the memory of its device."""

    def infer_on_device(
        self, bucket: ShapeBucket, images: Array, image_sizes: Array
    ) -> ModelOutputs[Array]:
        """Queue the computation of a batch on torch's current CUDA stream.

        Args:
            bucket: One of `buckets`.
            images: [B, 3, bucket.height, bucket.width] RGB in 0..255, uint8 or float32, on the
                device. The backend converts them to the model's dtype.
            image_sizes: [B, 2] int64 on the device, height and width before padding.

        Returns:
            New tensors on the device, valid once the stream has run the queued work.

        Raises:
            BackendError: the batch is too large, memory runs out, or TensorRT fails. Other runtimes
                raise exceptions of their own.
            BundleError: the output masks do not have the shape that the bundle's manifest states.
        """
