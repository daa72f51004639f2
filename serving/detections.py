"""Detections of one image with their timing, and the options of a request."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from pickle import PickleBuffer
from types import NoneType
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..model.masks import Rle
from .errors import InvalidRequestError

Value = TypeVar("Value")

# First version of the pickle protocol with out-of-band buffers.
_PROTOCOL_OF_BUFFERS: Final = 5

# Outer outlines of one mask, one per connected part: [P, 2] x, y in pixels of the image after its
# EXIF rotation, P >= 3, clockwise, without repeating the first point. Holes count as filled. Parts
# within a hole have their own outline. An empty mask has no outlines.
Outlines = tuple[NDArray[np.float32], ...]

# Priority levels, the most urgent first.
PRIORITIES = (1, 2, 3)

# For each option: name, description of valid values, and their classes. The abstract classes, which
# include NumPy's numbers, come last because `isinstance` is slow for them.
_Fields = tuple[tuple[str, str, tuple[type, ...]], ...]
_DETECTION_FIELDS: Final[_Fields] = (
    ("score_threshold", "a number", (float, int, Real)),
    ("max_detections", "an integer or None", (int, NoneType, Integral)),
)
_SCHEDULING_FIELDS: Final[_Fields] = (
    ("precision", "a string or None", (str, NoneType)),
    ("priority", "an integer", (int, Integral)),
    ("timeout_s", "a number or None", (float, NoneType, int, Real)),
    ("model", "a string", (str,)),
)


class MaskFormat(Enum):
    """Encoding of the masks in a response."""

    # COCO RLE of a mask of the whole image.
    RLE = "rle"
    # The model's low-resolution mask probabilities within the detection's box.
    PROBABILITIES = "probabilities"
    NONE = "none"
    # Outlines of the mask, see `Outlines`.
    POLYGON = "polygon"


def has_type(value: object, classes: tuple[type, ...]) -> bool:
    """Return whether a value is an instance of one of the classes. For a boolean, return False."""
    return isinstance(value, classes) and not isinstance(value, bool)


def _check_types(options: object, fields: _Fields) -> None:
    values = vars(options)
    for name, description, classes in fields:
        if not has_type(values[name], classes):
            raise InvalidRequestError(f"{name} is {values[name]!r}; it must be {description}")


@dataclass(frozen=True, kw_only=True)
class DetectionOptions:
    """Options of a request: which detections to return, and in which mask format.

    Raises:
        InvalidRequestError: an option has a wrong type or is out of range, or the mask format is
            unknown.
    """

    # Return only detections whose score exceeds this threshold (0..1) and the model's threshold.
    score_threshold: float = 0.0
    # Maximum number of detections; those with the highest scores are kept. None: the model's limit.
    max_detections: int | None = None
    # A string such as "polygon" is converted to the `MaskFormat` with this value.
    mask_format: MaskFormat = MaskFormat.RLE

    def __post_init__(self) -> None:
        _check_types(self, _DETECTION_FIELDS)
        if not 0 <= self.score_threshold <= 1:
            raise InvalidRequestError(
                f"score_threshold is {self.score_threshold}; it must be in 0..1"
            )
        if self.max_detections is not None and self.max_detections < 1:
            raise InvalidRequestError(
                f"max_detections is {self.max_detections}; it must be at least 1"
            )
        try:
            object.__setattr__(self, "mask_format", MaskFormat(self.mask_format))
        except ValueError:
            known = ", ".join(mask_format.value for mask_format in MaskFormat)
            raise InvalidRequestError(
                f"mask_format is {self.mask_format!r}; it must be one of {known}"
            ) from None


DEFAULT_OPTIONS = DetectionOptions()


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions:
    """Scheduling options of a request: model, precision, priority, time limit and connection.

    Raises:
        InvalidRequestError: an option has a wrong type, or the priority or the timeout is out of
            range.
    """

    # One of the served precisions. None: the first of them, which is the default.
    precision: str | None = None
    # One of `PRIORITIES`.
    priority: int = 2
    # Time limit of the request in seconds. None: the server's own limit.
    timeout_s: float | None = None
    # gRPC peer of the request; it identifies the client's connection.
    peer: str = ""
    # Model name in the request. Empty: the server's first model.
    model: str = ""

    def __post_init__(self) -> None:
        _check_types(self, _SCHEDULING_FIELDS)
        if self.priority not in PRIORITIES:
            raise InvalidRequestError(
                f"priority is {self.priority}; it must be one of "
                f"{', '.join(map(str, PRIORITIES))}, where 1 is the most urgent"
            )
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise InvalidRequestError(
                f"the timeout is {self.timeout_s} s; it must be above 0 and finite"
            )


DEFAULT_SCHEDULING = SchedulingOptions()


def check_count(name: str, value: int) -> None:
    """Raise ValueError, with `name` in the message, unless `value` is an integer of 1 or more."""
    if not has_type(value, (int, Integral)) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be an integer of 1 or more")


def check_options(options: object, scheduling: object = DEFAULT_SCHEDULING) -> None:
    """Raise TypeError unless the arguments are `DetectionOptions` and `SchedulingOptions`."""
    for value, kind in ((options, DetectionOptions), (scheduling, SchedulingOptions)):
        if not isinstance(value, kind):
            raise TypeError(
                f"expected an argument of class {kind.__name__}, not {type(value).__name__}"
            )


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Durations of an image's processing stages in microseconds, and the size of its batch."""

    # Decoding, resizing and padding.
    decode_us: int = 0
    # Waiting for a CPU thread, for the batch to fill and for the model to be free.
    queue_us: int = 0
    # Model execution for the whole batch.
    infer_us: int = 0
    # Scaling boxes, encoding masks and serialising the response.
    encode_us: int = 0
    # Number of images in the batch.
    batch_size: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Detections:
    """N detections of one image, in descending order of score.

    Coordinates and sizes are in pixels of the source image after its EXIF rotation.
    """

    height: int
    width: int
    # [N, 4] xyxy.
    boxes: NDArray[np.float32]
    # [N] in 0..1.
    scores: NDArray[np.float32]
    # [N]; 1 is the model's first class.
    labels: NDArray[np.int64]
    # [N] category IDs of the data set that the model was trained on.
    category_ids: NDArray[np.int64]
    # N names.
    class_names: tuple[str, ...]
    # N masks of the whole image. None: another mask format was requested.
    rles: tuple[Rle, ...] | None = None
    # [N, M, M] mask probabilities within the boxes. None: another mask format was requested.
    mask_probabilities: NDArray[np.float32] | None = None
    # Outlines of N masks. None: another mask format was requested.
    polygons: tuple[Outlines, ...] | None = None
    # All durations are 0 if they were not measured.
    timing: Timing = Timing()

    def __len__(self) -> int:
        return len(self.scores)


# Function that encodes detections as a response. Must be a module-level function, so that a worker
# process can unpickle it.
ResponseEncoder = Callable[[Detections], Any]


def not_encoded(detections: Detections) -> Detections:
    """Return the detections unchanged.

    Use it as `ResponseEncoder` if the caller needs the detections, not an encoded response.
    """
    return detections


class TimedResponse(NamedTuple, Generic[Value]):
    """Output of a `ResponseEncoder` for one image, with the timing of its processing stages."""

    value: Value
    timing: Timing

    def __reduce_ex__(self, protocol: Any) -> tuple[type, tuple[Any, ...]]:
        """Pickle the object. If `value` is bytes, use an out-of-band buffer, which is not copied.

        A `value` that is unpickled from such a buffer is a memoryview.
        """
        return TimedResponse, (out_of_band(self.value, protocol), self.timing)


def out_of_band(value: Any, protocol: int) -> Any:
    """Wrap bytes so that pickle makes them an out-of-band buffer. Return other values unchanged.

    Pickle protocols below 5 have no out-of-band buffers, so bytes are returned unchanged for them.
    """
    suits = protocol >= _PROTOCOL_OF_BUFFERS and isinstance(value, bytes)
    return PickleBuffer(value) if suits else value
