"""Conversion between protobuf messages of `maskrcnn.v1` and the types of this package."""

from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..model.bundle.manifest import Manifest
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


def _tag(number: int, wire_type: int = 2) -> bytes:
    """Return the protobuf tag of field `number`. Wire type 2: bytes or a message; 5: a float."""
    return bytes([number << 3 | wire_type])


_RESPONSE_TAG = _tag(pb.DetectStreamResponse.RESPONSE_FIELD_NUMBER)
_DETECTION_TAG = _tag(pb.DetectResponse.DETECTIONS_FIELD_NUMBER)
_RLE_TAG = _tag(pb.Detection.RLE_FIELD_NUMBER)
_COUNTS_TAG = _tag(pb.Rle.COUNTS_FIELD_NUMBER)
# Varint of each integer that takes one or two bytes, by integer. A cache would be slower, because
# most lengths of masks occur once.
_SHORT_VARINTS = [bytes([value]) for value in range(1 << 7)] + [
    bytes([value & 0x7F | 0x80, value >> 7]) for value in range(1 << 7, 1 << 14)
]
_CORNERS = ("x_min", "y_min", "x_max", "y_max")
# Serialised coordinate of a box.
_CORNER = np.dtype([("tag", "S1"), ("value", "<f4")])
# Template of a detection's serialised fields `score` and `box`, with zeros as values: tag and value
# of the score, tag and length of the box, then tag and value of each coordinate.
_SCORE_AND_BOX = np.array(
    (
        _tag(pb.Detection.SCORE_FIELD_NUMBER, 5),
        0,
        _tag(pb.Detection.BOX_FIELD_NUMBER),
        4 * _CORNER.itemsize,
        [(_tag(number, 5), 0) for number in range(1, 5)],
    ),
    [
        ("score_tag", "S1"),
        ("score", "<f4"),
        ("box_tag", "S1"),
        ("box_length", "u1"),
        ("corners", _CORNER, 4),
    ],
)


def request_from_options(
    image: bytes, options: DetectionOptions, scheduling: SchedulingOptions, request_id: str
) -> pb.DetectRequest:
    """Return the `DetectRequest` for `image`, the content of a JPEG, PNG or WebP file."""
    timeout_s = scheduling.timeout_s
    return pb.DetectRequest(
        id=request_id,
        image=image,
        score_threshold=options.score_threshold,
        max_detections=options.max_detections,
        mask_format=_NUMBER_FROM_MASK_FORMAT[options.mask_format],
        precision=scheduling.precision,
        priority=scheduling.priority,
        timeout_us=None if timeout_s is None else max(1, round(timeout_s * 1e6)),
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
    return DetectionOptions(
        score_threshold=request.score_threshold,
        max_detections=request.max_detections if request.HasField("max_detections") else None,
        mask_format=_MASK_FORMAT_FROM_NUMBER[request.mask_format],
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
    if detections.rles is not None:
        # Serialising the detections by hand takes half the time of building messages, which matters
        # with 100 masks per image.
        return response.SerializeToString() + _detections_with_rles(detections)
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
        if detections.mask_probabilities is not None:
            mask = detections.mask_probabilities[index]
            message.probabilities.side = len(mask)
            message.probabilities.values = mask.astype("<f4").tobytes()
        elif detections.polygons is not None:
            message.polygons.SetInParent()  # marks the field as present if there are no outlines
            for outline in detections.polygons[index]:
                message.polygons.polygons.add().coordinates.extend(outline.ravel().tolist())
    return response.SerializeToString()


def _detections_with_rles(detections: Detections) -> bytes:
    """Serialise detections with RLE masks as the field `DetectResponse.detections`."""
    names = map(
        _class_fields,
        detections.labels.tolist(),
        detections.class_names,
        detections.category_ids.tolist(),
    )
    size = pb.Rle(height=detections.height, width=detections.width).SerializeToString()
    size_and_tag = size + _COUNTS_TAG
    parts: list[bytes] = []
    rows = zip(names, _scores_and_boxes(detections), detections.rles or (), strict=True)
    for name, score_and_box, (_, _, counts) in rows:
        # The tag and the length of a field precede it. All tags here take one byte.
        counts_length = _varint(len(counts))
        rle_size = len(size_and_tag) + len(counts_length) + len(counts)
        rle_length = _varint(rle_size)
        detection_size = len(name) + len(score_and_box) + 1 + len(rle_length) + rle_size
        parts += (_DETECTION_TAG, _varint(detection_size), name, score_and_box)
        parts += (_RLE_TAG, rle_length, size_and_tag, counts_length, counts)
    return b"".join(parts)


def _scores_and_boxes(detections: Detections) -> list[bytes]:
    """Return the serialised fields `score` and `box`: one bytes object for each detection."""
    records = _SCORE_AND_BOX[None].repeat(len(detections))
    records["score"], records["corners"]["value"] = detections.scores, detections.boxes
    fields: list[bytes] = records.view(f"V{records.itemsize}").tolist()
    has_zeros = (detections.boxes == 0).any(axis=1) | (detections.scores == 0)
    # The template has all fields, but protobuf leaves out fields whose value is zero.
    for index in np.flatnonzero(has_zeros).tolist():
        box = pb.Box(**dict(zip(_CORNERS, detections.boxes[index].tolist(), strict=True)))
        message = pb.Detection(score=float(detections.scores[index]), box=box)
        fields[index] = message.SerializeToString()
    return fields


@lru_cache(maxsize=4096)
def _class_fields(label: int, class_name: str, category_id: int) -> bytes:
    """Serialise the fields of a detection that depend on its class."""
    fields = pb.Detection(label=label, class_name=class_name, category_id=category_id)
    return fields.SerializeToString()


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
    if value < len(_SHORT_VARINTS):
        return _SHORT_VARINTS[value]
    return bytes([value & 0x7F | 0x80]) + _varint(value >> 7)


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
    # Only exports use this digest.
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
