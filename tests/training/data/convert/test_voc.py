"""Convert small data sets in VOC's layout, and read them with pycocotools and CocoDataset."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from coco_folder import write_image
from PIL import Image
from pycocotools.coco import COCO

from maskrcnn_trt.training.config import DatasetConfig
from maskrcnn_trt.training.data.coco.dataset import CocoDataset, DataError
from maskrcnn_trt.training.data.convert.command import convert
from maskrcnn_trt.training.data.convert.conversion import write_coco_files
from maskrcnn_trt.training.data.convert.voc import CATEGORIES, voc

HEIGHT, WIDTH = 48, 64
CAT, PERSON = 8, 15


def write_label_map(path: Path, labels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(labels.astype(np.uint8))
    image.putpalette(bytes(np.repeat(np.arange(256), 3).tolist()))
    assert image.mode == "P"
    image.save(path)


def xml_object(name: str, *sides: float, difficult: int = 0) -> str:
    corners = zip(("xmin", "ymin", "xmax", "ymax"), sides, strict=True)
    box = "".join(f"<{side}>{value}</{side}>" for side, value in corners)
    return (
        f"<object><name>{name}</name><difficult>{difficult}</difficult><bndbox>{box}</bndbox>"
        "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part></object>"
    )


def write_tree(folder: Path, *objects: str, split: str = "train") -> Path:
    """Write one image: a cat with a void border that splits a person in two."""
    numbers, classes = np.zeros((2, HEIGHT, WIDTH))
    numbers[10:30, 5:60], classes[10:30, 5:60] = 2, PERSON
    numbers[8:40, 20:40] = classes[8:40, 20:40] = 255
    numbers[10:38, 22:38], classes[10:38, 22:38] = 1, CAT
    classes[10, 22] = PERSON  # the files do not agree on every pixel
    write_label_map(folder / "SegmentationObject" / "2007_000032.png", numbers)
    write_label_map(folder / "SegmentationClass" / "2007_000032.png", classes)
    for part in ("Annotations", "ImageSets/Segmentation", "JPEGImages"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "ImageSets/Segmentation" / f"{split}.txt").write_text("2007_000032\n")
    xml = folder / "Annotations" / "2007_000032.xml"
    xml.write_text(f"<annotation>{''.join(objects)}</annotation>")
    write_image(folder / "JPEGImages" / "2007_000032.jpg", HEIGHT, WIDTH)
    return xml


def test_objects_become_masks_without_the_void(tmp_path: Path) -> None:
    write_tree(tmp_path)
    file = write_coco_files(voc(tmp_path), tmp_path / "coco")["train"]
    assert (file.images, file.objects, file.crowds) == (1, 2, 0)
    coco = COCO(file.path)
    assert [coco.cats[n]["name"] for n in (1, CAT, PERSON, 20)] == [
        *("aeroplane", "cat", "person", "tvmonitor")
    ]
    labels = np.asarray(Image.open(tmp_path / "SegmentationObject" / "2007_000032.png"))
    for number, (annotation, category_id) in enumerate(
        zip(coco.loadAnns(coco.getAnnIds()), (CAT, PERSON), strict=True), start=1
    ):
        assert annotation["category_id"] == category_id
        np.testing.assert_array_equal(coco.annToMask(annotation), labels == number)
        assert annotation["area"] == (labels == number).sum()
    assert [a["bbox"] for a in coco.anns.values()] == [[22, 10, 16, 28], [5, 10, 55, 20]]


def test_command_writes_files_and_prints_the_keys_that_train_on_them(tmp_path: Path) -> None:
    write_tree(tmp_path / "VOC2012", split="val")
    arguments = ["voc", str(tmp_path / "VOC2012"), str(tmp_path / "new" / "coco")]
    result = CliRunner().invoke(convert, arguments)
    assert result.exit_code == 0
    assert "1 image, 2 objects, 0 crowds" in result.output
    assert "data.train" not in result.output
    keys = dict(re.findall(r"data\.val\.(\w+)=(\S+)", result.output))
    dataset = CocoDataset(DatasetConfig(**keys), on_broken="refuse")
    assert dataset.categories == CATEGORIES
    assert [instance.label for instance in dataset.records[0].objects] == [CAT, PERSON]
    again = CliRunner().invoke(convert, arguments)
    assert isinstance(again.exception, DataError)
    assert CliRunner().invoke(convert, [*arguments, "--overwrite"]).exit_code == 0


def test_difficult_objects_become_crowds(tmp_path: Path) -> None:
    """The boxes of the XML file count from 1, and are in another order than the objects."""
    write_tree(
        tmp_path,
        xml_object("person", 6, 11, 60, 30, difficult=1),
        xml_object("person", 1, 40, 5, 48),
        xml_object("cat", 1, 1, 5, 5, difficult=1),  # another cat that is not segmented
        xml_object("cat", 23.0, 11.0, 38.0, 38.0),
    )
    file = write_coco_files(voc(tmp_path), tmp_path / "coco")["train"]
    annotations = json.loads(file.path.read_text())["annotations"]
    assert [(a["category_id"], a["iscrowd"]) for a in annotations] == [(CAT, 0), (PERSON, 1)]


def test_other_classes_and_missing_images_are_reported(tmp_path: Path) -> None:
    write_tree(tmp_path)
    (tmp_path / "ImageSets/Segmentation/train.txt").write_text("\ufeff2007_000032\r\n")
    path = tmp_path / "SegmentationClass" / "2007_000032.png"
    classes = np.array(Image.open(path))
    write_label_map(path, np.where(classes == PERSON, 44, classes))
    file = write_coco_files(voc(tmp_path), tmp_path / "coco")["train"]
    assert (file.images, file.objects) == (1, 1)
    assert [*file.faults.values()] == [["2007_000032.jpg:2"]]
    (tmp_path / "JPEGImages" / "2007_000032.jpg").unlink()
    file = write_coco_files(voc(tmp_path), tmp_path / "without")["train"]
    assert file.images == 0
    assert file.faults == {"files: image missing": ["2007_000032.jpg"]}
    write_tree(tmp_path, xml_object("crack", 1, 2, 3, 4))
    with pytest.raises(DataError, match=r"2007_000032\.xml.*'crack'"):
        write_coco_files(voc(tmp_path), tmp_path / "named")


def test_an_image_that_is_all_void_has_no_object(tmp_path: Path) -> None:
    write_tree(tmp_path)
    write_label_map(
        tmp_path / "SegmentationClass" / "2007_000032.png", np.full((HEIGHT, WIDTH), 255)
    )
    file = write_coco_files(voc(tmp_path), tmp_path / "coco")["train"]
    assert (file.images, file.objects) == (1, 0)


_BOMB = '<!DOCTYPE a [<!ENTITY b "bbbb"><!ENTITY c "&b;&b;">]><annotation>&c;</annotation>'


@pytest.mark.parametrize(
    ("text", "message"),
    [(_BOMB.encode(), "DOCTYPE"),
     (f'<?xml version="1.0" encoding="UTF-16"?>{_BOMB}'.encode("utf-16"), "DOCTYPE"),
     (b"<annotation>", "no element found"), (b"", "no element found"),
     (b"<a><object><name>cat</name></object></a>", "an object has no bndbox/xmin"),
     (xml_object("cat", 1, 2, 3, 4).replace("3", "x").encode(), "'x'")],
)  # fmt: skip
def test_damaged_and_hostile_xml_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    write_tree(tmp_path).write_bytes(text)
    with pytest.raises(DataError, match=rf"2007_000032\.xml .*{message}"):
        write_coco_files(voc(tmp_path), tmp_path / "coco")


def test_missing_coloured_and_unlike_label_maps_are_named(tmp_path: Path) -> None:
    write_tree(tmp_path).unlink()
    with pytest.raises(DataError, match=r"2007_000032\.xml"):
        write_coco_files(voc(tmp_path), tmp_path / "coco")
    path = tmp_path / "SegmentationClass" / "2007_000032.png"
    Image.open(path).convert("RGB").save(path)
    with pytest.raises(DataError, match=r"2007_000032\.png .*RGB, not L or P"):
        write_coco_files(voc(tmp_path), tmp_path / "coco")
    write_label_map(path, np.zeros((HEIGHT, WIDTH + 1)))
    with pytest.raises(DataError, match=r"SegmentationClass.* differ in size"):
        write_coco_files(voc(tmp_path), tmp_path / "coco")
    path.unlink()
    with pytest.raises(DataError, match=r"SegmentationClass.*\.png does not exist"):
        write_coco_files(voc(tmp_path), tmp_path / "coco")


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ImageSets/Segmentation/train\.txt .*VOCdevkit"):
        voc(tmp_path)
