"""What the server's own threads do for an image, before an engine and after it.

An engine that takes jobs decodes images and encodes masks on its device, which leaves next to
nothing; for any other that is done here.
"""

from ..model.images import ImageError
from ..model.manifest import Manifest
from .detections import DetectionOptions, Detections
from .engines import EngineInfo, EngineItem, EngineResult
from .postprocessing import detections_from_outputs
from .preprocessing import SourceImage, plan_image, prepare_image
from .steps import Job


def item_from_image(
    source: SourceImage,
    options: DetectionOptions,
    manifest: Manifest,
    engine: EngineInfo,
    max_pixels: int,
) -> EngineItem:
    """An image as an engine takes it.

    Raises:
        ImageError: the image cannot be used.
    """
    if not engine.takes_jobs:
        return prepare_image(source, manifest.preprocessing, engine.buckets, max_pixels)
    image = plan_image(
        source,
        manifest.preprocessing,
        engine.buckets,
        max_pixels=max_pixels,
        apply_orientation=True,
    )
    return Job(image, options)


def detections_from_result(
    result: EngineResult, item: EngineItem, options: DetectionOptions, manifest: Manifest
) -> Detections:
    """What an engine found in an item, timed as far as the engine did that.

    Raises:
        ImageError: the image is damaged.
    """
    if isinstance(result, ImageError):
        raise result
    if isinstance(result, Detections):
        return result
    assert not isinstance(item, Job)
    return detections_from_outputs(result, 0, item, manifest, options)
