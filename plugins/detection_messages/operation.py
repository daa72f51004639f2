"""Serialisation of detections as protobuf messages.

Specification of all implementations: an image's bytes are the serialised field `detections` of the
message `DetectResponse` in `protos/maskrcnn/v1/detector.proto`. All detections have RLE masks. The
bytes of all images are in one buffer without gaps, in any order.
"""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.arguments import kernel_argument
from ..runtime.launching import launch_kernel
from .kernel import DETECTION_MESSAGES, detection_messages_launch

# Wire types of protobuf. _LENGTH precedes bytes and messages.
_VARINT, _LENGTH, _FIXED32 = 0, 2, 5


class DetectionBatch(NamedTuple):
    """Detections of B images, up to D in each, and the criteria by which they are selected."""

    # [B] int64, number of detections of each image.
    counts: Tensor
    # [B, D, 4] float32 xyxy in pixels of the source image.
    boxes: Tensor
    # [B, D] float32 by descending score.
    scores: Tensor
    # [B, D] int64; 1 is the first class.
    labels: Tensor
    # [T] uint8 and [B * D, 2] int64, the outputs of `compress_runs` for the B * D masks.
    text: Tensor
    text_spans: Tensor
    # [B, 2] int64, height and width of the source images in pixels.
    sizes: Tensor
    # [B, 2] float64, for each image: maximum number of detections to select, and score threshold.
    # Only detections with scores above the threshold are selected.
    selections: Tensor


class ClassTable(NamedTuple):
    """Serialised class fields of the protobuf message `Detection`, for L classes.

    The class fields are `label`, `class_name` and `category_id`.
    """

    # [L, F] uint8. Each row begins with the fields of a class; the rest of the row is not used.
    fields: Tensor
    # [L] int64, number of bytes of the fields.
    lengths: Tensor


def detection_messages(
    batch: DetectionBatch, classes: ClassTable, capacity: int
) -> tuple[Tensor, Tensor]:
    """Serialise the selected detections of each image.

    Args:
        batch: The detections of B images.
        classes: Serialised fields of each class.
        capacity: Maximum number of bytes of all images together.

    Returns:
        messages: [capacity] uint8, the bytes of all images. The bytes after the last image, and
            those of an image that would end beyond the capacity, are undefined.
        spans: [B, 2] int64, start and length of each image's bytes, also of images that would end
            beyond the capacity. If a selected detection has no RLE characters in `batch.text`, or
            if its class is not in `classes`, the length is -1 and the start is undefined.

    Raises:
        ValueError: on a GPU, an argument has another dtype or shape than documented.
    """
    if not batch.scores.is_cuda:
        return _on_host(batch, classes, capacity)
    images, depth = batch.scores.shape
    rows, stride = classes.fields.shape
    inputs = [
        kernel_argument("counts", batch.counts, torch.int64, (images,)),
        kernel_argument("boxes", batch.boxes, torch.float32, (images, depth, 4)),
        kernel_argument("scores", batch.scores, torch.float32, (images, depth)),
        kernel_argument("labels", batch.labels, torch.int64, (images, depth)),
        kernel_argument("text", batch.text, torch.uint8, (-1,)),
        kernel_argument("text_spans", batch.text_spans, torch.int64, (images * depth, 2)),
        kernel_argument("sizes", batch.sizes, torch.int64, (images, 2)),
        kernel_argument("selections", batch.selections, torch.float64, (images, 2)),
        kernel_argument("fields", classes.fields, torch.uint8, (rows, stride)),
        kernel_argument("lengths", classes.lengths, torch.int64, (rows,)),
    ]
    messages = batch.text.new_empty(capacity)
    spans = batch.text_spans.new_zeros(images + 1, 2)
    launch = detection_messages_launch(images, depth, len(batch.text), (rows, stride), capacity)
    launch_kernel(DETECTION_MESSAGES, launch, inputs, [messages, spans])
    return messages, spans[:-1]


def _on_host(batch: DetectionBatch, classes: ClassTable, capacity: int) -> tuple[Tensor, Tensor]:
    written, spans = b"", []
    for image in range(len(batch.scores)):
        message = _image_message(batch, classes, image)
        spans.append((len(written), -1 if message is None else len(message)))
        written += message or b""
    messages = batch.text.new_empty(capacity)
    fitting = torch.tensor(list(written[:capacity]), dtype=torch.uint8)
    messages[: len(fitting)] = fitting
    return messages, torch.tensor(spans, dtype=torch.int64).reshape(-1, 2)


def _image_message(batch: DetectionBatch, classes: ClassTable, image: int) -> bytes | None:
    """Serialise the selected detections of the image with the index `image`.

    Return None if a selected detection's RLE characters or class fields are missing.
    """
    limit, threshold = batch.selections[image].tolist()
    count = int(min(float(batch.counts[image]), limit))
    (selected,) = torch.nonzero(batch.scores[image, :count] > threshold, as_tuple=True)
    size_fields = b"".join(map(_varint_field, (1, 2), batch.sizes[image].tolist()))
    spans = batch.text_spans.reshape(*batch.scores.shape, 2)[image]
    fields = []
    for detection in selected.tolist():
        start, length = spans[detection].tolist()
        row = int(batch.labels[image, detection]) - 1
        has_mask = 0 <= length <= len(batch.text) - start
        if not (has_mask and 0 <= row < len(classes.lengths)):
            return None
        corners = map(_float_field, (1, 2, 3, 4), batch.boxes[image, detection].tolist())
        characters = batch.text[start : start + length].numpy().tobytes()
        parts = (
            classes.fields[row, : int(classes.lengths[row])].numpy().tobytes(),
            _float_field(4, float(batch.scores[image, detection])),
            _bytes_field(5, b"".join(corners)),
            _bytes_field(6, size_fields + _bytes_field(3, characters)),
        )
        fields.append(_bytes_field(4, b"".join(parts)))
    return b"".join(fields)


def _varint(value: int) -> bytes:
    """Encode a non-negative integer as a protobuf varint."""
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + _varint(value >> 7)


def _varint_field(number: int, value: int) -> bytes:
    return bytes([number << 3 | _VARINT]) + _varint(value)


def _bytes_field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | _LENGTH]) + _varint(len(value)) + value


def _float_field(number: int, value: float) -> bytes:
    """Serialise a float field. Return b"" for 0.0, which protobuf leaves out."""
    data = struct.pack("<f", value)
    return bytes([number << 3 | _FIXED32]) + data if any(data) else b""
