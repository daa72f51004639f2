"""Outlines of the shapes in synthetic scenes, and their rasterization."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

_SUPERSAMPLING = 4

# Vertices `[N, 2]` (x, y) of a polygon.
Points = NDArray[np.float64]

# Shape within the unit circle: polygon of the border, then the polygons of the holes.
Outline = tuple[Points, ...]


class Pose(NamedTuple):
    """Position, size and rotation of an outline in an image."""

    # Position of the outline's origin in pixels.
    x: float
    y: float
    # Radius of the outline's unit circle in pixels.
    radius: float
    # Scale of the y axis relative to the x axis, applied before the rotation.
    squeeze: float
    # Rotation in radians.
    angle: float


class Patch(NamedTuple):
    """Rasterized shape within its bounding box."""

    # Rows and columns of the image that the bounding box covers.
    rows: slice
    columns: slice
    # [rows, columns] share of each pixel that the shape covers, 0 to 1.
    coverage: NDArray[np.float32]


def _polar(angles: NDArray[np.float64], radii: NDArray[np.float64] | float = 1.0) -> Points:
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)


def _circle() -> Points:
    return _polar(np.arange(64) * math.tau / 64)


def _regular_polygon(corners: int) -> Points:
    return _polar(np.arange(corners) * math.tau / corners)


def _star() -> Points:
    return _polar(np.arange(10) * math.tau / 10, np.where(np.arange(10) % 2, 0.45, 1.0))


def _cross() -> Points:
    arm, half = 0.95, 0.3
    quarter = np.array([[arm, -half], [arm, half], [half, half]])
    rotation = np.array([[0, 1], [-1, 0]])
    return np.concatenate([quarter @ np.linalg.matrix_power(rotation, n) for n in range(4)])


def _crescent() -> Points:
    """Return the outline of a unit disc minus a smaller disc that is shifted to the right."""
    tip, shift = math.radians(50), 0.45
    inner_tip = math.atan2(math.sin(tip), math.cos(tip) - shift)
    inner_radius = math.hypot(math.sin(tip), math.cos(tip) - shift)
    outside = _polar(np.linspace(tip, math.tau - tip, 40))
    inside = _polar(np.linspace(math.tau - inner_tip, inner_tip, 40), inner_radius)
    return np.concatenate([outside, inside + np.array([shift, 0])])


OUTLINES: Mapping[str, Outline] = {
    "circle": (_circle(),),
    "square": (_regular_polygon(4),),
    "triangle": (_regular_polygon(3),),
    "star": (_star(),),
    "cross": (_cross(),),
    "ring": (_circle(), 0.55 * _circle()),
    "crescent": (_crescent(),),
}


def rasterize(outline: Outline, pose: Pose, height: int, width: int) -> Patch | None:
    """Rasterize a shape for an image of the given height and width in pixels.

    `outline` lies within the unit circle, and `pose` places it in the image. Return None if the
    shape is outside the image.
    """
    outer, *holes = (_transform(points, pose) for points in outline)
    left, top = np.maximum(np.floor(outer.min(axis=0)), 0).astype(int).tolist()
    right, bottom = np.minimum(np.ceil(outer.max(axis=0)), [width, height]).astype(int).tolist()
    if right <= left or bottom <= top:
        return None
    size = ((right - left) * _SUPERSAMPLING, (bottom - top) * _SUPERSAMPLING)
    canvas = Image.new("L", size)
    draw = ImageDraw.Draw(canvas)
    for points, fill in ((outer, 255), *((hole, 0) for hole in holes)):
        draw.polygon(((points - [left, top]) * _SUPERSAMPLING).ravel().tolist(), fill=fill)
    coverage = np.asarray(canvas.reduce(_SUPERSAMPLING), np.float32) / np.float32(255)
    return Patch(slice(top, bottom), slice(left, right), coverage)


def _transform(points: Points, pose: Pose) -> Points:
    cosine, sine = math.cos(pose.angle), math.sin(pose.angle)
    rotation = np.array([[cosine, sine], [-sine, cosine]])
    moved: Points = pose.radius * (points * [1, pose.squeeze]) @ rotation + [pose.x, pose.y]
    return moved
