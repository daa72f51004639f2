"""Show sample images with annotations in a grid: suspicious images first, then random ones."""

import math
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from ....model.bundle.manifest import Category
from ....model.image_limits import ImageError
from ....model.masks import Rle, mask_from_rle
from ..coco.annotations import Instance
from ..coco.dataset import LONE_SURROGATE, CocoDataset, ImageRecord
from ..loading.batch_reader import read_image
from .annotation_checks import Suspicion

_COLUMNS = 4
_CELL_INCHES = 4.0
_TITLE_CHARACTERS = 50
# Opacity of masks.
_OPACITY = 0.35
# Height of a class name relative to the image.
_NAME_HEIGHT = 0.05
# Side of the square that shows a suspicious object, relative to the object's longer side.
_VIEW = 6.0
# Lower and upper limit of this square's side, relative to the longer side of the image.
_MIN_VIEW, _MAX_VIEW = 0.25, 1.1
# Coordinates are clipped to this multiple of the image's longer side.
_CLIP_FACTOR = 10
# Fonts for characters that matplotlib's own font lacks.
_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans CJK KR",
    "Noto Sans Devanagari",
    "WenQuanYi Micro Hei",
    "Arial Unicode MS",
    "PingFang SC",
    "Microsoft YaHei",
)
# Metadata of the PNG files that `draw_samples` writes.
_METADATA = {"Software": "maskrcnn-trt"}
# Hue difference between consecutive labels, so that nearby labels have distinct colours.
_GOLDEN_RATIO = 0.618034


class GridSample(NamedTuple):
    """Image with annotations, for one cell of a grid of sample images."""

    record: ImageRecord
    categories: tuple[Category, ...]
    # Suspicion for which the image was chosen. None: the image was chosen at random.
    suspicion: Suspicion | None = None
    # Pixels [H, W, 3]. None: read the image file.
    image: NDArray[np.uint8] | None = None
    # Text above the image. The name of the image file follows it.
    title: str = ""


def choose_samples(
    datasets: Sequence[CocoDataset], suspicions: Sequence[Suspicion], count: int, seed: int
) -> list[GridSample]:
    """Choose sample images. Up to half are suspicious images; the rest are random images.

    Suspicious images are chosen round-robin over the reasons for suspicion, so that images with
    rare reasons appear too.

    Args:
        datasets: Splits of a data set.
        suspicions: Suspicious annotations and files of these splits.
        count: Maximum number of samples.
        seed: Seed of the random choice.
    """
    pool = [(record, d.categories) for d in datasets for record in d.records]
    # Use identity as the key, because splits with different classes can list the same file.
    classes = {id(record): categories for record, categories in pool}
    by_reason: dict[str, list[Suspicion]] = defaultdict(list)
    for suspicion in suspicions:
        by_reason[suspicion.reason].append(suspicion)
    rng = np.random.default_rng(seed)
    shuffled = [[group[n] for n in rng.permutation(len(group))] for group in by_reason.values()]
    suspicious = [
        GridSample(suspicion.record, classes[id(suspicion.record)], suspicion)
        for suspicion in islice(_round_robin(shuffled), math.ceil(count / 2))
    ]
    order = rng.permutation(len(pool))[: count - len(suspicious)]
    return [*suspicious, *(GridSample(*pool[n]) for n in order)]


def compared_samples(
    record: ImageRecord,
    detections: tuple[Instance, ...],
    categories: tuple[Category, ...],
    title: str,
) -> list[GridSample]:
    """Return two samples of an image: one with its ground truth, one with `detections`.

    `title` is the title of the second sample.
    """
    return [
        GridSample(record, categories, title="annotated"),
        GridSample(replace(record, instances=detections), categories, title=title),
    ]


@contextmanager
def class_name_fonts() -> Iterator[None]:
    """Context manager that lets matplotlib use installed fonts for characters its own font lacks.

    A character that no font has becomes a box, without a warning. Not thread-safe.
    """
    installed = {*font_manager.get_font_names()}
    families = [*mpl.rcParams["font.family"], *(name for name in _FONTS if name in installed)]
    with mpl.rc_context({"font.family": families}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        yield


def is_sample_grid(path: Path) -> bool:
    """Return whether `draw_samples` wrote the file at `path`."""
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(path) as image:
            return image.info.get("Software") == _METADATA["Software"]
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):  # damaged, or huge
        return False


@class_name_fonts()
def draw_samples(samples: Sequence[GridSample], path: Path) -> None:
    """Write a PNG file with a grid of images on which masks, boxes and class names are drawn.

    A suspicious annotation has a red box, and the title of the image states the reason. Crowds have
    dashed boxes.

    Args:
        samples: Images of the grid, at least one.
        path: PNG file to write. Its folder is created if it does not exist.
    """
    rows = math.ceil(len(samples) / _COLUMNS)
    size = (_COLUMNS * _CELL_INCHES, rows * _CELL_INCHES)
    figure = Figure(figsize=size, layout="constrained")
    cells = figure.subplots(rows, _COLUMNS, squeeze=False).ravel()
    for cell, sample in zip(cells, samples, strict=False):
        _draw_sample(cell, sample)
    for cell in cells:
        cell.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=100, metadata=_METADATA)


def _round_robin(groups: Sequence[Sequence[Suspicion]]) -> Iterator[Suspicion]:
    for index in range(max(map(len, groups), default=0)):
        yield from (group[index] for group in groups if index < len(group))


def _draw_sample(axes: Axes, sample: GridSample) -> None:
    record, categories, suspicion, image, title = sample
    suspect = suspicion.instance if suspicion else None
    title = ": ".join(filter(None, (title, record.path.name)))
    if suspect is not None:
        title += f", annotation {suspect.annotation_id}"
    if suspicion is not None:
        title = ": ".join(filter(None, (suspicion.reason, suspicion.detail, title)))
    colour = "black" if suspicion is None else "red"
    axes.set_title(_wrapped(title), fontsize=9, color=colour, parse_math=False)
    try:
        image = read_image(record) if image is None else image
    except ImageError as error:
        text = _wrapped(str(error))
        axes.text(0.5, 0.5, text, ha="center", transform=axes.transAxes, parse_math=False)
        return
    instances = sorted(record.instances, key=lambda instance: -instance.area)
    for instance in instances:
        if isinstance(instance.segmentation, Rle):
            covered = mask_from_rle(instance.segmentation) != 0
            paint = 255 * _OPACITY * np.array(_colour_of(instance))
            image[covered] = (1 - _OPACITY) * image[covered] + paint
    axes.imshow(image, extent=(0, record.width, record.height, 0))
    for instance in instances:
        _draw_instance(axes, record, instance, categories[instance.label - 1].name)
    if suspect is not None:
        _show_surroundings(axes, record, suspect)


def _draw_instance(axes: Axes, record: ImageRecord, instance: Instance, name: str) -> None:
    colour = _colour_of(instance)
    if not isinstance(instance.segmentation, Rle):
        for ring in instance.segmentation:
            corners = _clipped(record, ring).reshape(-1, 2)
            axes.add_patch(Polygon(corners, facecolor=colour, alpha=_OPACITY))
    _draw_box(
        axes, record, instance, edgecolor=colour, linestyle="--" if instance.is_crowd else "-"
    )
    left, top = _clipped(record, instance.bbox[:2])
    patch = {"facecolor": [(1 + part) / 2 for part in colour], "linewidth": 0, "pad": 0.5}
    anchor = "bottom" if top > _NAME_HEIGHT * record.height else "top"
    text = drawable(name)
    axes.text(left, top, text, fontsize=7, va=anchor, bbox=patch, clip_on=True, parse_math=False)


def _draw_box(axes: Axes, record: ImageRecord, instance: Instance, **style: Any) -> None:
    x, y, width, height = instance.bbox
    left, top, right, bottom = _clipped(record, (x, y, x + width, y + height))
    axes.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, **style))


def _clipped(record: ImageRecord, coordinates: ArrayLike) -> NDArray[np.float64]:
    # Clip the coordinates, because Matplotlib fails with an overflow on huge ones.
    limit = _CLIP_FACTOR * max(record.height, record.width)
    return np.clip(np.asarray(coordinates, np.float64), -limit, limit)


def _colour_of(instance: Instance) -> tuple[float, float, float]:
    red, green, blue, _ = mpl.colormaps["hsv"](instance.label * _GOLDEN_RATIO % 1)
    return red, green, blue


def _show_surroundings(axes: Axes, record: ImageRecord, suspect: Instance) -> None:
    """Draw a red box around a suspicious instance, and zoom in on this instance."""
    _draw_box(axes, record, suspect, edgecolor="red", linewidth=2)
    # Zoom to the clipped box, because a suspicious box may extend far beyond the image.
    left, top, right, bottom = suspect.clipped_box(record.height, record.width)
    longest = max(record.height, record.width)
    view = max(_VIEW * max(right - left, bottom - top), _MIN_VIEW * longest)
    half = min(view, _MAX_VIEW * longest) / 2
    x, y = (left + right) / 2, (top + bottom) / 2
    axes.set(xlim=(x - half, x + half), ylim=(y + half, y - half))


def _wrapped(text: str) -> str:
    return textwrap.fill(drawable(text), _TITLE_CHARACTERS)


def drawable(text: str) -> str:
    """Replace each lone surrogate in a text by U+FFFD. Matplotlib rejects lone surrogates."""
    return LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)
