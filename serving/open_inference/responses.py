"""Responses of the Open Inference Protocol: metadata, model config, inference outputs."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np

from ... import __version__
from ...model.bundle.manifest import Manifest
from ...model.masks import rles_from_probabilities
from ...protos.inference import open_inference_pb2 as pb
from ..config import ServeConfig
from ..detections import DEFAULT_SCHEDULING, PRIORITIES, Detections, MaskFormat
from ..pipeline.served_model import ModelBatcher, ServedModel
from .input_images import DTYPES, INPUT_NAME

_PLATFORM = "maskrcnn_bundle"
_BACKEND = "maskrcnn"

# Datatype in ModelConfig, by the name of the tensor's datatype.
_CONFIG_TYPES: Final = {
    "BYTES": pb.TYPE_STRING,
    "FP32": pb.TYPE_FP32,
    "INT64": pb.TYPE_INT64,
}

# Outputs that are sent only if the request names them.
_BY_NAME_ONLY: Final = ("mask_probabilities", "class_names")


class OutputSpec(NamedTuple):
    """Name, datatype and shape of an output tensor."""

    name: str
    datatype: str
    # Shape without the batch dimension.
    dims: tuple[int, ...]


def output_specs(manifest: Manifest) -> tuple[OutputSpec, ...]:
    """Return the specifications of all output tensors.

    B is the number of images, D the model's maximum number of detections per image, and M the side
    of the model's square masks. Each image has `num_detections` rows, padded to D rows with zeros
    or empty strings.

    - num_detections [B, 1]
    - boxes [B, D, 4] xyxy in pixels of the image after its EXIF rotation
    - scores [B, D] in descending order
    - labels [B, D]; 1 is the first class
    - masks [B, D] COCO RLE (compressed counts) of masks with the size of the rotated image
    - image_sizes [B, 2] height and width of the rotated image, needed to decode the COCO RLE
    - mask_probabilities [B, D, M, M] on a regular grid over each box
    - class_names [B, D]

    The outputs mask_probabilities and class_names are sent only if the request names them.
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
        OutputSpec("class_names", "BYTES", (count,)),
    )


def default_outputs(manifest: Manifest) -> tuple[str, ...]:
    """Return the names of the outputs to send if the request does not name any outputs."""
    return tuple(o.name for o in output_specs(manifest) if o.name not in _BY_NAME_ONLY)


def mask_format_of(outputs: Sequence[str]) -> MaskFormat:
    """Return the mask format that the pipeline must compute for the named output tensors."""
    if "mask_probabilities" in outputs:
        return MaskFormat.PROBABILITIES  # `add_outputs` converts them to COCO RLE if needed
    return MaskFormat.RLE if "masks" in outputs else MaskFormat.NONE


def server_metadata() -> pb.ServerMetadataResponse:
    """Return the response to ServerMetadata: the server's name, version and protocol extensions."""
    return pb.ServerMetadataResponse(
        name="maskrcnn-trt",
        version=__version__,
        extensions=[
            "binary_tensor_data",
            "model_configuration",
            "model_repository",
            "parameters",
            "schedule_policy",
            "statistics",
        ],
    )


def model_metadata(name: str, model: ServedModel) -> pb.ModelMetadataResponse:
    """Return the response to ModelMetadata: the model's tensors, version and properties.

    Args:
        name: Model name in the request: the name of `model`, or that name and `-PRECISION`.
        model: Model to describe.
    """
    tensor = pb.ModelMetadataResponse.TensorMetadata
    return pb.ModelMetadataResponse(
        name=name,
        versions=[model.version],
        platform=_PLATFORM,
        inputs=[tensor(name=INPUT_NAME, datatype="BYTES", shape=(-1, 1))],
        outputs=[
            tensor(name=spec.name, datatype=spec.datatype, shape=(-1, *spec.dims))
            for spec in output_specs(model.manifest)
        ],
        properties=_properties(model),
    )


def model_config(name: str, model: ServedModel, config: ServeConfig) -> pb.ModelConfigResponse:
    """Return the response to ModelConfig: tensors, batching, worker processes and properties.

    Args:
        name: Model name in the request: the name of `model`, or that name and `-PRECISION`.
        model: Model to describe.
        config: Settings of the server.
    """
    return pb.ModelConfigResponse(
        config=pb.ModelConfig(
            name=name,
            platform=_PLATFORM,
            backend=_BACKEND,
            version_policy=pb.ModelVersionPolicy(
                latest=pb.ModelVersionPolicy.Latest(num_versions=1)
            ),
            max_batch_size=config.images_per_request,
            input=[pb.ModelInput(name=INPUT_NAME, data_type=pb.TYPE_STRING, dims=[1])],
            output=[
                pb.ModelOutput(name=s.name, data_type=_CONFIG_TYPES[s.datatype], dims=s.dims)
                for s in output_specs(model.manifest)
            ],
            instance_group=_instance_groups(model.batcher(model.names[name])),
            dynamic_batching=_dynamic_batching(config),
            parameters={
                name: pb.ModelParameter(string_value=value)
                for name, value in _properties(model).items()
            },
        )
    )


def _instance_groups(batcher: ModelBatcher) -> list[pb.ModelInstanceGroup]:
    return [
        pb.ModelInstanceGroup(
            kind=pb.ModelInstanceGroup.KIND_CPU if gpu is None else pb.ModelInstanceGroup.KIND_GPU,
            count=count,
            gpus=[] if gpu is None else [gpu],
        )
        for gpu, count in Counter(batcher.gpus).items()
    ]


def _dynamic_batching(config: ServeConfig) -> pb.ModelDynamicBatching:
    return pb.ModelDynamicBatching(
        preferred_batch_size=config.preferred_batch,
        max_queue_delay_microseconds=round(config.max_delay_ms * 1000),
        priority_levels=len(PRIORITIES),
        default_priority_level=DEFAULT_SCHEDULING.priority,
        default_queue_policy=pb.ModelQueuePolicy(
            timeout_action=pb.ModelQueuePolicy.REJECT,
            default_timeout_microseconds=round((config.timeout_s or 0) * 1e6),
            allow_timeout_override=True,
            max_queue_size=config.queue_size,
        ),
    )


def _properties(model: ServedModel) -> dict[str, str]:
    """Return the model properties that have no protobuf field, as a map from name to JSON text."""
    categories = model.manifest.categories
    properties = {
        "class_names": [category.name for category in categories],  # the first has label 1
        "category_ids": [category.id for category in categories],
        "precisions": model.precisions,  # the first is the default
        "image_datatypes": ["BYTES", "UINT8", "FP32"],
    }
    return {name: json.dumps(value) for name, value in properties.items()}


def add_outputs(
    response: pb.ModelInferResponse,
    detections: Sequence[Detections],
    outputs: Sequence[str],
    manifest: Manifest,
) -> None:
    """Add output tensors to a response.

    Args:
        response: Response to extend.
        detections: Detections of each image, with masks in the format `mask_format_of(outputs)`.
        outputs: Names of the outputs to add.
        manifest: Manifest of the bundle.
    """
    specs = {spec.name: spec for spec in output_specs(manifest)}
    for name in outputs:
        _, datatype, dims = specs[name]
        if datatype == "BYTES":
            texts = _rle_counts if name == "masks" else _class_names
            rows = [texts(own, manifest) for own in detections]
            shape = (len(rows), *dims)
            contents = serialised_strings(row + [b""] * (dims[0] - len(row)) for row in rows)
        else:
            padded = np.zeros((len(detections), *dims), DTYPES[datatype])
            for row, own in zip(padded, detections, strict=True):
                values = _VALUES[name](own)
                row[: len(values)] = values
            shape, contents = padded.shape, padded.tobytes()
        response.outputs.add(name=name, datatype=datatype, shape=shape)
        response.raw_output_contents.append(contents)


# By name of a numeric output: function that returns one image's values, without padding.
_VALUES: Final[Mapping[str, Callable[[Detections], Any]]] = {
    "num_detections": lambda detections: [len(detections)],
    "image_sizes": attrgetter("height", "width"),
    **{n: attrgetter(n) for n in ("boxes", "scores", "labels", "mask_probabilities")},
}


def serialised_strings(rows: Iterable[Iterable[bytes]]) -> bytes:
    """Serialise the strings in the rows of a BYTES tensor as the tensor's raw contents.

    Each string is preceded by its length in 4 bytes (little-endian). The strings of all rows are
    concatenated.
    """
    return b"".join(len(text).to_bytes(4, "little") + text for row in rows for text in row)


def _class_names(detections: Detections, _: Manifest) -> list[bytes]:
    return [name.encode() for name in detections.class_names]


def _rle_counts(detections: Detections, manifest: Manifest) -> list[bytes]:
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
