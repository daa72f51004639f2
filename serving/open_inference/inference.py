"""From a request for inference to its answer."""

import asyncio
from contextlib import AbstractAsyncContextManager

from ...model.images import ImageError
from ...protos.inference import open_inference_pb2 as pb
from ..detections import Answer, DetectionOptions, Detections, Timing
from ..models import ServedModel
from ..pipeline import Pipeline
from ..scheduling import RequestTerms
from ..steps.preprocessing import SourceImage
from .requests import (
    ImageInput,
    images_from_input,
    input_from_request,
    options_from_request,
    outputs_from_request,
    terms_from_request,
)
from .responses import (
    add_outputs,
    default_outputs,
    empty_response,
    mask_format_of,
    output_specs,
)


async def infer(
    request: pb.ModelInferRequest,
    pipeline: Pipeline,
    model: ServedModel,
    *,
    precision: str | None,
    peer: str,
    max_batch: int,
    max_pixels: int,
    place: AbstractAsyncContextManager[None] | None = None,
) -> tuple[pb.ModelInferResponse, list[Timing]]:
    """Detect in the images of a request, each of which is batched for itself.

    Args:
        request: The request.
        pipeline: What detects.
        model: The model to detect with, which the caller uses.
        precision: The one that the request's model name asks for, if it does.
        peer: The connection that the request came by.
        max_batch: Images that a request may hold.
        max_pixels: Pixels that an image may have.
        place: What to detect within, where the request is to wait for its places.

    Returns:
        The answer, and where the time of each image went.

    Raises:
        ImageError: an image cannot be used; the message names its index.
        InvalidRequestError: something else of the request cannot.
        QueueFullError: too many images are in progress.
        ExpiredError: the request took longer than it may.
        ServingError: what else `Pipeline.detect` raises.
    """
    manifest = model.manifest
    known = [spec.name for spec in output_specs(manifest)]
    outputs = outputs_from_request(request, known) or default_outputs(manifest)
    options = options_from_request(request, mask_format_of(outputs))
    terms = terms_from_request(request, precision, peer)
    images = input_from_request(request, max_batch, max_pixels)
    response = empty_response(request)
    async with pipeline.time_limit(terms.timeout_s):
        async with place or pipeline.places.hold(peer, images.number):
            detecting = _detect_all(pipeline, model, images, options, terms)
            del request, images  # which are held no longer than until they are converted
            answers = await detecting
        found = [answer.value for answer in answers]
        await pipeline.threads.run(peer, add_outputs, response, found, outputs, manifest)
    return response, [answer.timing for answer in answers]


async def _detect_all(
    pipeline: Pipeline,
    model: ServedModel,
    images: ImageInput,
    options: DetectionOptions,
    terms: RequestTerms,
) -> list[Answer[Detections]]:
    # Megabytes are turned over in threads, not in the event loop, and only for who has places.
    sources = (await pipeline.threads.run(terms.peer, images_from_input, images)).value
    del images
    try:
        async with asyncio.TaskGroup() as tasks:
            detecting = [
                tasks.create_task(_detect(pipeline, model, index, source, options, terms))
                for index, source in enumerate(sources)
            ]
            del sources
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in detecting]


async def _detect(
    pipeline: Pipeline,
    model: ServedModel,
    index: int,
    image: SourceImage,
    options: DetectionOptions,
    terms: RequestTerms,
) -> Answer[Detections]:
    detecting = pipeline.detect(image, options, _as_found, terms, model)
    del image
    try:
        return await detecting
    except ImageError as error:
        raise ImageError(f"images[{index}]: {error}") from error


def _as_found(detections: Detections) -> Detections:
    """The form of answer of which responses for several images are made."""
    return detections
