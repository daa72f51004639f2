"""ModelInfer: parse the request's options, detect objects in its images, build the response."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from ...model.image_limits import ImageError
from ...protos.inference import open_inference_pb2 as pb
from ..config import ServeConfig
from ..detections import (
    DEFAULT_SCHEDULING,
    DetectionOptions,
    Detections,
    SchedulingOptions,
    TimedResponse,
    Timing,
    not_encoded,
)
from ..engines.base import SourceImage
from ..errors import InvalidRequestError
from ..pipeline.pipeline import InferenceRequest, Pipeline
from ..pipeline.scheduling import request_deadline
from ..pipeline.served_model import ServedModel
from .input_images import ImageInput, decode_input, reject_parameters, validate_input
from .responses import add_outputs, default_outputs, mask_format_of, output_specs

# Request parameters, with the fields of InferParameter that may hold them.
_PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "score_threshold": ("double_param", "int64_param"),
    "max_detections": ("int64_param", "uint64_param"),
    "precision": ("string_param",),
    "priority": ("uint64_param", "int64_param"),
    "timeout": ("int64_param", "uint64_param"),
    # Sent by Triton's clients. It has no effect here, because each request of a stream has exactly
    # one response, which is the final one.
    "triton_enable_empty_final_response": ("bool_param",),
    # Sequence parameters are accepted without effect. Triton too ignores them unless the model has
    # sequence batching.
    "sequence_id": ("int64_param", "uint64_param", "string_param"),
    "sequence_start": ("bool_param",),
    "sequence_end": ("bool_param",),
}
# Name of a parameter's type in error messages, by field of InferParameter. Clients that send JSON
# do not know these fields.
_TYPES: Final = {
    "bool_param": "true or false",
    "int64_param": "a whole number",
    "uint64_param": "a whole number",
    "double_param": "a decimal number",
    "string_param": "a string",
}


async def infer(
    request: pb.ModelInferRequest,
    pipeline: Pipeline,
    model: ServedModel,
    config: ServeConfig,
    *,
    peer: str,
    admission: AbstractAsyncContextManager[None] | None = None,
) -> tuple[pb.ModelInferResponse, list[Timing]]:
    """Detect objects in the images of a request. Each image is batched independently.

    Call it within `model.use()`, which keeps the model loaded.

    Args:
        request: ModelInfer request.
        pipeline: Pipeline that processes the images.
        model: Model to use, obtained from `pipeline.model`.
        config: Server settings.
        peer: Client address, as `context.peer()` returns it.
        admission: Context manager that holds one admission slot per image. None: acquire the slots
            from `pipeline.admission`.

    Returns:
        The response and the timing of each image.

    Raises:
        ImageError: an image is invalid; the message contains its index.
        InvalidRequestError: another part of the request is invalid.
        QueueFullError: admission control rejects the request; see `AdmissionController.acquire`.
        ExpiredError: the request exceeded its time limit.
        BackendError, BundleError: inference failed; see `Pipeline.detect`.
    """
    manifest = model.manifest
    known = [spec.name for spec in output_specs(manifest)]
    outputs = _requested_outputs(request, known) or default_outputs(manifest)
    parameters = _parameters_of(request)
    options = DetectionOptions(
        score_threshold=parameters.get("score_threshold", 0.0),
        max_detections=parameters.get("max_detections"),
        mask_format=mask_format_of(outputs),
    )
    scheduling = _scheduling_options(request.model_name, parameters, model, peer)
    images = validate_input(request, config.images_per_request, config.max_pixels)
    response = pb.ModelInferResponse(
        model_name=request.model_name, model_version=model.version, id=request.id
    )
    async with request_deadline(scheduling.timeout_s, config.timeout_s):
        async with admission or pipeline.admission.acquire(peer, images.count):
            detecting = _detect_all(pipeline, model, images, options, scheduling)
            del request, images  # `detecting` releases them once the images are decoded
            results = await detecting
        detections = [result.value for result in results]
        await pipeline.threads.run(peer, add_outputs, response, detections, outputs, manifest)
    return response, [result.timing for result in results]


async def _detect_all(
    pipeline: Pipeline,
    model: ServedModel,
    images: ImageInput,
    options: DetectionOptions,
    scheduling: SchedulingOptions,
) -> list[TimedResponse[Detections]]:
    # The conversion of large tensors would block the event loop, so it runs in a thread, and only
    # for admitted requests.
    sources = (await pipeline.threads.run(scheduling.peer, decode_input, images)).value
    del images
    tasks = [
        asyncio.create_task(_detect(pipeline, model, index, source, options, scheduling))
        for index, source in enumerate(sources)
    ]
    del sources
    # Not a TaskGroup: if an image fails while the request is being cancelled, a TaskGroup of Python
    # 3.11 or 3.12 raises only the error of the image, and the request goes on.
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _detect(
    pipeline: Pipeline,
    model: ServedModel,
    index: int,
    image: SourceImage,
    options: DetectionOptions,
    scheduling: SchedulingOptions,
) -> TimedResponse[Detections]:
    detecting = pipeline.detect(
        InferenceRequest(source=image, options=options, scheduling=scheduling, encoder=not_encoded),
        model,
    )
    del image
    try:
        return await detecting
    except ImageError as error:
        raise ImageError(f"images[{index}]: {error}") from error


def _scheduling_options(
    name: str, parameters: Mapping[str, Any], model: ServedModel, peer: str
) -> SchedulingOptions:
    """Return the scheduling options of a request.

    Args:
        name: Model name in the request. It may have a precision suffix, as in `NAME-fp16`.
        parameters: Parameters of the request. A priority or timeout of 0 means the server's
            default.
        model: Model that serves the name `name`.
        peer: Client address, as `context.peer()` returns it.

    Raises:
        InvalidRequestError: a parameter is out of range, or the parameter `precision` contradicts
            the precision suffix of `name`.
    """
    precision = parameters.get("precision") or model.names[name]
    model.check_precision(name, precision)
    timeout_us = parameters.get("timeout", 0)
    return SchedulingOptions(
        precision=precision,
        priority=parameters.get("priority", 0) or DEFAULT_SCHEDULING.priority,
        timeout_s=timeout_us / 1e6 if timeout_us else None,
        peer=peer,
        model=name,
    )


def _requested_outputs(request: pb.ModelInferRequest, known: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the requested outputs, without duplicates. Empty if none are requested.

    Raises:
        InvalidRequestError: an output is not in `known` or has parameters.
    """
    for output in request.outputs:
        if output.name not in known:
            raise InvalidRequestError(
                f"unknown output {output.name!r}; the outputs are {', '.join(known)}"
            )
        reject_parameters(f"output {output.name!r}", output.parameters)
    return tuple(dict.fromkeys(output.name for output in request.outputs))


def _parameters_of(request: pb.ModelInferRequest) -> dict[str, Any]:
    """Return the values of the request's parameters by name.

    Raises:
        InvalidRequestError: a parameter is unknown or has the wrong type.
    """
    values = {}
    for name, parameter in request.parameters.items():
        if name not in _PARAMETERS:
            raise InvalidRequestError(
                f"unknown parameter {name!r}; the parameters are {', '.join(_PARAMETERS)}"
            )
        kind = parameter.WhichOneof("parameter_choice")
        if kind not in _PARAMETERS[name]:
            fields = _PARAMETERS[name]
            types = " or ".join(dict.fromkeys(_TYPES[field] for field in fields))
            raise InvalidRequestError(
                f"parameter {name!r} is {_TYPES[kind] if kind else 'empty'}, but must be {types} "
                f"(in gRPC: {' or '.join(fields)})"
            )
        values[name] = getattr(parameter, kind)
    return values
