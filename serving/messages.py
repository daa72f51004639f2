"""Conversion between protobuf messages of `maskrcnn.v1` and the types of this package."""

from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..model.bundle.manifest import Category, Manifest
from ..model.bundle.spec import ShapeBucket
from ..model.masks import Rle
from ..protos.maskrcnn.v1 import detector_pb2 as pb
from .config import ServeConfig
from .detections import (
    DEFAULT_SCHEDULING,
    DetectionOptions,
    Detections,
    MaskFormat,
    Outlines,
    SchedulingOptions,
    TimedResponse,
    Timing,
)
from .errors import InvalidRequestError

# gRPC metadata key of the request ID, in requests and in responses.
REQUEST_ID_KEY = "x-request-id"

_NUMBER_FROM_MASK_FORMAT = {
    MaskFormat.RLE: pb.MASK_FORMAT_RLE,
    MaskFormat.PROBABILITIES: pb.MASK_FORMAT_PROBABILITIES,
    MaskFormat.NONE: pb.MASK_FORMAT_NONE,
    MaskFormat.POLYGON: pb.MASK_FORMAT_POLYGON,
}
_MASK_FORMAT_FROM_NUMBER = {
    pb.MASK_FORMAT_UNSPECIFIED: MaskFormat.RLE,
    **{number: mask_format for mask_format, number in _NUMBER_FROM_MASK_FORMAT.items()},
}


# Tag of the field `response`. Wire type 2 is length-delimited, as for any message.
_RESPONSE_TAG = bytes([pb.DetectStreamResponse.RESPONSE_FIELD_NUMBER << 3 | 2])

# Largest timeout in a request (31 years), and largest value of the field `max_detections`.
_MAX_TIMEOUT_S, _MAX_UINT32 = 1e9, 2**32 - 1


def request_from_options(
    image: bytes, options: DetectionOptions, scheduling: SchedulingOptions, request_id: str
) -> pb.DetectRequest:
    """Return the `DetectRequest` for `image`, the content of a JPEG, PNG or WebP file."""
    timeout_us, maximum = None, options.max_detections
    # Numbers above the limits would not fit into the fields. They mean the same as the limits.
    if scheduling.timeout_s is not None:
        timeout_us = max(1, round(min(scheduling.timeout_s, _MAX_TIMEOUT_S) * 1e6))
    if maximum is not None:
        maximum = min(maximum, _MAX_UINT32)
    return pb.DetectRequest(
        id=request_id,
        image=image,
        score_threshold=options.score_threshold,
        max_detections=maximum,
        mask_format=_NUMBER_FROM_MASK_FORMAT[options.mask_format],
        precision=scheduling.precision,
        priority=scheduling.priority,
        timeout_us=timeout_us,
        model=scheduling.model,
    )


def options_from_request(request: pb.DetectRequest) -> DetectionOptions:
    """Return the detection options in a request.

    Raises:
        InvalidRequestError: an option is out of range, or the mask format is unknown.
    """
    if request.mask_format not in _MASK_FORMAT_FROM_NUMBER:
        known = (f"{name} ({number})" for name, number in pb.MaskFormat.items())
        raise InvalidRequestError(
            f"mask_format is {request.mask_format}; it must be one of {', '.join(known)}"
        )
    maximum = request.max_detections if request.HasField("max_detections") else None
    return _detection_options(request.score_threshold, maximum, request.mask_format)


# Most requests have the same options, and checking them takes longer than finding them here.
@lru_cache
def _detection_options(
    score_threshold: float, max_detections: int | None, mask_format: pb.MaskFormat
) -> DetectionOptions:
    return DetectionOptions(
        score_threshold=score_threshold,
        max_detections=max_detections,
        mask_format=_MASK_FORMAT_FROM_NUMBER[mask_format],
    )


def scheduling_from_request(request: pb.DetectRequest, peer: str, model: str) -> SchedulingOptions:
    """Return the scheduling options in a request.

    Args:
        request: The request.
        peer: gRPC peer of the request; it identifies the client's connection.
        model: Name of the requested model.

    Raises:
        InvalidRequestError: priority or timeout is out of range.
    """
    return SchedulingOptions(
        precision=request.precision if request.HasField("precision") else None,
        priority=request.priority if request.HasField("priority") else DEFAULT_SCHEDULING.priority,
        timeout_s=request.timeout_us / 1e6 if request.HasField("timeout_us") else None,
        peer=peer,
        model=model,
    )


def encode_detections(detections: Detections) -> bytes:
    """Serialise detections as a `DetectResponse` without the fields for request ID and timing."""
    response = pb.DetectResponse(height=detections.height, width=detections.width)
    rows = zip(
        detections.boxes.tolist(),
        detections.labels.tolist(),
        detections.category_ids.tolist(),
        detections.class_names,
        detections.scores.tolist(),
        strict=True,
    )
    for index, (corners, label, category_id, class_name, score) in enumerate(rows):
        # Setting fields in place takes half the time of building messages and copying them.
        message = response.detections.add()
        message.label, message.class_name = label, class_name
        message.category_id, message.score = category_id, score
        box = message.box
        box.x_min, box.y_min, box.x_max, box.y_max = corners
        if detections.rles is not None:
            rle = message.rle
            rle.height, rle.width, rle.counts = detections.rles[index]
        elif detections.mask_probabilities is not None:
            mask = detections.mask_probabilities[index]
            message.probabilities.side = len(mask)
            message.probabilities.values = mask.astype("<f4").tobytes()
        elif detections.polygons is not None:
            message.polygons.SetInParent()  # marks the field as present even without outlines
            for outline in detections.polygons[index]:
                message.polygons.polygons.add().coordinates.extend(outline.ravel().tolist())
    return response.SerializeToString()


def class_fields(label: int, category: Category) -> bytes:
    """Serialise the fields of a `Detection` that depend on its class.

    `label` is the index of the class in the model's list of classes, counted from 1.
    """
    fields = pb.Detection(label=label, class_name=category.name, category_id=category.id)
    return fields.SerializeToString()


def response_with_detections(height: int, width: int, detections: bytes | memoryview) -> bytes:
    """Build a response from detections that are already serialised.

    Args:
        height: Height of the source image in pixels.
        width: Width of the source image in pixels.
        detections: The serialised field `detections` of the `DetectResponse`.

    Returns:
        The same bytes as `encode_detections` returns for these detections.
    """
    return b"".join((pb.DetectResponse(height=height, width=width).SerializeToString(), detections))


def response_bytes(response: TimedResponse[bytes], request_id: str) -> bytes:
    """Serialise a `DetectResponse` from the output of `encode_detections`.

    Args:
        response: Output of `encode_detections`, with the timing of the image's processing.
        request_id: ID of the request.

    Returns:
        The same bytes as if protobuf serialised the whole message.
    """
    # A serialised message is the concatenation of its fields. The pieces are in the order of field
    # numbers, as protobuf writes them: id, then height, width and detections, then timing.
    header = pb.DetectResponse(id=request_id).SerializeToString()
    footer = pb.DetectResponse(timing=pb.Timing(**vars(response.timing))).SerializeToString()
    return b"".join((header, response.value, footer))


def stream_response_bytes(response: bytes, request_id: str) -> bytes:
    """Serialise a `DetectStreamResponse` with the given ID and serialised `DetectResponse`."""
    header = pb.DetectStreamResponse(id=request_id).SerializeToString()
    return b"".join((header, _RESPONSE_TAG, _varint(len(response)), response))


def _varint(value: int) -> bytes:
    """Encode a non-negative integer as a protobuf varint."""
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + _varint(value >> 7)


def detections_from_response(response: pb.DetectResponse, mask_format: MaskFormat) -> Detections:
    """Return the detections in a response.

    Args:
        response: The response.
        mask_format: Mask format in the request.
    """
    found = response.detections
    boxes = [(d.box.x_min, d.box.y_min, d.box.x_max, d.box.y_max) for d in found]
    rles = probabilities = polygons = None
    if mask_format is MaskFormat.RLE:
        rles = tuple(Rle(d.rle.height, d.rle.width, d.rle.counts) for d in found)
    elif mask_format is MaskFormat.PROBABILITIES:
        probabilities = _probabilities_from_messages([d.probabilities for d in found])
    elif mask_format is MaskFormat.POLYGON:
        polygons = tuple(_outlines_from_message(d.polygons) for d in found)
    timing = {field.name: getattr(response.timing, field.name) for field in fields(Timing)}
    return Detections(
        height=response.height,
        width=response.width,
        boxes=np.array(boxes, np.float32).reshape(-1, 4),
        scores=np.array([d.score for d in found], np.float32),
        labels=np.array([d.label for d in found], np.int64),
        category_ids=np.array([d.category_id for d in found], np.int64),
        class_names=tuple(d.class_name for d in found),
        rles=rles,
        mask_probabilities=probabilities,
        polygons=polygons,
        timing=Timing(**timing),
    )


def _probabilities_from_messages(masks: Sequence[pb.MaskProbabilities]) -> NDArray[np.float32]:
    side = masks[0].side if masks else 0
    values = np.frombuffer(b"".join(mask.values for mask in masks), "<f4")
    return values.reshape(len(masks), side, side).astype(np.float32, copy=False)


def _outlines_from_message(mask: pb.Polygons) -> Outlines:
    return tuple(
        np.array(polygon.coordinates, np.float32).reshape(-1, 2) for polygon in mask.polygons
    )


def model_response(
    manifest: Manifest,
    buckets: Sequence[ShapeBucket],
    precisions: Sequence[str],
    config: ServeConfig,
) -> pb.GetModelResponse:
    """Return the response to the RPC `GetModel`: the model's description and server limits."""
    # Only exports use `config_sha256`, so the response leaves it out.
    provenance = manifest.provenance.model_dump(exclude={"config_sha256"})
    return pb.GetModelResponse(
        name=manifest.model_name,
        provenance=pb.Provenance(**provenance),
        categories=[pb.Category(id=c.id, name=c.name) for c in manifest.categories],
        buckets=[pb.Bucket(height=b.height, width=b.width) for b in buckets],
        precisions=precisions,
        max_detections=manifest.max_detections,
        mask_side=manifest.mask_side,
        limits=pb.Limits(
            max_pixels=config.max_pixels,
            max_message_bytes=config.max_message_mb << 20,
            queue_size=config.queue_size,
            max_batch=config.max_batch,
        ),
    )
