"""A synthetic data set in COCO format: drawn scenes, annotated with what is seen of each shape."""

import json
import signal
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import numpy as np
from contourpy import FillType, contour_generator
from numpy.typing import NDArray
from PIL import Image
from pycocotools import mask as coco_mask
from pydantic import Field, field_validator

from ...model.config import FrozenConfig
from .scenes import SceneObject, draw_scene
from .shapes import OUTLINES

_JPEG_QUALITY = 90
_MIN_PIECE_PIXELS = 4


class SyntheticConfig(FrozenConfig):
    """What is drawn. Equal configurations give equal files, byte for byte."""

    train: int = Field(1000, ge=1)
    """Training images."""
    val: int = Field(200, ge=1)
    """Validation images."""
    width: int = Field(320, ge=64)
    """Of a landscape picture, in pixels; every other picture is a portrait."""
    height: int = Field(256, ge=64)
    """Of a landscape picture, in pixels."""
    seed: int = Field(0, ge=0)
    classes: tuple[str, ...] = tuple(OUTLINES)
    """Shapes that are drawn, in the order of their category ids."""

    @field_validator("classes")
    @classmethod
    def _check_classes(cls, classes: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in classes if name not in OUTLINES]
        if unknown or not classes or len(set(classes)) < len(classes):
            raise ValueError(f"classes must be different ones of {', '.join(OUTLINES)}")
        return classes


def draw_dataset(
    folder: Path,
    config: SyntheticConfig,
    *,
    workers: int = 1,
    on_image: Callable[[], object] = lambda: None,
) -> None:
    """Draw a data set into `train/`, `val/` and `annotations/` of a folder.

    Args:
        folder: made if it does not exist.
        config: what is drawn.
        workers: processes that draw; they change the speed alone.
        on_image: called after every image.
    """
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    for split, count in (("train", config.train), ("val", config.val)):
        (folder / split).mkdir(exist_ok=True)
        images, annotations = [], []
        for image, own in _drawn(partial(_draw_image, folder, config, split), count, workers):
            images.append(image)
            annotations += own
            on_image()
        content = {
            "info": {"description": "Synthetic shapes", "seed": config.seed},
            "images": images,
            "annotations": [{"id": n, **a} for n, a in enumerate(annotations, start=1)],
            "categories": [{"id": n, "name": c} for n, c in enumerate(config.classes, start=1)],
        }
        (folder / "annotations" / f"{split}.json").write_text(json.dumps(content))


_Drawn = tuple[dict[str, Any], list[dict[str, Any]]]


def _drawn(draw: Callable[[int], _Drawn], count: int, workers: int) -> Iterator[_Drawn]:
    if workers == 1:
        yield from map(draw, range(count))
        return
    # Spawned, for a fork would copy the locks of whatever threads the caller runs; deaf to
    # interrupts, for these end the caller, and leaving the block ends the pool.
    with get_context("spawn").Pool(workers, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        yield from pool.imap(draw, range(count), chunksize=8)


def _draw_image(folder: Path, config: SyntheticConfig, split: str, index: int) -> _Drawn:
    """Draw and save one image; its entry and those of its annotations, still without ids."""
    rng = np.random.default_rng([config.seed, split == "val", index])
    sides = (config.height, config.width)
    height, width = sides if index % 2 == 0 else sides[::-1]
    scene = draw_scene(rng, height, width, config.classes)
    name = f"{index:06d}.jpg"
    Image.fromarray(scene.image).save(folder / split / name, quality=_JPEG_QUALITY)
    image = {"id": index + 1, "file_name": name, "height": height, "width": width}
    annotations = [annotation_from_object(scene_object) for scene_object in scene.objects]
    return image, [{"image_id": index + 1, **annotation} for annotation in annotations]


def annotation_from_object(scene_object: SceneObject) -> dict[str, Any]:
    """COCO annotation of what is seen of an object, without ids of its own and of the image.

    Crowds and objects with holes become run lengths, all others polygons, one a visible piece.
    """
    height, width = scene_object.visible.shape
    rings = _rings_from_coverage(scene_object.visible)
    segmentation: Any
    if scene_object.is_crowd or not rings:
        mask = np.asfortranarray(scene_object.visible > 0.5, np.uint8)
        rle = coco_mask.encode(mask)
        segmentation = {"size": [height, width], "counts": rle["counts"].decode("ascii")}
    else:
        segmentation = [ring.ravel().tolist() for ring in rings]
        rle = coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width))
    return {
        "category_id": scene_object.label,
        "bbox": coco_mask.toBbox(rle).tolist(),
        "area": int(coco_mask.area(rle)),
        "iscrowd": int(scene_object.is_crowd),
        "segmentation": segmentation,
    }


_Pieces = tuple[list[NDArray[np.float64]], list[NDArray[np.uint32]]]
"""contourpy's outlines `[N, 2]`, and where in each one its border and its holes begin."""


def _rings_from_coverage(coverage: NDArray[np.float32]) -> list[NDArray[np.float64]]:
    """Outlines `[N, 2]` where coverage is half, in pixels; none if there are holes."""
    height, width = coverage.shape
    rows, columns = (np.flatnonzero(coverage.any(axis)) for axis in (1, 0))
    top, left = rows[0], columns[0]
    # A border of repeated values lets the outlines of objects that are cut off reach the edge.
    padded = np.pad(coverage, 1, mode="edge")[top : rows[-1] + 3, left : columns[-1] + 3]
    generator = contour_generator(z=padded, fill_type=FillType.OuterOffset)
    pieces, offsets = cast(_Pieces, generator.filled(0.5, np.inf))
    rings = []
    for piece, offset in zip(pieces, offsets, strict=True):
        if len(offset) > 2:
            return []
        # Sample i is the centre of pixel i - 1; the last point repeats the first.
        ring = np.add(piece[:-1], [left - 0.5, top - 0.5]).clip(0, [width, height]).round(1)
        if _area(ring) >= _MIN_PIECE_PIXELS:
            rings.append(ring)
    return rings


def _area(ring: NDArray[np.float64]) -> float:
    x, y = ring.T
    return float(abs(x @ np.roll(y, 1) - y @ np.roll(x, 1))) / 2
