"""Samples of a data set as one picture: suspicious ones first, then some at random."""

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle
from numpy.typing import ArrayLike, NDArray

from ...model.images import ImageError
from ...model.manifest import Category
from ...model.masks import Rle, mask_from_rle
from .annotation_checks import Suspicion
from .coco import CocoDataset, ImageRecord
from .instances import Instance
from .reading import read_image

_COLUMNS = 4
_CELL_INCHES = 4.0
_TITLE_CHARACTERS = 50
_OPACITY = 0.35
_NAME_ROOM = 0.05
"""Share of the image's height that a name above a box takes."""
_VIEW = 6.0
"""A suspicious object is shown in surroundings of so many times its size."""
_MIN_VIEW = 0.25
"""Share of the image's longer side that is shown at least."""
_MAX_VIEW = 1.1
"""Share of the image's longer side that is shown at most."""
_VICINITY = 10
"""Outlines are cut off at so many times the image's longer side."""
_GOLDEN_RATIO = 0.618034


class Sample(NamedTuple):
    """An image to show, and why."""

    record: ImageRecord
    categories: tuple[Category, ...]
    suspicion: Suspicion | None = None


def choose_samples(
    datasets: Sequence[CocoDataset], suspicions: Sequence[Suspicion], count: int, seed: int
) -> list[Sample]:
    """As many suspicious samples as half of the count, of each reason in turn; the rest at random.

    Args:
        datasets: the splits of a data set.
        suspicions: what was found in them.
        count: samples, if there are as many.
        seed: fixes the choice.
    """
    by_path = {record.path: d.categories for d in datasets for record in d.records}
    pool = [(record, d.categories) for d in datasets for record in d.records]
    by_reason: dict[str, list[Suspicion]] = defaultdict(list)
    for suspicion in suspicions:
        by_reason[suspicion.reason].append(suspicion)
    rng = np.random.default_rng(seed)
    shuffled = [[group[n] for n in rng.permutation(len(group))] for group in by_reason.values()]
    suspicious = [
        Sample(suspicion.record, by_path[suspicion.record.path], suspicion)
        for suspicion in islice(_in_turn(shuffled), math.ceil(count / 2))
    ]
    order = rng.permutation(len(pool))[: count - len(suspicious)]
    return [*suspicious, *(Sample(*pool[n]) for n in order)]


def draw_samples(samples: Sequence[Sample], picture: Path) -> None:
    """Draw samples with masks, boxes and class names into a PNG.

    What is suspicious has a red frame and the reason above it; crowds have dashed boxes.

    Args:
        samples: at least one.
        picture: file to write, in a folder that is made if it does not exist.
    """
    rows = math.ceil(len(samples) / _COLUMNS)
    size = (_COLUMNS * _CELL_INCHES, rows * _CELL_INCHES)
    figure = Figure(figsize=size, layout="constrained")
    cells = figure.subplots(rows, _COLUMNS, squeeze=False).ravel()
    for cell, sample in zip(cells, samples, strict=False):
        _draw_sample(cell, sample)
    for cell in cells:
        cell.axis("off")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, format="png", dpi=100)


def _in_turn(groups: Sequence[Sequence[Suspicion]]) -> Iterator[Suspicion]:
    for turn in range(max(map(len, groups), default=0)):
        yield from (group[turn] for group in groups if turn < len(group))


def _draw_sample(axes: Axes, sample: Sample) -> None:
    record, categories, suspicion = sample
    suspect = suspicion.instance if suspicion else None
    title = record.path.name
    if suspect is not None:
        title += f", annotation {suspect.annotation_id}"
    if suspicion is not None:
        title = ": ".join(filter(None, (suspicion.reason, suspicion.detail, title)))
    colour = "black" if suspicion is None else "red"
    axes.set_title(_wrapped(title), fontsize=9, color=colour, parse_math=False)
    try:
        image = read_image(record)
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
    """Draw the outline, if it is one of polygons, and the box with its name."""
    colour = _colour_of(instance)
    if not isinstance(instance.segmentation, Rle):
        for ring in instance.segmentation:
            corners = _near(record, ring).reshape(-1, 2)
            axes.add_patch(Polygon(corners, facecolor=colour, alpha=_OPACITY))
    _draw_box(
        axes, record, instance, edgecolor=colour, linestyle="--" if instance.is_crowd else "-"
    )
    left, top = _near(record, instance.bbox[:2])
    ground = {"facecolor": [(1 + part) / 2 for part in colour], "linewidth": 0, "pad": 0.5}
    place = "bottom" if top > _NAME_ROOM * record.height else "top"
    axes.text(left, top, name, fontsize=7, va=place, bbox=ground, clip_on=True, parse_math=False)


def _draw_box(axes: Axes, record: ImageRecord, instance: Instance, **style: Any) -> None:
    x, y, width, height = instance.bbox
    left, top, right, bottom = _near(record, (x, y, x + width, y + height))
    axes.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, **style))


def _near(record: ImageRecord, coordinates: ArrayLike) -> NDArray[np.float64]:
    """Coordinates drawn into the vicinity of the image: absurd ones overflow in drawing."""
    limit = _VICINITY * max(record.height, record.width)
    return np.clip(np.asarray(coordinates, np.float64), -limit, limit)


def _colour_of(instance: Instance) -> tuple[float, float, float]:
    """RGB from 0 to 1, far from those of the labels beside it."""
    red, green, blue, _ = mpl.colormaps["hsv"](instance.label * _GOLDEN_RATIO % 1)
    return red, green, blue


def _show_surroundings(axes: Axes, record: ImageRecord, suspect: Instance) -> None:
    """Frame the suspect, and show as much around it as it takes to recognise it."""
    _draw_box(axes, record, suspect, edgecolor="red", linewidth=2)
    # Around what is seen of it: a box may stick out by any length.
    left, top, right, bottom = suspect.clipped_box(record.height, record.width)
    longest = max(record.height, record.width)
    wanted = max(_VIEW * max(right - left, bottom - top), _MIN_VIEW * longest)
    half = min(wanted, _MAX_VIEW * longest) / 2
    x, y = (left + right) / 2, (top + bottom) / 2
    axes.set(xlim=(x - half, x + half), ylim=(y + half, y - half))


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _TITLE_CHARACTERS)
