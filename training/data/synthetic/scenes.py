"""Draw random scenes of overlapping textured shapes, with each shape's visible mask."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from .shapes import OUTLINES, Patch, Pose, rasterize
from .textures import Texture, background, fill

# Shapes with fewer visible pixels, or a smaller visible share, are left out of the scene, unless
# they belong to a crowd.
_MIN_VISIBLE_PIXELS = 24
_MIN_VISIBLE_SHARE = 0.2


@dataclass(frozen=True)
class SceneObject:
    """Object of a scene, or crowd (group of small objects)."""

    # 1 is the first class.
    label: int
    is_crowd: bool
    # [H, W] share of each image pixel that shows the object, 0 to 1.
    visible: NDArray[np.float32]


class Scene(NamedTuple):
    """Drawn image with its objects."""

    # [H, W, 3] RGB.
    image: NDArray[np.uint8]
    objects: tuple[SceneObject, ...]


class _Figure(NamedTuple):
    """Shape at its position in a scene."""

    # 1 is the first class.
    label: int
    in_crowd: bool
    # In pixels.
    radius: float
    patch: Patch


def draw_scene(rng: Generator, height: int, width: int, classes: Sequence[str]) -> Scene:
    """Draw a random scene.

    Args:
        rng: Random generator.
        height: Height of the image in pixels.
        width: Width of the image in pixels.
        classes: Names of shapes, in the order of their labels.
    """
    figures = _random_figures(rng, height, width, classes)
    # Figures are sorted from front to back, so the visible part of a figure is the part that the
    # earlier figures leave uncovered.
    uncovered = np.ones((height, width), np.float32)
    shown: list[tuple[_Figure, NDArray[np.float32]]] = []
    for figure in figures:
        window = figure.patch.rows, figure.patch.columns
        visible = figure.patch.coverage * uncovered[window]
        needed = max(_MIN_VISIBLE_PIXELS, _MIN_VISIBLE_SHARE * figure.patch.coverage.sum())
        if figure.in_crowd or np.count_nonzero(visible > 0.5) >= needed:
            uncovered[window] -= visible
            shown.append((figure, visible))
    image = background(rng, height, width)
    for figure, _ in reversed(shown):
        _paint(rng, image, figure)
    return Scene(_simulate_camera(rng, image), _objects_from(shown, height, width))


def _random_figures(
    rng: Generator, height: int, width: int, classes: Sequence[str]
) -> list[_Figure]:
    """Place random shapes. Return them sorted from front to back."""
    # Some images have no objects.
    if rng.random() < 0.06:
        return []
    side = min(height, width)
    figures = []
    for _ in range(rng.integers(1, 14)):
        radius = math.exp(rng.uniform(math.log(6), math.log(0.36 * side)))
        x, y = rng.uniform(0.02, 0.98, 2) * [width, height]
        figures.append((int(rng.integers(len(classes))), False, x, y, radius))
    if rng.random() < 0.08:
        label = int(rng.integers(len(classes)))
        number = int(rng.integers(10, 25))
        radius = rng.uniform(0.02, 0.04) * side
        x, y = rng.uniform(0.2, 0.8, 2) * [width, height]
        for dx, dy in rng.normal(0, 0.6 * radius * math.sqrt(number), (number, 2)):
            figures.append((label, True, x + dx, y + dy, radius))
    # Smaller shapes tend to be in front, because otherwise few of them would be visible.
    depths = [radius * math.exp(rng.normal(0, 0.7)) for *_, radius in figures]
    placed = []
    for number in np.argsort(depths):
        label, in_crowd, x, y, radius = figures[number]
        pose = Pose(x, y, radius, rng.uniform(0.6, 1.0), rng.uniform(0, math.tau))
        patch = rasterize(OUTLINES[classes[label]], pose, height, width)
        if patch is not None:
            placed.append(_Figure(label + 1, in_crowd, radius, patch))
    return placed


def _paint(rng: Generator, image: Texture, figure: _Figure) -> None:
    """Paint a figure and its shadow onto `image`, in place."""
    window = figure.patch.rows, figure.patch.columns
    coverage = figure.patch.coverage
    height, width = coverage.shape
    surface = fill(rng, height, width, figure.radius * rng.uniform(0.3, 1.2))
    # Some figures have little contrast with the background.
    contrast = np.float32(1 - 0.75 * rng.random() ** 3)
    behind = image[window].mean(axis=(0, 1))
    surface = behind + (surface - behind) * contrast
    _cast_shadow(rng, image, figure)
    rounded = surface * _relief(coverage, figure.radius)
    image[window] += (rounded - image[window]) * coverage[..., None]


def _relief(coverage: NDArray[np.float32], radius: float) -> Texture:
    """Return brightness factors `[h, w, 1]` that decrease towards the edge of a shape.

    `coverage` is `[h, w]`, the fraction of each pixel inside the shape. `radius` is the radius of
    the shape in pixels.
    """
    blurred = _blur(coverage, 0.15 * radius)
    return (np.float32(0.7) + np.float32(0.3) * blurred)[..., None]


def _cast_shadow(rng: Generator, image: Texture, figure: _Figure) -> None:
    height, width = image.shape[:2]
    reach = max(1, round(0.12 * figure.radius))
    margin = 2 * reach
    rows, columns, coverage = figure.patch
    shadow = _blur(np.pad(coverage, margin), reach / 2)
    shadow *= np.float32(rng.uniform(0, 0.5))
    dy, dx = (int(n) for n in rng.integers(-reach, reach + 1, 2))
    top, left = rows.start - margin + dy, columns.start - margin + dx
    inside_rows = slice(max(top, 0), min(top + shadow.shape[0], height))
    inside_columns = slice(max(left, 0), min(left + shadow.shape[1], width))
    inside = shadow[
        inside_rows.start - top : inside_rows.stop - top,
        inside_columns.start - left : inside_columns.stop - left,
    ]
    image[inside_rows, inside_columns] *= 1 - inside[..., None]


def _blur(values: NDArray[np.float32], radius: float) -> NDArray[np.float32]:
    image = Image.fromarray((values * 255).astype(np.uint8))
    blurred = image.filter(ImageFilter.GaussianBlur(radius))
    return np.asarray(blurred, np.float32) / np.float32(255)


def _simulate_camera(rng: Generator, image: Texture) -> NDArray[np.uint8]:
    """Apply random exposure and sensor noise. Return 8-bit RGB."""
    image = image * np.float32(rng.uniform(0.75, 1.2))
    image += rng.standard_normal(image.shape, np.float32) * np.float32(rng.uniform(0, 0.03))
    return (image.clip(0, 1) * 255).astype(np.uint8)


def _objects_from(
    shown: Sequence[tuple[_Figure, NDArray[np.float32]]], height: int, width: int
) -> tuple[SceneObject, ...]:
    objects = []
    crowd = np.zeros((height, width), np.float32)
    crowd_label = 0
    for figure, visible in shown:
        if figure.in_crowd:
            crowd[figure.patch.rows, figure.patch.columns] += visible
            crowd_label = figure.label
            continue
        whole = np.zeros((height, width), np.float32)
        whole[figure.patch.rows, figure.patch.columns] = visible
        objects.append(SceneObject(figure.label, is_crowd=False, visible=whole))
    if crowd.max() > 0.5:
        objects.append(SceneObject(crowd_label, is_crowd=True, visible=crowd))
    return tuple(objects)
