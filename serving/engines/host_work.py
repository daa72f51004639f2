"""What the server's own threads do for an image, before an engine and after it.

An engine that takes orders decodes images and encodes masks on its device, which leaves next to
nothing; for any other that is done here.
"""

from typing import Any, Final

from ...model.images import ImageError, is_jpeg
from ...model.manifest import Manifest
from ..detections import Answer, DetectionOptions, Timing
from ..steps.base import Form, Job, Order
from ..steps.postprocessing import detections_from_outputs
from ..steps.preprocessing import SourceImage, plan_image, prepare_image
from .base import EngineInfo, EngineItem, EngineResult

_QUICK_BYTES: Final = 4 << 20
"""Of a JPEG, through which a look at its header goes once in search of scans."""


def is_quick(source: SourceImage, engine: EngineInfo) -> bool:
    """Whether `item_from_image` takes less time than handing it to a thread and back.

    So it is where pixels or a JPEG's header only have to be looked at. Headers of other formats can
    be long, or compressed.
    """
    if not engine.takes_orders:
        return False
    return not isinstance(source, bytes) or (len(source) <= _QUICK_BYTES and is_jpeg(source))


def item_from_image(
    source: SourceImage,
    options: DetectionOptions,
    form: Form,
    manifest: Manifest,
    engine: EngineInfo,
    max_pixels: int,
) -> EngineItem:
    """An image as an engine takes it.

    Raises:
        ImageError: the image cannot be used.
    """
    if not engine.takes_orders:
        return prepare_image(source, manifest.preprocessing, engine.buckets, max_pixels)
    image = plan_image(
        source,
        manifest.preprocessing,
        engine.buckets,
        max_pixels=max_pixels,
        apply_orientation=True,
    )
    return Order(Job(image, options), form)


def answer_from_result(
    result: EngineResult,
    item: EngineItem,
    options: DetectionOptions,
    form: Form,
    manifest: Manifest,
) -> Answer[Any]:
    """What an engine found in an item, timed as far as the engine did that.

    Raises:
        ImageError: the image is damaged.
    """
    if isinstance(result, ImageError):
        raise result
    if isinstance(result, Answer):
        return result
    assert not isinstance(item, Order)
    return Answer(form(detections_from_outputs(result, 0, item, manifest, options)), Timing())
