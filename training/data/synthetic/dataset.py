"""Generate synthetic data sets in COCO format."""

import json
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
from contourpy import FillType, contour_generator
from filelock import FileLock
from numpy.typing import NDArray
from PIL import Image
from pycocotools import mask as coco_mask
from pydantic import Field, field_validator

from ....model.atomic_files import atomic_write
from ....model.config.schema import YamlConfig
from ....model.masks import Rle, coco_from_rle
from ...config import DatasetConfig, TrainConfig
from ..coco.dataset import DataError
from .scenes import SceneObject, draw_scene
from .shapes import OUTLINES

_JPEG_QUALITY = 90
# Minimum area in pixels of a visible piece of an object. Smaller pieces get no polygon.
_MIN_PIECE_PIXELS = 4
# Number of images for `--use-synthetic-data`.
_BENCHMARK_TRAIN_IMAGES, _BENCHMARK_VAL_IMAGES = 64, 8
# Minimum width and height of the images in pixels.
_MIN_SIDE = 64


class SyntheticConfig(YamlConfig):
    """Settings of a synthetic data set. Equal settings give byte-identical files."""

    train: int = Field(1000, ge=1)
    """Number of training images."""
    val: int = Field(200, ge=1)
    """Number of validation images."""
    width: int = Field(320, ge=_MIN_SIDE)
    """Width of the images in pixels. Every second image has width and height swapped."""
    height: int = Field(256, ge=_MIN_SIDE)
    """Height of the images in pixels."""
    seed: int = Field(0, ge=0)
    """Seed of all random choices."""
    classes: tuple[str, ...] = tuple(OUTLINES)
    """Shapes to draw, in the order of their category ids."""

    @field_validator("classes")
    @classmethod
    def _check_classes(cls, classes: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in classes if name not in OUTLINES]
        if unknown or not classes or len(set(classes)) < len(classes):
            raise ValueError(f"classes must be distinct shapes from {', '.join(OUTLINES)}")
        return classes


def draw_dataset(
    folder: Path,
    config: SyntheticConfig,
    *,
    workers: int | None = 1,
    overwrite: bool = False,
    on_image: Callable[[], object] = lambda: None,
) -> None:
    """Generate a data set, and write it to `train/`, `val/` and `annotations/` in a folder.

    Args:
        folder: Output folder. It is created if it does not exist.
        config: Settings of the data set.
        workers: Number of processes. The files do not depend on this number. None: one per core
            that this process may use.
        overwrite: Delete the surplus images if the folder contains an earlier, larger data set.
            Files with the same name are always replaced.
        on_image: Called after each image.

    Raises:
        DataError: A worker process was killed.
    """
    workers = workers or len(os.sched_getaffinity(0))
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    paths = {split: folder / "annotations" / f"{split}.json" for split in ("train", "val")}
    # An interruption must not leave new images with the annotations of an earlier data set.
    for path in paths.values():
        path.unlink(missing_ok=True)
    for split, count in (("train", config.train), ("val", config.val)):
        (folder / split).mkdir(exist_ok=True)
        if overwrite:
            _delete_surplus_images(folder / split, count)
        images, annotations = [], []
        for image, image_annotations in _draw_images(folder, config, split, count, workers):
            images.append(image)
            annotations += image_annotations
            on_image()
        content = {
            "info": {"description": "Synthetic shapes", "seed": config.seed},
            "images": images,
            "annotations": [{"id": n, **a} for n, a in enumerate(annotations, start=1)],
            "categories": [{"id": n, "name": c} for n, c in enumerate(config.classes, start=1)],
        }
        with atomic_write(paths[split]) as file:
            file.write(json.dumps(content).encode())


def _delete_surplus_images(folder: Path, count: int) -> None:
    for path in folder.glob("[0-9]" * 6 + ".jpg"):
        if int(path.stem) >= count:
            path.unlink()


def with_synthetic_data(config: TrainConfig) -> TrainConfig:
    """Replace the data sets of a configuration by synthetic ones, to measure training speed.

    The images are `data.max_size` pixels wide and `data.min_size` high, or the reverse. Each side
    has at least 64 pixels. If `output_dir` does not contain the images, this function generates
    them. If several processes call this function, one generates the images and the others wait.

    Raises:
        ConfigError: `output_dir` cannot be created or written.
    """
    from ...run_folder import create_output_folder  # slow import; workers do not need it

    data = config.data
    drawn = SyntheticConfig(
        train=_BENCHMARK_TRAIN_IMAGES,
        val=_BENCHMARK_VAL_IMAGES,
        width=max(_MIN_SIDE, data.max_size),
        height=max(_MIN_SIDE, data.min_size),
    )
    folder = config.output_dir / f"synthetic-{drawn.width}x{drawn.height}"
    create_output_folder(config.output_dir)
    with FileLock(config.output_dir / ".synthetic.lock"):
        if not folder.exists():
            partial_folder = folder.with_name(f".{folder.name}.partial")
            draw_dataset(partial_folder, drawn, workers=None)
            partial_folder.rename(folder)
    sets = {
        "train": _split_of(folder, "train"),
        "extra_train": (),
        "val": data.val and _split_of(folder, "val"),
    }
    return config.model_copy(update={"data": data.model_copy(update=sets)})


def _split_of(folder: Path, split: str) -> DatasetConfig:
    return DatasetConfig(
        images=folder / split, annotations=folder / "annotations" / f"{split}.json"
    )


# Entry of one image in the list `images` of a COCO file, and entries of its objects in the list
# `annotations`.
_Drawn = tuple[dict[str, Any], list[dict[str, Any]]]


def _draw_images(
    folder: Path, config: SyntheticConfig, split: str, count: int, workers: int
) -> Iterator[_Drawn]:
    draw = partial(_draw_image, folder, config, split)
    if workers == 1:
        yield from map(draw, range(count))
        return
    # Start the processes with "spawn", because a fork would copy locks that other threads hold.
    # Each process has its own pipe, which is closed when the process ends. An executor has one pipe
    # for all processes. If a process were killed while it writes to this pipe, the main process
    # would wait forever for the rest of the message.
    context = multiprocessing.get_context("spawn")
    receivers = []
    with ExitStack() as stack:
        for worker in range(min(workers, count)):
            receiver, sender = context.Pipe(duplex=False)
            indices = range(worker, count, workers)
            process = context.Process(target=_send_images, args=(sender, draw, indices))
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            sender.close()
            receivers.append(stack.enter_context(receiver))
        for index in range(count):
            yield _received(receivers[index % workers], folder / split)


def _send_images(sender: Connection, draw: Callable[[int], _Drawn], indices: Iterable[int]) -> None:
    """Generate images in a worker process. Send their COCO entries or an error to the parent."""
    # End immediately on Ctrl+C, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The pipe is broken if the main process was killed.
    with suppress(BrokenPipeError):
        try:
            for index in indices:
                sender.send(draw(index))
        except Exception as error:
            try:
                sender.send(error)
            except (TypeError, AttributeError, pickle.PicklingError):
                sender.send(RuntimeError(repr(error)))


def _received(receiver: Connection, folder: Path) -> _Drawn:
    try:
        drawn = receiver.recv()
    except (EOFError, OSError):
        raise DataError(
            f"{folder}: a worker process was killed, perhaps because memory ran out; draw the data "
            "set again with fewer processes, as with `maskrcnn data synthetic --workers 1 "
            "--overwrite`"
        ) from None
    if isinstance(drawn, Exception):
        raise drawn
    return cast(_Drawn, drawn)


def _draw_image(folder: Path, config: SyntheticConfig, split: str, index: int) -> _Drawn:
    """Draw and save one image. Return its COCO entries; the annotations have no `id` yet."""
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
    """Return the COCO annotation of an object's visible part, without `id` and `image_id`.

    If the object is a crowd, has holes, or has only tiny visible regions, its segmentation is an
    RLE. Otherwise, it consists of one polygon per connected visible region.
    """
    height, width = scene_object.visible.shape
    rings = _rings_from_coverage(scene_object.visible)
    segmentation: Any
    if scene_object.is_crowd or not rings:
        mask = np.asfortranarray(scene_object.visible > 0.5, np.uint8)
        rle = coco_mask.encode(mask)
        segmentation = coco_from_rle(Rle(height, width, rle["counts"]))
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


# Output of contourpy: two lists with one array per visible piece of an object. First list: points
# `[N, 2]`. Second list: indices of the points at which the outer border and each hole begin.
_Pieces = tuple[list[NDArray[np.float64]], list[NDArray[np.uint32]]]


def _rings_from_coverage(coverage: NDArray[np.float32]) -> list[NDArray[np.float64]]:
    """Return the outline `[N, 2]` (x, y) in pixels of each connected visible region of an object.

    `coverage` is `[H, W]`, the fraction of each image pixel in which the object is visible. Regions
    smaller than `_MIN_PIECE_PIXELS` are left out. If a region has holes, the list is empty.
    """
    height, width = coverage.shape
    rows, columns = (np.flatnonzero(coverage.any(axis)) for axis in (1, 0))
    top, left = rows[0], columns[0]
    # Edge padding makes the outlines of truncated objects reach the image border.
    padded = np.pad(coverage, 1, mode="edge")[top : rows[-1] + 3, left : columns[-1] + 3]
    generator = contour_generator(z=padded, fill_type=FillType.OuterOffset)
    pieces, offsets = cast(_Pieces, generator.filled(0.5, np.inf))
    rings = []
    for piece, offset in zip(pieces, offsets, strict=True):
        if len(offset) > 2:
            return []
        # Padded sample i is the centre of pixel i - 1. The last point repeats the first.
        ring = np.add(piece[:-1], [left - 0.5, top - 0.5]).clip(0, [width, height]).round(1)
        if _area(ring) >= _MIN_PIECE_PIXELS:
            rings.append(ring)
    return rings


def _area(ring: NDArray[np.float64]) -> float:
    x, y = ring.T
    return float(abs(x @ np.roll(y, 1) - y @ np.roll(x, 1))) / 2
