"""Detections drawn onto their image."""

import colorsys

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from ..model.masks import mask_from_rle
from .detections import Detections

_MASK_OPACITY = 0.45
_GOLDEN_RATIO = 0.618034

Colour = tuple[int, int, int]


def colour_of(label: int) -> Colour:
    """A bright RGB colour, the same for a label everywhere and far from its neighbours'."""
    hue = label * _GOLDEN_RATIO % 1.0
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.85, 1.0)
    return round(red * 255), round(green * 255), round(blue * 255)


def draw_detections(image: NDArray[np.uint8], detections: Detections) -> NDArray[np.uint8]:
    """Draw masks, boxes, class names and scores, the best detections on top.

    Args:
        image: [H, W, 3] RGB, upright.
        detections: Of that image; masks are drawn if they are run-length encoded.

    Returns:
        A new [H, W, 3].
    """
    pixels = image.astype(np.float32)
    for index in reversed(range(len(detections.rles or ()))):
        assert detections.rles is not None
        mask = mask_from_rle(detections.rles[index]) != 0
        colour = np.array(colour_of(int(detections.labels[index])), np.float32)
        pixels[mask] += _MASK_OPACITY * (colour - pixels[mask])
    canvas = Image.fromarray(pixels.round().astype(np.uint8))
    draw = ImageDraw.Draw(canvas)
    side = (canvas.width * canvas.height) ** 0.5
    font = ImageFont.load_default(max(11.0, side / 45))
    for index in reversed(range(len(detections))):
        colour_RGB = colour_of(int(detections.labels[index]))
        box = tuple(float(x) for x in detections.boxes[index])
        draw.rectangle(box, outline=colour_RGB, width=max(1, round(side / 400)))
        text = f"{detections.class_names[index]} {detections.scores[index]:.2f}"
        _draw_label(draw, text, (box[0], box[1]), colour_RGB, font)
    return np.array(canvas)


def _draw_label(
    draw: ImageDraw.ImageDraw,
    text: str,
    corner: tuple[float, float],
    colour: Colour,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    """Write on a filled ground above the corner, or as near to it as the image allows."""
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
    width, height = right + 4, bottom + 4
    image_width, image_height = draw.im.size
    x = max(0.0, min(corner[0], image_width - width))
    y = max(0.0, min(corner[1] - height, image_height - height))
    draw.rectangle((x, y, x + width, y + height), fill=colour)
    brightness = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]
    draw.text((x + 2, y + 2), text, fill="black" if brightness > 128 else "white", font=font)
