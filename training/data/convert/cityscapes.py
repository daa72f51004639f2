"""Convert the fine annotations (`gtFine`) of Cityscapes to COCO format."""

from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from ....model.bundle.manifest import Category
from ..coco.dataset import DataError
from .conversion import ConvertedImage, ForeignDataset, SourceSplit
from .label_maps import LabelledObject, annotations_from_label_map, read_label_map, values_in

# The classes of the instance segmentation benchmark, with Cityscapes' ids.
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

_SPLITS = ("train", "val")
_ID_BY_NAME = {category.name: category.id for category in CATEGORIES}
_POLYGONS, _INSTANCE_IDS = "_gtFine_polygons.json", "_gtFine_instanceIds.png"
# The instance id of an object is class * 1000 + number. The instance id of a group of objects is
# the class alone.
_IDS_PER_CLASS = 1000
# Cityscapes' label maps do not show this class: its pixels belong to the car.
_OMITTED = "license plate"


class _Polygon(BaseModel):
    label: str
    polygon: list[tuple[FiniteFloat, FiniteFloat]]
    deleted: bool = False


class _Frame(BaseModel):
    height: int = Field(alias="imgHeight", gt=0, le=1 << 14)
    width: int = Field(alias="imgWidth", gt=0, le=1 << 14)
    objects: list[_Polygon]


def cityscapes(folder: Path) -> ForeignDataset:
    """Find the annotations of Cityscapes in a folder that contains `gtFine` and `leftImg8bit`.

    The annotations of an image are read from `*_gtFine_instanceIds.png` or, if this file does not
    exist, from `*_gtFine_polygons.json`. All groups of one class in an image, such as `cargroup`,
    become one crowd.

    Raises:
        DataError: The folder has no annotations.
    """
    splits = {}
    for name in _SPLITS:
        # If an image has both files, the PNG file is read, because its ending comes last.
        sources = {
            path.name.removesuffix(ending): path
            for ending in (_POLYGONS, _INSTANCE_IDS)
            for path in (folder / "gtFine" / name).glob(f"*/[!.]*{ending}")
        }
        if sources:
            ordered = tuple(sources[frame] for frame in sorted(sources))
            splits[name] = SourceSplit(folder / "leftImg8bit" / name, ordered)
    if not splits:
        raise DataError(
            f"{folder} has no gtFine/train/<city>/*{_INSTANCE_IDS} or *{_POLYGONS}; pass the "
            "folder that gtFine_trainvaltest.zip was extracted into"
        )
    return ForeignDataset(CATEGORIES, splits, _image_from)


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
    """Return category id and crowd flag of a pixel value in `*_gtFine_instanceIds.png`.

    None: the class does not belong to the instance segmentation benchmark.
    """
    is_crowd = value < _IDS_PER_CLASS
    category_id = value if is_crowd else value // _IDS_PER_CLASS
    if category_id not in _ID_BY_NAME.values():
        return None
    return LabelledObject(category_id, is_crowd)


def _draw_polygons(path: Path) -> NDArray[np.int64]:
    """Rasterize a polygon file to `[H, W]`, with pixel values as in `*_gtFine_instanceIds.png`.

    Polygons are drawn in the order of the file. Each covers those drawn before it.
    """
    try:
        frame = _Frame.model_validate_json(path.read_bytes())
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        raise DataError(
            f"{path} is not a Cityscapes polygon file: {key or 'content'}: {fault['msg']}"
        ) from None
    canvas = Image.new("I", (frame.width, frame.height))
    draw = ImageDraw.Draw(canvas)
    drawn: Counter[int] = Counter()
    for shape in frame.objects:
        if shape.deleted or shape.label == _OMITTED or len(shape.polygon) < 3:
            continue
        value = _ID_BY_NAME.get(shape.label.removesuffix("group"), 0)
        if shape.label in _ID_BY_NAME:
            drawn[value] += 1
            value = value * _IDS_PER_CLASS + drawn[value] - 1
        draw.polygon(shape.polygon, fill=value)
    return np.asarray(canvas).astype(np.int64)
