"""Formats of detections: COCO results, JSON of the HTTP API, NumPy arrays, annotated images."""

import colorsys
import functools
import importlib.util
import logging
from collections import Counter
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from pydantic_core import to_json

from ..model.bundle.spec import MAX_PIXELS
from ..model.image_decoding import decode_image
from ..model.image_limits import ImageError
from ..model.masks import coco_from_rle, mask_columns, mask_from_rle, run_ends
from .detections import Detections

_log = logging.getLogger(__name__)

_MASK_OPACITY = 0.45
# Files of fonts for class names, in order of preference. Pillow's own font has ASCII only. Pillow
# finds these files in the system's font folders.
_FONTS = (
    "DejaVuSans.ttf",
    "NotoSans-Regular.ttf",
    "NotoSansCJK-Regular.ttc",
    "wqy-microhei.ttc",
    "Arial Unicode.ttf",
    "NotoSansDevanagari-Regular.ttf",
    "arial.ttf",
    "msyh.ttc",
)
# Masks are drawn in strips of about this many pixels, because a copy of all pixels as floats would
# take much memory. A strip consists of whole columns, because RLE masks are stored by column.
_STRIP_PIXELS = 1 << 18
# Peak memory of `annotated_png` in bytes per pixel. It is reached while a WebP image is decoded.
BYTES_PER_PIXEL = 18
# Difference of the hues of successive labels, as a fraction of the colour circle. With the golden
# ratio, hues stay far apart for any number of labels.
_GOLDEN_RATIO = 0.618034

Colour = tuple[int, int, int]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def image_ids(paths: Sequence[Path]) -> list[int | str]:
    """Return the COCO image ID of each file: the name without suffix, as an int if it is decimal.

    Files that would have equal IDs, such as `cat.jpg` and `cat.png`, have their full file names as
    IDs.
    """
    ids = [int(path.stem) if path.stem.isdecimal() else path.stem for path in paths]
    counts = Counter(ids)
    return [own if counts[own] == 1 else path.name for path, own in zip(paths, ids, strict=True)]


def coco_results(image_id: int | str, detections: Detections) -> list[dict[str, Any]]:
    """Return detections in COCO's results format, which `pycocotools.coco.COCO.loadRes` reads.

    Each detection is a record with `image_id`, `category_id`, `score`, `bbox` (x, y, width, height
    in pixels of the image after its EXIF rotation) and, if there are RLE masks, `segmentation`.
    """
    x_min, y_min, x_max, y_max = detections.boxes.astype(float).T
    bboxes = zip(x_min, y_min, x_max - x_min, y_max - y_min, strict=True)
    records: list[dict[str, Any]] = [
        {
            "image_id": image_id,
            "category_id": int(category_id),
            "bbox": [float(value) for value in bbox],
            "score": float(score),
        }
        for category_id, score, bbox in zip(
            detections.category_ids, detections.scores, bboxes, strict=True
        )
    ]
    for record, rle in zip(records, detections.rles or (), strict=False):
        record["segmentation"] = coco_from_rle(rle)
    return records


def arrays_from_detections(detections: Detections) -> dict[str, NDArray[Any]]:
    """Return N detections as arrays by name, for `numpy.savez`. No array needs pickle.

    - boxes [N, 4] float32 xyxy in pixels of the image after its EXIF rotation
    - scores [N] float32
    - labels and category_ids [N] int64
    - class_names [N] str
    - size [2] int64, height and width of the image
    - masks [N, height, width] bool, only if the detections have RLE masks
    """
    size = (detections.height, detections.width)
    arrays: dict[str, NDArray[Any]] = {
        "boxes": detections.boxes,
        "scores": detections.scores,
        "labels": detections.labels,
        "category_ids": detections.category_ids,
        "class_names": np.array(detections.class_names, np.str_),
        "size": np.array(size, np.int64),
    }
    if detections.rles is not None:
        masks = [mask_from_rle(rle) for rle in detections.rles]
        arrays["masks"] = np.array(masks, np.bool_).reshape(-1, *size)
    return arrays


def json_from_detections(detections: Detections) -> bytes:
    """Return detections as a JSON object with `height`, `width` and `detections`.

    Each detection has `class_name`, `label`, `category_id`, `score`, `box` (x_min, y_min, x_max,
    y_max in pixels of the image after its EXIF rotation) and, depending on the mask format,
    `segmentation`: COCO RLE as an object with `size` and `counts`, or a list of polygons, each a
    list x, y, x, y, ...
    """
    rows = zip(
        detections.class_names,
        detections.labels.tolist(),
        detections.category_ids.tolist(),
        detections.scores.tolist(),
        detections.boxes.tolist(),
        strict=True,
    )
    names = ("class_name", "label", "category_id", "score", "box")
    records: list[dict[str, Any]] = [dict(zip(names, row, strict=True)) for row in rows]
    if detections.rles is not None:
        for record, rle in zip(records, detections.rles, strict=True):
            record["segmentation"] = coco_from_rle(rle)
    elif detections.polygons is not None:
        for record, outlines in zip(records, detections.polygons, strict=True):
            record["segmentation"] = [outline.ravel().tolist() for outline in outlines]
    return to_json({"height": detections.height, "width": detections.width, "detections": records})


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
        ImageError: `data` is invalid, or the image has another size than that of `detections`.
    """
    # The image can exceed MAX_PIXELS, because a server can allow more.
    pixels = max(MAX_PIXELS, detections.height * detections.width)
    image = decode_image(data, max_pixels=pixels)
    _draw_masks(image, detections)
    canvas = Image.fromarray(image)
    del image  # frees memory for encoding
    _draw_boxes(canvas, detections)
    file = BytesIO()
    # The default compression level takes four times as long, for a file that is a sixth smaller.
    canvas.save(file, "PNG", compress_level=1)
    return file.getvalue()


def draw_detections(image: NDArray[np.uint8], detections: Detections) -> NDArray[np.uint8]:
    """Draw masks, boxes, class names and scores. Detections with higher scores are drawn on top.

    Args:
        image: [H, W, 3] uint8 RGB, after the EXIF rotation.
        detections: Detections of that image. Masks are drawn only if they are in RLE.

    Returns:
        New array [H, W, 3] uint8 RGB.

    Raises:
        ImageError: The image has another size than that of `detections`.
    """
    pixels = image.copy()
    _draw_masks(pixels, detections)
    canvas = Image.fromarray(pixels)
    del pixels
    _draw_boxes(canvas, detections)
    return np.array(canvas)


def _draw_masks(image: NDArray[np.uint8], detections: Detections) -> None:
    """Draw masks onto an image [H, W, 3] in place. Raise ImageError if it has another size."""
    height, width, _ = image.shape
    if (height, width) != (detections.height, detections.width):
        raise ImageError(
            f"the image has {height}x{width} pixels (height x width), but the detections belong to "
            f"an image of {detections.height}x{detections.width}; give that image"
        )
    colours = _colours_of(detections)
    masks = [
        (np.array(colour, np.float32), run_ends(rle))
        for colour, rle in zip(colours, detections.rles or (), strict=False)
    ]
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
    size = max(11.0, side / 45)
    draw = ImageDraw.Draw(canvas)
    for index in reversed(range(len(detections))):
        left, top, right, bottom = detections.boxes[index].tolist()
        name = detections.class_names[index]
        text = f"{name} {detections.scores[index]:.2f}"
        font = _font(_font_file(name), size)
        draw.rectangle(
            (left, top, right, bottom), outline=colours[index], width=max(1, round(side / 400))
        )
        _draw_label(draw, canvas.size, text, (left, top), colours[index], font)


@functools.lru_cache(maxsize=32)
def _font(file: str | None, size: float) -> Font:
    """Return the font in `file`, or Pillow's own font if `file` is None. `size` is in pixels."""
    return ImageFont.load_default(size) if file is None else ImageFont.truetype(file, size)


@functools.lru_cache(maxsize=1 << 16)
def _font_file(name: str) -> str | None:
    """Return the file of a font that has all characters of a class name.

    None: use Pillow's own font, because the name is ASCII, or because no installed font has all of
    its characters. In the second case, also log a warning.
    """
    if name.isascii():
        return None
    for file in (*_FONTS, *_fonts_of_matplotlib()):
        try:
            font = ImageFont.truetype(file)
        except OSError:  # not installed
            continue
        if _has_characters(font, f"{name}0.123456789"):  # also those of a score
            return file
    _log.warning(
        "no installed font has all characters of the class name %r, so annotated images show "
        "boxes for the missing ones; install a font of its script, such as one of the Noto fonts",
        name,
    )
    return None


def _fonts_of_matplotlib() -> list[str]:
    package = importlib.util.find_spec("matplotlib")
    folder = None if package is None or package.origin is None else Path(package.origin).parent
    return [] if folder is None else [str(folder / "mpl-data/fonts/ttf/DejaVuSans.ttf")]


def _has_characters(font: ImageFont.FreeTypeFont, text: str) -> bool:
    # A font draws all characters that it lacks alike.
    missing = bytes(font.getmask("\uffff"))
    return all(bytes(font.getmask(own)) != missing for own in {*text} if not own.isspace())


def _colours_of(detections: Detections) -> list[Colour]:
    return [colour_from_label(label) for label in detections.labels.tolist()]


def _draw_label(
    draw: ImageDraw.ImageDraw,
    size: tuple[int, int],
    text: str,
    corner: tuple[float, float],
    colour: Colour,
    font: Font,
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
