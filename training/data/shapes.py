"""Shapes of synthetic scenes: their outlines, and the pixels these cover."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

_SUPERSAMPLING = 4

Points = NDArray[np.float64]
"""Corners `[N, 2]` of a polygon, x and y."""


Outline = tuple[Points, ...]
"""A shape around the origin, within the unit circle: its border, then its holes."""


class Pose(NamedTuple):
    """How an outline lies in an image."""

    x: float
    """Of the origin, in pixels."""
    y: float
    """Of the origin, in pixels."""
    radius: float
    """Of the unit circle, in pixels."""
    squeeze: float
    """Height over width, before the rotation."""
    angle: float
    """Of the rotation, in radians."""


class Patch(NamedTuple):
    """What a shape covers of an image."""

    rows: slice
    columns: slice
    coverage: NDArray[np.float32]
    """Share that is covered of each pixel in these rows and columns, 0 to 1."""


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
    turn = np.array([[0, 1], [-1, 0]])
    return np.concatenate([quarter @ np.linalg.matrix_power(turn, n) for n in range(4)])


def _crescent() -> Points:
    """A disc out of which another one, shifted to the right, is cut."""
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


def cover(outline: Outline, pose: Pose, height: int, width: int) -> Patch | None:
    """The pixels of an image that a shape covers; none if it lies outside."""
    outer, *holes = (_place(points, pose) for points in outline)
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


def _place(points: Points, pose: Pose) -> Points:
    cosine, sine = math.cos(pose.angle), math.sin(pose.angle)
    rotation = np.array([[cosine, sine], [-sine, cosine]])
    placed: Points = pose.radius * (points * [1, pose.squeeze]) @ rotation + [pose.x, pose.y]
    return placed
