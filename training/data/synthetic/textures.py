"""Draw random textures of backgrounds and objects in synthetic scenes.

Images are `[h, w, 3]` float32 RGB; 0 is black and 1 is white, but values are not clipped. Patterns
are `[h, w]` float32 in 0..1.
"""

import colorsys
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Texture = NDArray[np.float32]

_CLUTTER_SUPERSAMPLING = 2


def _random_colour(rng: Generator, saturation: tuple[float, float]) -> NDArray[np.float32]:
    """Return a random RGB colour `[3]` with a saturation between two limits."""
    hue, value = rng.random(), rng.uniform(0.25, 0.95)
    return np.array(colorsys.hsv_to_rgb(hue, rng.uniform(*saturation), value), np.float32)


def _noise(rng: Generator, height: int, width: int, cell: float) -> Texture:
    """Draw smooth noise `[h, w]` with features about `cell` pixels wide."""
    rows, columns = math.ceil(height / cell) + 2, math.ceil(width / cell) + 2
    grid = Image.fromarray(rng.random((rows, columns), np.float32))
    box = (0.5, 0.5, 0.5 + width / cell, 0.5 + height / cell)
    resized = grid.resize((width, height), Image.Resampling.BICUBIC, box)
    return np.asarray(resized, np.float32).clip(0, 1)


def _fractal_noise(rng: Generator, height: int, width: int, cell: float) -> Texture:
    """Draw noise `[h, w]`: the sum of smooth noises with features of four widths.

    The widths are `cell` pixels, and 1/2, 1/4 and 1/8 of it. The amplitude of each smooth noise is
    proportional to the width of its features.
    """
    total = sum(_noise(rng, height, width, max(cell / 2**n, 1)) / 2**n for n in range(4))
    return np.asarray(total / 1.875, np.float32)


# Function from the phases `[h, w]` of two orthogonal waves to a pattern.
_Pattern = Callable[[Texture, Texture], Any]

_BACKGROUND_PATTERNS: tuple[_Pattern, ...] = (
    lambda u, v: np.zeros_like(u),  # plain
    lambda u, v: 0.5 + 0.5 * np.sin(u),  # waves
    lambda u, v: 0.5 + 0.5 * np.tanh(4 * np.sin(u)),  # stripes
    lambda u, v: 0.5 + 0.5 * np.tanh(6 * np.sin(u) * np.sin(v)),  # checks
    lambda u, v: 0.5 + 0.25 * (np.sin(u) + np.sin(v)),  # weave
)
# Backgrounds have no dots, because large dots would look like objects of the class "circle".
_SURFACE_PATTERNS: tuple[_Pattern, ...] = (
    *_BACKGROUND_PATTERNS,
    lambda u, v: 0.5 + 0.5 * np.tanh(4 * (np.sin(u) + np.sin(v) - 0.8)),
)


def _pattern(
    rng: Generator, choices: Sequence[_Pattern], height: int, width: int, period: float
) -> Texture:
    """Return a random pattern of `choices` at a random angle, repeated every `period` pixels."""
    angle = rng.uniform(0, math.pi)
    y, x = np.mgrid[:height, :width].astype(np.float32)
    frequency = math.tau / period
    u = frequency * (x * math.cos(angle) + y * math.sin(angle)) + rng.uniform(0, math.tau)
    v = frequency * (y * math.cos(angle) - x * math.sin(angle)) + rng.uniform(0, math.tau)
    weight: Texture = choices[int(rng.integers(len(choices)))](u, v)
    return weight


def background(rng: Generator, height: int, width: int) -> Texture:
    """Draw a scene's background `[h, w, 3]`: texture, brightness gradient and often clutter."""
    side = min(height, width)
    first, second = _random_colour(rng, (0.05, 0.6)), _random_colour(rng, (0.05, 0.6))
    weight = _fractal_noise(rng, height, width, rng.uniform(0.1, 0.8) * side)
    if rng.random() < 0.5:
        regular = _pattern(rng, _BACKGROUND_PATTERNS, height, width, rng.uniform(0.06, 0.5) * side)
        weight = weight + (regular - weight) * np.float32(rng.uniform(0.2, 0.9))
    image = first + (second - first) * weight[..., None]
    if rng.random() < 0.6:
        image = _clutter(rng, image)
    return image * _light(rng, height, width)[..., None]


def fill(rng: Generator, height: int, width: int, period: float) -> Texture:
    """Draw the surface `[h, w, 3]` of an object: a pattern of two colours with some noise.

    The pattern is repeated every `period` pixels.
    """
    first = _random_colour(rng, (0.15, 0.95))
    second = first + (_random_colour(rng, (0.1, 0.9)) - first) * np.float32(rng.uniform(0.1, 0.9))
    weight = _pattern(rng, _SURFACE_PATTERNS, height, width, period)
    stain = _noise(rng, height, width, max(period, 2)) - np.float32(0.5)
    surface = first + (second - first) * weight[..., None]
    surface += stain[..., None] * np.float32(rng.uniform(0, 0.35))
    return surface * _light(rng, height, width)[..., None]


def _light(rng: Generator, height: int, width: int) -> Texture:
    """Return brightness factors `[h, w]` around 1 that change linearly in a random direction."""
    angle, strength = rng.uniform(0, math.tau), rng.uniform(0.05, 0.35)
    y = np.linspace(-1, 1, height, dtype=np.float32)[:, None] * np.float32(math.sin(angle))
    x = np.linspace(-1, 1, width, dtype=np.float32) * np.float32(math.cos(angle))
    return 1 + np.float32(strength) * (x + y)


def _clutter(rng: Generator, image: Texture) -> Texture:
    """Return `image`, a background `[h, w, 3]`, with lines, arcs and thin triangles drawn over it.

    The lines, arcs and triangles are not objects of any class. Values are clipped to 0..1.
    """
    height, width = image.shape[:2]
    size = np.array([width, height]) * _CLUTTER_SUPERSAMPLING
    canvas = Image.fromarray((image.clip(0, 1) * 255).astype(np.uint8)).resize(size.tolist())
    draw = ImageDraw.Draw(canvas)
    for _ in range(rng.integers(5, 30)):
        colour = tuple((_random_colour(rng, (0.05, 0.8)) * 255).astype(int).tolist())
        start = rng.random(2) * size
        points = start + np.cumsum(rng.normal(0, 0.12, (3, 2)), axis=0) * size.min()
        thickness = int(rng.integers(1, 6))
        kind = rng.random()
        if kind < 0.6:
            draw.line(points.ravel().tolist(), colour, thickness, joint="curve")
        elif kind < 0.85:
            box = [*points.min(axis=0), *(points.max(axis=0) + 2)]
            draw.arc(box, rng.uniform(0, 360), rng.uniform(0, 360), colour, thickness)
        else:
            points[2] = points[1] + rng.normal(0, 0.01, 2) * size.min()
            draw.polygon(points.ravel().tolist(), colour)
    return np.asarray(canvas.reduce(_CLUTTER_SUPERSAMPLING), np.float32) / np.float32(255)
