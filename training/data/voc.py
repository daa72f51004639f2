"""Pascal VOC's object segmentations, as published in a folder such as `VOC2012`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from xml.etree import ElementTree

import numpy as np
from pycocotools import mask as coco_mask

from ...model.manifest import Category
from .coco import DataError
from .conversion import Conversion, ConvertedImage, Split
from .label_maps import LabelledObject, annotations_from_label_map, read_label_map

CATEGORIES = tuple(
    Category(id=id_, name=name)
    for id_, name in enumerate(
        (
            *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair"),
            *("cow", "diningtable", "dog", "horse", "motorbike", "person", "pottedplant"),
            *("sheep", "sofa", "train", "tvmonitor"),
        ),
        start=1,
    )
)
"""In the order of their values in `SegmentationClass`."""

_SPLITS = ("train", "val")
_VALUES = 256
_VOID = 255
_SAME_OBJECT = 0.5
"""Overlap (IoU) from which on a box of the XML file is that of a segmented object."""


class _AnnotatedBox(NamedTuple):
    name: str
    bbox: tuple[float, float, float, float]
    """x, y, width, height in pixels."""
    is_difficult: bool


class _PlainTreeBuilder(ElementTree.TreeBuilder):
    """Refuses document types, by which entities could be declared that grow without bound."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> NoReturn:
        raise ValueError("it declares a document type, which VOC's files do not")


def voc(folder: Path) -> Conversion:
    """The segmented training and validation images of a folder that holds `ImageSets`.

    Objects are the values of `SegmentationObject`, their classes the most frequent ones at the same
    pixels of `SegmentationClass`; void pixels belong to nothing. An object that the XML file in
    `Annotations` calls difficult becomes a crowd, which is COCO's way to say what VOC means:
    training ignores it, evaluation neither asks for it nor punishes its detection. File names are
    relative to `JPEGImages`.

    Raises:
        DataError: there is nothing to convert.
    """
    splits = {}
    for name in _SPLITS:
        listing = folder / "ImageSets" / "Segmentation" / f"{name}.txt"
        if listing.is_file():
            stems = listing.read_text().split()
            sources = tuple(folder / "Annotations" / f"{stem}.xml" for stem in stems)
            splits[name] = Split(folder / "JPEGImages", sources)
    if not splits:
        raise DataError(
            f"{folder} has no ImageSets/Segmentation/train.txt or val.txt; give the folder VOC2012 "
            "that is in VOCdevkit"
        )
    return Conversion(CATEGORIES, splits, partial(_image_from, folder))


def _image_from(folder: Path, source: Path) -> ConvertedImage:
    object_path = folder / "SegmentationObject" / f"{source.stem}.png"
    class_path = folder / "SegmentationClass" / f"{source.stem}.png"
    objects_HW, classes_HW = (
        read_label_map(path, ("P", "L")) for path in (object_path, class_path)
    )
    if objects_HW.shape != classes_HW.shape:
        raise DataError(f"{object_path} and {class_path} are of different sizes")
    pairs = np.bincount((objects_HW * _VALUES + classes_HW).ravel(), minlength=_VALUES**2)
    votes = pairs.reshape(_VALUES, _VALUES)[:_VOID, 1 : len(CATEGORIES) + 1]
    objects = {
        int(value): LabelledObject(int(votes[value].argmax()) + 1)
        for value in np.flatnonzero(votes.any(axis=1))
        if value > 0
    }
    annotations = annotations_from_label_map(objects_HW, objects)
    boxes = _boxes_from(source)
    for annotation in annotations:
        annotation["iscrowd"] = int(_is_difficult(annotation, boxes))
    height, width = objects_HW.shape
    return ConvertedImage(f"{source.stem}.jpg", height, width, annotations)


def _is_difficult(annotation: dict[str, Any], boxes: Sequence[_AnnotatedBox]) -> bool:
    """What the XML file says of the box of the same class that fits the object best."""
    name = CATEGORIES[annotation["category_id"] - 1].name
    same_class = [box for box in boxes if box.name == name]
    if not same_class:
        return False
    overlaps = coco_mask.iou(
        np.array([annotation["bbox"]], np.float64),
        np.array([box.bbox for box in same_class], np.float64),
        [0] * len(same_class),
    )[0]
    best = int(overlaps.argmax())
    return bool(overlaps[best] >= _SAME_OBJECT) and same_class[best].is_difficult


def _boxes_from(path: Path) -> list[_AnnotatedBox]:
    try:
        parser = ElementTree.XMLParser(target=_PlainTreeBuilder())
        root = ElementTree.fromstring(path.read_bytes(), parser)
        return [_box_from(element) for element in root.iter("object")]
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise DataError(f"{path} is no annotation of VOC: {error}") from None


def _box_from(element: ElementTree.Element) -> _AnnotatedBox:
    left, top, right, bottom = (
        float(_text_of(element, f"bndbox/{side}")) for side in ("xmin", "ymin", "xmax", "ymax")
    )
    # VOC counts pixels from 1, and a box includes its last ones.
    bbox = (left - 1, top - 1, right - left + 1, bottom - top + 1)
    is_difficult = element.findtext("difficult", "0").strip() == "1"
    return _AnnotatedBox(_text_of(element, "name"), bbox, is_difficult)


def _text_of(element: ElementTree.Element, path: str) -> str:
    text = element.findtext(path)
    if text is None:
        raise ValueError(f"an object has no {path}")
    return text.strip()
