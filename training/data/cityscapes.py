"""Cityscapes' fine annotations, as published in `gtFine` beside `leftImg8bit`."""

from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from ...model.manifest import Category
from .coco import DataError
from .conversion import Conversion, ConvertedImage, Split
from .label_maps import (
    LabelledObject,
    annotations_from_label_map,
    read_label_map,
    values_in,
)

CATEGORIES = tuple(
    Category(id=id_, name=name)
    for id_, name in (
        (24, "person"),
        (25, "rider"),
        (26, "car"),
        (27, "truck"),
        (28, "bus"),
        (31, "train"),
        (32, "motorcycle"),
        (33, "bicycle"),
    )
)
"""The classes that the instance benchmark measures, under Cityscapes' own ids."""

_SPLITS = ("train", "val")
_ID_BY_NAME = {category.name: category.id for category in CATEGORIES}
_POLYGONS, _INSTANCE_IDS = "_gtFine_polygons.json", "_gtFine_instanceIds.png"
_OBJECTS_A_CLASS = 1000
_INVISIBLE = "license plate"
"""Annotated, but not drawn in Cityscapes' own label maps: the car shows through."""


class _Polygon(BaseModel):
    label: str
    polygon: list[tuple[FiniteFloat, FiniteFloat]]
    deleted: bool = False


class _Frame(BaseModel):
    height: int = Field(alias="imgHeight", gt=0, le=1 << 14)
    width: int = Field(alias="imgWidth", gt=0, le=1 << 14)
    objects: list[_Polygon]


def cityscapes(folder: Path) -> Conversion:
    """The training and validation images of a folder that holds `gtFine`.

    An image's `*_gtFine_instanceIds.png` is read where it is there, else its
    `*_gtFine_polygons.json` is drawn. Objects become run lengths, in as many pieces as are seen.
    Groups, such as a `cargroup`, become one crowd a class and image. File names are relative to
    `leftImg8bit/<split>`.

    Raises:
        DataError: there is nothing to convert.
    """
    splits = {}
    for name in _SPLITS:
        # Label maps, listed last, take the place of polygons.
        sources = {
            path.name.removesuffix(ending): path
            for ending in (_POLYGONS, _INSTANCE_IDS)
            for path in (folder / "gtFine" / name).glob(f"*/*{ending}")
        }
        if sources:
            ordered = tuple(sources[frame] for frame in sorted(sources))
            splits[name] = Split(folder / "leftImg8bit" / name, ordered)
    if not splits:
        raise DataError(
            f"{folder} has no gtFine/train/<city>/*{_INSTANCE_IDS} or *{_POLYGONS}; give the "
            "folder into which gtFine_trainvaltest.zip was extracted"
        )
    return Conversion(CATEGORIES, splits, _image_from)


def _image_from(source: Path) -> ConvertedImage:
    if source.name.endswith(_POLYGONS):
        labels = _draw_polygons(source)
    else:
        labels = read_label_map(source, ("I", "I;16"))
    frame = source.name.removesuffix(_POLYGONS).removesuffix(_INSTANCE_IDS)
    objects = {value: o for value in values_in(labels) if (o := _object_from(value))}
    height, width = labels.shape
    return ConvertedImage(
        file_name=f"{source.parent.name}/{frame}_leftImg8bit.png",
        height=height,
        width=width,
        annotations=annotations_from_label_map(labels, objects),
    )


def _object_from(value: int) -> LabelledObject | None:
    """What a pixel of Cityscapes' instance ids means: class * 1000 + number; a group, the class."""
    is_crowd = value < _OBJECTS_A_CLASS
    category_id = value if is_crowd else value // _OBJECTS_A_CLASS
    if category_id not in _ID_BY_NAME.values():
        return None
    return LabelledObject(category_id, is_crowd)


def _draw_polygons(path: Path) -> NDArray[np.int64]:
    """Instance ids `[H, W]`, each object drawn over those before it, as Cityscapes does it."""
    try:
        frame = _Frame.model_validate_json(path.read_bytes())
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        raise DataError(
            f"{path} is no polygon file of Cityscapes: {key or 'content'}: {fault['msg']}"
        ) from None
    canvas = Image.new("I", (frame.width, frame.height))
    draw = ImageDraw.Draw(canvas)
    drawn: Counter[int] = Counter()
    for shape in frame.objects:
        if shape.deleted or shape.label == _INVISIBLE or len(shape.polygon) < 3:
            continue
        value = _ID_BY_NAME.get(shape.label.removesuffix("group"), 0)
        if shape.label in _ID_BY_NAME:
            drawn[value] += 1
            value = value * _OBJECTS_A_CLASS + drawn[value] - 1
        draw.polygon(shape.polygon, fill=value)
    return np.asarray(canvas).astype(np.int64)
