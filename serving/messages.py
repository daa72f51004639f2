"""Between the messages of the protocol and the types of this package."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from ..model.manifest import Manifest
from ..model.masks import Rle
from ..model.spec import ShapeBucket
from ..protos.maskrcnn.v1 import detector_pb2 as pb
from .config import ServeConfig
from .detections import Answer, DetectionOptions, Detections, MaskFormat, Outlines, Timing
from .errors import InvalidRequestError
from .scheduling import DEFAULT_TERMS, RequestTerms

REQUEST_ID_KEY = "x-request-id"
"""Metadata of the client, and of whatever the server answers."""

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


def request_from_options(
    image: bytes, options: DetectionOptions, terms: RequestTerms, request_id: str
) -> pb.DetectRequest:
    """The request for an encoded image."""
    timeout_s = terms.timeout_s
    return pb.DetectRequest(
        id=request_id,
        image=image,
        score_threshold=options.score_threshold,
        max_detections=options.max_detections,
        mask_format=_NUMBER_FROM_MASK_FORMAT[options.mask_format],
        precision=terms.precision,
        priority=terms.priority,
        timeout_us=None if timeout_s is None else max(1, round(timeout_s * 1e6)),
    )


def options_from_request(request: pb.DetectRequest) -> DetectionOptions:
    """The options of a request.

    Raises:
        InvalidRequestError: one is out of range.
    """
    if request.mask_format not in _MASK_FORMAT_FROM_NUMBER:
        known = (f"{name} ({number})" for name, number in pb.MaskFormat.items())
        raise InvalidRequestError(
            f"mask_format {request.mask_format} is not known; it must be one of {', '.join(known)}"
        )
    return DetectionOptions(
        score_threshold=request.score_threshold,
        max_detections=request.max_detections if request.HasField("max_detections") else None,
        mask_format=_MASK_FORMAT_FROM_NUMBER[request.mask_format],
    )


def terms_from_request(request: pb.DetectRequest, peer: str, model: str) -> RequestTerms:
    """How a request wants to be computed that came by a connection for a model of that name.

    Raises:
        InvalidRequestError: priority or timeout is out of range.
    """
    return RequestTerms(
        precision=request.precision if request.HasField("precision") else None,
        priority=request.priority if request.HasField("priority") else DEFAULT_TERMS.priority,
        timeout_s=request.timeout_us / 1e6 if request.HasField("timeout_us") else None,
        peer=peer,
        model=model,
    )


def encoded_detections(detections: Detections) -> bytes:
    """The answer to a request but for its id and timing, serialised."""
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
        # Field by field takes half the time of messages that are made first and copied then.
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
            message.polygons.SetInParent()  # also where there are none
            for outline in detections.polygons[index]:
                message.polygons.polygons.add().coordinates.extend(outline.ravel().tolist())
    return response.SerializeToString()


def response_from_answer(answer: Answer[bytes], request_id: str) -> pb.DetectResponse:
    """The answer to a request, of `encoded_detections`."""
    response = pb.DetectResponse.FromString(answer.value)
    response.id = request_id
    response.timing.MergeFrom(pb.Timing(**vars(answer.timing)))
    return response


def detections_from_response(response: pb.DetectResponse, mask_format: MaskFormat) -> Detections:
    """The detections of an answer to a request for masks of that format."""
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
    """The answer to GetModel."""
    return pb.GetModelResponse(
        name=manifest.model_name,
        provenance=pb.Provenance(**manifest.provenance.model_dump()),
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
