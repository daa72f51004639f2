"""Convert the instance segmentations of Pascal VOC to COCO format."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from xml.etree import ElementTree

import numpy as np
from pycocotools import mask as coco_mask

from ....model.bundle.manifest import Category
from ..coco.dataset import DataError
from .conversion import ConvertedImage, ForeignDataset, SourceSplit, UnusableSourceError
from .label_maps import LabelledObject, annotations_from_label_map, read_label_map

# Classes in the order of their pixel values in `SegmentationClass`.
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

_SPLITS = ("train", "val")
# Number of possible pixel values, and the value that marks borders and unlabelled regions.
_VALUES, _VOID = 256, 255
# Minimum IoU to match a box of the XML file to a segmented object.
_MATCH_IOU = 0.5


class _AnnotatedBox(NamedTuple):
    name: str
    # x, y, width, height in pixels.
    bbox: tuple[float, float, float, float]
    is_difficult: bool


class _PlainTreeBuilder(ElementTree.TreeBuilder):
    """XML tree builder that raises ValueError for a document type declaration."""

    # A declaration could define entities that expand exponentially ("billion laughs").
    def doctype(self, name: str, pubid: str | None, system: str | None) -> NoReturn:
        raise ValueError("it has a DOCTYPE declaration, which VOC files never have")


def voc(folder: Path) -> ForeignDataset:
    """Find the annotations of Pascal VOC in a folder such as `VOC2012`.

    Each pixel value in `SegmentationObject` stands for an object. The class of an object is the
    most frequent class at its pixels in `SegmentationClass`. An object that the XML file in
    `Annotations` marks as difficult becomes a crowd. Images without a file in `JPEGImages`, and
    objects whose class is not one of the 20 classes of Pascal VOC, are left out.

    Raises:
        DataError: The folder has no list of images with segmentations.
    """
    splits = {}
    for name in _SPLITS:
        listing = folder / "ImageSets" / "Segmentation" / f"{name}.txt"
        if listing.is_file():
            stems = listing.read_text(encoding="utf-8-sig").split()
            sources = tuple(folder / "Annotations" / f"{stem}.xml" for stem in stems)
            splits[name] = SourceSplit(folder / "JPEGImages", sources)
    if not splits:
        raise DataError(
            f"{folder} has no ImageSets/Segmentation/train.txt or val.txt; pass the folder VOC2012 "
            "inside VOCdevkit"
        )
    return ForeignDataset(CATEGORIES, splits, partial(_image_from, folder))


def _image_from(folder: Path, source: Path) -> ConvertedImage:
    name = f"{source.stem}.jpg"
    if not (folder / "JPEGImages" / name).is_file():
        raise UnusableSourceError("files: image missing", name)
    object_path = folder / "SegmentationObject" / f"{source.stem}.png"
    class_path = folder / "SegmentationClass" / f"{source.stem}.png"
    objects_HW, classes_HW = (
        read_label_map(path, ("P", "L")) for path in (object_path, class_path)
    )
    if objects_HW.shape != classes_HW.shape:
        raise DataError(
            f"the images {object_path} and {class_path} differ in size; restore the original files"
        )
    pairs = np.bincount((objects_HW * _VALUES + classes_HW).ravel(), minlength=_VALUES**2)
    votes = pairs.reshape(_VALUES, _VALUES)[:_VOID, 1:_VOID]
    classes = {
        int(value): int(votes[value].argmax()) + 1
        for value in np.flatnonzero(votes.any(axis=1))
        if value > 0
    }
    known = range(1, len(CATEGORIES) + 1)
    faults = [
        (f"objects: pixel value above {len(CATEGORIES)} in SegmentationClass", f"{name}:{value}")
        for value, class_ in classes.items()
        if class_ not in known
    ]
    objects = {
        value: LabelledObject(class_) for value, class_ in classes.items() if class_ in known
    }
    annotations = annotations_from_label_map(objects_HW, objects)
    boxes = _boxes_from(source)
    for annotation in annotations:
        # Difficult objects in VOC and crowds in COCO have the same meaning: training ignores them,
        # and evaluation neither requires their detection nor counts it as a false positive.
        annotation["iscrowd"] = int(_is_difficult(annotation, boxes))
    height, width = objects_HW.shape
    return ConvertedImage(name, height, width, annotations, faults)


def _is_difficult(annotation: dict[str, Any], boxes: Sequence[_AnnotatedBox]) -> bool:
    """Return whether the image's XML file marks an annotated object as difficult.

    The object is matched to the box of the same class that has the highest IoU with the object's
    box. If no box has this class, or the IoU is below `_MATCH_IOU`, the result is False.

    Args:
        annotation: COCO annotation of the object.
        boxes: All boxes in the XML file.
    """
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
    return bool(overlaps[best] >= _MATCH_IOU) and same_class[best].is_difficult


def _boxes_from(path: Path) -> list[_AnnotatedBox]:
    try:
        parser = ElementTree.XMLParser(target=_PlainTreeBuilder())
        root = ElementTree.fromstring(path.read_bytes(), parser)
        boxes = [_box_from(element) for element in root.iter("object")]
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist, although ImageSets/Segmentation lists its image; restore the "
            "original file"
        ) from None
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise DataError(f"{path} is not a VOC annotation file: {error}") from None
    names = {category.name for category in CATEGORIES}
    for box in boxes:
        if box.name not in names:
            raise DataError(
                f"{path} has an object {box.name!r}, which is not a class of Pascal VOC; convert "
                "data sets with other classes from LabelMe or YOLO, or write a COCO file"
            )
    return boxes


def _box_from(element: ElementTree.Element) -> _AnnotatedBox:
    left, top, right, bottom = (
        float(_text_of(element, f"bndbox/{side}")) for side in ("xmin", "ymin", "xmax", "ymax")
    )
    # VOC counts pixels from 1 and includes the last row and column in the box.
    bbox = (left - 1, top - 1, right - left + 1, bottom - top + 1)
    is_difficult = element.findtext("difficult", "0").strip() == "1"
    return _AnnotatedBox(_text_of(element, "name"), bbox, is_difficult)


def _text_of(element: ElementTree.Element, path: str) -> str:
    text = element.findtext(path)
    if text is None:
        raise ValueError(f"an object has no {path}")
    return text.strip()
