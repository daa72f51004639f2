"""What clients may ask about server and model."""

import json
from collections import Counter
from importlib.metadata import version
from typing import Final

from ...protos.inference import open_inference_pb2 as pb
from ..config import ServeConfig
from ..models import ModelBatcher, ServedModel
from ..scheduling import DEFAULT_TERMS, PRIORITIES
from .requests import INPUT_NAME
from .responses import MODEL_VERSION, output_specs

_PLATFORM = "maskrcnn_bundle"
_BACKEND = "maskrcnn"

_DATA_TYPES: Final = {
    "BYTES": pb.TYPE_STRING,
    "FP32": pb.TYPE_FP32,
    "INT64": pb.TYPE_INT64,
}


def server_metadata() -> pb.ServerMetadataResponse:
    """The answer to ServerMetadata."""
    return pb.ServerMetadataResponse(
        name="maskrcnn-trt",
        version=version("maskrcnn-trt"),
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
    """The answer to ModelMetadata, for a model of that name."""
    tensor = pb.ModelMetadataResponse.TensorMetadata
    return pb.ModelMetadataResponse(
        name=name,
        versions=[MODEL_VERSION],
        platform=_PLATFORM,
        inputs=[tensor(name=INPUT_NAME, datatype="BYTES", shape=(-1, 1))],
        outputs=[
            tensor(name=spec.name, datatype=spec.datatype, shape=(-1, *spec.dims))
            for spec in output_specs(model.manifest)
        ],
        properties=_properties(model),
    )


def model_config(name: str, model: ServedModel, config: ServeConfig) -> pb.ModelConfigResponse:
    """The answer to ModelConfig, for a model of that name."""
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
                pb.ModelOutput(name=s.name, data_type=_DATA_TYPES[s.datatype], dims=s.dims)
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
        default_priority_level=DEFAULT_TERMS.priority,
        default_queue_policy=pb.ModelQueuePolicy(
            timeout_action=pb.ModelQueuePolicy.REJECT,
            default_timeout_microseconds=round((config.timeout_s or 0) * 1e6),
            allow_timeout_override=True,
            max_queue_size=config.queue_size,
        ),
    )


def _properties(model: ServedModel) -> dict[str, str]:
    """What the protocol has no fields for, as JSON."""
    categories = model.manifest.categories
    properties = {
        "class_names": [category.name for category in categories],  # the first has label 1
        "category_ids": [category.id for category in categories],
        "precisions": model.precisions,  # the first is the default
        "image_datatypes": ["BYTES", "UINT8", "FP32"],
    }
    return {name: json.dumps(value) for name, value in properties.items()}
