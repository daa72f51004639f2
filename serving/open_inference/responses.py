"""Answers to requests for inference."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np

from ...model.manifest import Manifest
from ...model.masks import rles_from_probabilities
from ...protos.inference import open_inference_pb2 as pb
from ..detections import Detections, MaskFormat
from .tensors import add_array, add_strings

MODEL_VERSION = "1"
"""The only one: a bundle that is loaded anew takes the old one's place."""


class OutputSpec(NamedTuple):
    """An output of the model, as clients see it."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    """Without the batch."""


def output_specs(manifest: Manifest) -> tuple[OutputSpec, ...]:
    """The outputs, whose rows from `num_detections` on are zeros and empty strings.

    D is the number of detections that the model can find, M the side of its masks.

    - num_detections [B, 1]
    - boxes [B, D, 4] xyxy in pixels of the source image, upright as its EXIF data asks for
    - scores [B, D] by descending score
    - labels [B, D]; 1 is the first class
    - masks [B, D], COCO's compressed run lengths over the source image
    - image_sizes [B, 2] height and width of the source image, which run lengths need
    - mask_probabilities [B, D, M, M] over the boxes; only where a request names it
    """
    count, side = manifest.max_detections, manifest.mask_side
    return (
        OutputSpec("num_detections", "INT64", (1,)),
        OutputSpec("boxes", "FP32", (count, 4)),
        OutputSpec("scores", "FP32", (count,)),
        OutputSpec("labels", "INT64", (count,)),
        OutputSpec("masks", "BYTES", (count,)),
        OutputSpec("image_sizes", "INT64", (2,)),
        OutputSpec("mask_probabilities", "FP32", (count, side, side)),
    )


def default_outputs(manifest: Manifest) -> tuple[str, ...]:
    """The outputs of an answer to a request that names none."""
    return tuple(o.name for o in output_specs(manifest) if o.name != "mask_probabilities")


def mask_format_of(outputs: Sequence[str]) -> MaskFormat:
    """The masks to detect for these outputs."""
    if "mask_probabilities" in outputs:
        return MaskFormat.PROBABILITIES  # of which run lengths can be made
    return MaskFormat.RLE if "masks" in outputs else MaskFormat.NONE


def empty_response(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    """The answer to a request, without outputs."""
    return pb.ModelInferResponse(
        model_name=request.model_name, model_version=MODEL_VERSION, id=request.id
    )


def add_outputs(
    response: pb.ModelInferResponse,
    found: Sequence[Detections],
    outputs: Sequence[str],
    manifest: Manifest,
) -> None:
    """Add outputs to an answer.

    Args:
        response: The answer.
        found: What was found in each image, with masks as `mask_format_of` says.
        outputs: Names of the outputs that the request asks for.
        manifest: Of the bundle.
    """
    specs = {spec.name: spec for spec in output_specs(manifest)}
    for name in outputs:
        _, datatype, dims = specs[name]
        if name == "masks":
            rows = [_run_lengths(detections, manifest) for detections in found]
            add_strings(response, name, [row + [b""] * (dims[0] - len(row)) for row in rows])
            continue
        padded = np.zeros((len(found), *dims), np.int64 if datatype == "INT64" else np.float32)
        for row, detections in zip(padded, found, strict=True):
            values = _VALUES[name](detections)
            row[: len(values)] = values
        add_array(response, name, padded)


_VALUES: Final[Mapping[str, Callable[[Detections], Any]]] = {
    "num_detections": lambda detections: [len(detections)],
    "image_sizes": attrgetter("height", "width"),
    **{n: attrgetter(n) for n in ("boxes", "scores", "labels", "mask_probabilities")},
}
"""The rows of an output that are not padding, for one image."""


def _run_lengths(detections: Detections, manifest: Manifest) -> list[bytes]:
    rles = detections.rles
    if rles is None:
        assert detections.mask_probabilities is not None
        rles = tuple(
            rles_from_probabilities(
                detections.mask_probabilities,
                detections.boxes,
                detections.height,
                detections.width,
                paste=manifest.mask_paste,
            )
        )
    return [rle.counts for rle in rles]
