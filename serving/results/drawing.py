"""Drawing of detections onto their image."""

import colorsys
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from ...model.image_decoding import decode_image
from ...model.masks import mask_columns, run_ends
from ..detections import Detections

_MASK_OPACITY = 0.45
# Masks are drawn in strips of about this many pixels, because a copy of all pixels as floats would
# take much memory. Strips are columns, like the runs of masks.
_STRIP_PIXELS = 1 << 18
# Peak memory of `annotated_png` in bytes per pixel: that of decoding a WebP image.
BYTES_PER_PIXEL = 18
# Difference of the hues of successive labels, as a fraction of the colour circle. With the golden
# ratio, hues stay far apart for any number of labels.
_GOLDEN_RATIO = 0.618034

Colour = tuple[int, int, int]


def colour_from_label(label: int) -> Colour:
    """Return a bright RGB colour (0..255) for a label. Consecutive labels have distinct hues."""
    red, green, blue = colorsys.hsv_to_rgb(label * _GOLDEN_RATIO % 1, 0.85, 1)
    return round(red * 255), round(green * 255), round(blue * 255)


def annotated_png(data: bytes, detections: Detections) -> bytes:
    """Return a PNG of an image with its detections drawn onto it.

    Args:
        data: Encoded image.
        detections: Detections of that image. Masks are drawn only if they are in RLE.

    Raises:
        ImageError: `data` is invalid, or the image has more pixels than `detections.height` x
            `detections.width`.
    """
    image = decode_image(data, max_pixels=detections.height * detections.width)
    _draw_masks(image, detections)
    canvas = Image.fromarray(image)
    del image  # encoding needs memory
    _draw_boxes(canvas, detections)
    file = BytesIO()
    # The default level takes four times as long, for a file that is a sixth smaller.
    canvas.save(file, "PNG", compress_level=1)
    return file.getvalue()


def draw_detections(image: NDArray[np.uint8], detections: Detections) -> NDArray[np.uint8]:
    """Draw masks, boxes, class names and scores. Detections with higher scores are drawn on top.

    Args:
        image: [H, W, 3] RGB, after the EXIF rotation.
        detections: Detections of that image. Masks are drawn only if they are in RLE.

    Returns:
        New array [H, W, 3] uint8 RGB.
    """
    pixels = image.copy()
    _draw_masks(pixels, detections)
    canvas = Image.fromarray(pixels)
    del pixels
    _draw_boxes(canvas, detections)
    return np.array(canvas)


def _draw_masks(image: NDArray[np.uint8], detections: Detections) -> None:
    """Draw masks onto an image [H, W, 3] in place."""
    colours = _colours_of(detections)
    masks = [
        (np.array(colour, np.float32), run_ends(rle))
        for colour, rle in zip(colours, detections.rles or (), strict=False)
    ]
    height, width, _ = image.shape
    columns = max(1, _STRIP_PIXELS // height)
    for start in range(0, width if masks else 0, columns):
        stop = min(start + columns, width)
        strip = image[:, start:stop].astype(np.float32)
        for colour, ends in reversed(masks):
            inside = mask_columns(ends, height, start, stop) != 0
            strip[inside] += _MASK_OPACITY * (colour - strip[inside])
        image[:, start:stop] = strip.round(out=strip)


def _draw_boxes(canvas: Image.Image, detections: Detections) -> None:
    """Draw boxes, class names and scores onto an image in place."""
    colours = _colours_of(detections)
    # Text size and line width scale with the image.
    side = (canvas.width * canvas.height) ** 0.5
    font = ImageFont.load_default(max(11.0, side / 45))
    draw = ImageDraw.Draw(canvas)
    for index in reversed(range(len(detections))):
        left, top, right, bottom = detections.boxes[index].tolist()
        text = f"{detections.class_names[index]} {detections.scores[index]:.2f}"
        draw.rectangle(
            (left, top, right, bottom), outline=colours[index], width=max(1, round(side / 400))
        )
        _draw_label(draw, canvas.size, text, (left, top), colours[index], font)


def _colours_of(detections: Detections) -> list[Colour]:
    return [colour_from_label(label) for label in detections.labels.tolist()]


def _draw_label(
    draw: ImageDraw.ImageDraw,
    size: tuple[int, int],
    text: str,
    corner: tuple[float, float],
    colour: Colour,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    """Draw a filled box and write a text on it. The box's lower left is `corner` (x, y in pixels).

    The box is shifted if it would exceed the canvas. `size` is the canvas's width and height.
    """
    _, _, right, bottom = draw.textbbox((2, 2), text, font=font)
    width, height = right + 2, bottom + 2
    x = max(0.0, min(corner[0], size[0] - width))
    y = max(0.0, min(corner[1] - height, size[1] - height))
    draw.rectangle((x, y, x + width, y + height), fill=colour)
    luma = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]
    draw.text((x + 2, y + 2), text, fill="black" if luma > 128 else "white", font=font)
