"""The detections of one image, in the form in which users get them."""

from dataclasses import dataclass
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..model.masks import Rle
from .errors import InvalidRequestError

Value = TypeVar("Value")

Outlines = tuple[NDArray[np.float32], ...]
"""Of one mask, one for each of its parts: [P, 2] x, y in pixels of the source image, P at least 3,
clockwise and without the first point at the end. Holes have none and count as filled; parts within
a hole have theirs. An empty mask has no outline."""


class MaskFormat(Enum):
    """Form of the masks of an answer."""

    RLE = "rle"
    """Masks of the whole image, run-length encoded."""
    PROBABILITIES = "probabilities"
    """The model's low-resolution probabilities over the box."""
    NONE = "none"
    POLYGON = "polygon"
    """The outlines of the masks."""


@dataclass(frozen=True, kw_only=True)
class DetectionOptions:
    """What a request may choose."""

    score_threshold: float = 0.0
    """Detections must score above this; the model's own threshold applies besides."""
    max_detections: int | None = None
    """Detections at most, best first; none, the model's own limit."""
    mask_format: MaskFormat = MaskFormat.RLE

    def __post_init__(self) -> None:
        if not 0 <= self.score_threshold <= 1:
            raise InvalidRequestError(
                f"score_threshold is {self.score_threshold}; it must lie in 0..1"
            )
        if self.max_detections is not None and self.max_detections < 1:
            raise InvalidRequestError(
                f"max_detections is {self.max_detections}; it must be at least 1"
            )


DEFAULT_OPTIONS = DetectionOptions()


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Where a request's time went in the server, in microseconds."""

    decode_us: int = 0
    """Decoding, resizing and padding."""
    queue_us: int = 0
    """Waiting for threads, for a batch to fill and for the model to be free."""
    infer_us: int = 0
    """The model's run over the whole batch."""
    encode_us: int = 0
    """Scaling boxes, encoding masks and writing the answer."""
    batch_size: int = 1
    """Images in the batch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Detections:
    """N detections of one image by descending score, in pixels of the source image.

    That is the image after the rotation that its EXIF data asks for.
    """

    height: int
    width: int
    boxes: NDArray[np.float32]
    """[N, 4] xyxy."""
    scores: NDArray[np.float32]
    """[N] in 0..1."""
    labels: NDArray[np.int64]
    """[N]; 1 is the model's first class."""
    category_ids: NDArray[np.int64]
    """[N] ids of the classes in the data set that the model was trained on."""
    class_names: tuple[str, ...]
    """N names."""
    rles: tuple[Rle, ...] | None = None
    """N masks of the whole image, if asked for."""
    mask_probabilities: NDArray[np.float32] | None = None
    """[N, M, M] probabilities over the boxes, if asked for."""
    polygons: tuple[Outlines, ...] | None = None
    """Outlines of N masks, if asked for."""
    timing: Timing = Timing()
    """Zeros where nothing was timed."""

    def __len__(self) -> int:
        return len(self.scores)


class Answer(NamedTuple, Generic[Value]):
    """What was made of the detections of an image, and where its time went."""

    value: Value
    timing: Timing
