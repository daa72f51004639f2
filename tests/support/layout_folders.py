"""Small data sets with real images, written in the layouts of several annotation programs."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from pycocotools import mask as coco_mask

from maskrcnn_trt.training.data.coco.dataset import CocoDataset
from maskrcnn_trt.training.data.coco.segmentation_masks import mask_from_segmentation

# Class names, in alphabetical order, because LabelMe files do not define an order.
NAMES = ("bolt", "gear", "nut", "washer")
HEIGHT, WIDTH = 72, 96


class Scene(NamedTuple):
    """Description of an image file: its name and size, and the outlines of its objects."""

    name: str
    height: int
    width: int
    # Name and outline [n, 2] in pixels of each object.
    objects: tuple[tuple[str, np.ndarray], ...]


def draw_scenes(count: int, seed: int = 0) -> list[Scene]:
    """Return scenes with one to three objects. Every third scene is portrait.

    If there are more than two scenes, the last one has no objects.
    """
    rng = np.random.default_rng(seed)
    scenes = []
    for number in range(count):
        height, width = (WIDTH, HEIGHT) if number % 3 == 2 else (HEIGHT, WIDTH)
        objects = []
        for place in range(0 if number == count - 1 and count > 2 else 1 + number % 3):
            label = NAMES[(number + place) % len(NAMES)]
            corners = 3 + NAMES.index(label)
            angles = 2 * np.pi * (np.arange(corners) + rng.random()) / corners
            centre = (14 + 22 * place + rng.random() * 4, 20 + 24 * rng.random())
            radius = 10 + 3 * rng.random()
            points = centre + radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)
            objects.append((label, points.round(2)))
        scenes.append(Scene(f"photo_{number:03d}.jpg", height, width, tuple(objects)))
    return scenes


TRAIN = draw_scenes(5, seed=1)
VAL = [scene._replace(name=f"val_{scene.name}") for scene in draw_scenes(2, seed=2)]


def save_images(folder: Path, scenes: Sequence[Scene]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    colours = {
        "bolt": (200, 60, 40),
        "nut": (40, 180, 80),
        "washer": (60, 90, 220),
        "gear": (230, 210, 60),
    }
    for number, scene in enumerate(scenes):
        rng = np.random.default_rng(number)
        noise = rng.integers(90, 160, (scene.height, scene.width, 3), dtype=np.uint8)
        image = Image.fromarray(noise)
        for label, points in scene.objects:
            ImageDraw.Draw(image).polygon([*map(tuple, points)], fill=colours[label])
        image.save(folder / scene.name, quality=95)


def coco_content(scenes: Sequence[Scene], *, first_id: int = 1, prefix: str = "") -> dict[str, Any]:
    images, annotations = [], []
    for image_id, scene in enumerate(scenes, start=1):
        size = {"height": scene.height, "width": scene.width}
        images.append({"id": image_id, "file_name": prefix + scene.name, **size})
        for label, points in scene.objects:
            low, high = points.min(axis=0), points.max(axis=0)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image_id,
                    "category_id": first_id + NAMES.index(label),
                    "segmentation": [points.ravel().tolist()],
                    "bbox": [*low.tolist(), *(high - low).tolist()],
                    "area": 100.0,
                    "iscrowd": 0,
                }
            )
    categories = [{"id": first_id + n, "name": name} for n, name in enumerate(NAMES)]
    return {"images": images, "annotations": annotations, "categories": categories}


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def write_coco(folder: Path, train: Sequence[Scene], val: Sequence[Scene]) -> None:
    for split, scenes in (("train2017", train), ("val2017", val)):
        save_images(folder / split, scenes)
        write_json(folder / "annotations" / f"instances_{split}.json", coco_content(scenes))


def write_roboflow(folder: Path, train: Sequence[Scene], val: Sequence[Scene]) -> None:
    """Write a data set as Roboflow does, with a category of ID 0 that no annotation has."""
    for split, scenes in (("train", train), ("valid", val)):
        save_images(folder / split, scenes)
        content = coco_content(scenes)
        for category in content["categories"]:
            category["supercategory"] = "parts"
        content["categories"].insert(0, {"id": 0, "name": "parts", "supercategory": "none"})
        write_json(folder / split / "_annotations.coco.json", content)


def write_cvat(folder: Path, train: Sequence[Scene], val: Sequence[Scene]) -> None:
    """Write a data set as CVAT exports a task without subsets: all images are in one split."""
    scenes = [*train, *val]
    save_images(folder / "images" / "train", scenes)
    write_json(folder / "annotations" / "instances_default.json", coco_content(scenes))


def write_labelme(folder: Path, train: Sequence[Scene], val: Sequence[Scene]) -> None:
    scenes = [*train, *val]
    save_images(folder, scenes)
    for scene in scenes:
        shapes = [
            {
                "label": label,
                "points": points.tolist(),
                "group_id": None,
                "shape_type": "polygon",
                "flags": {},
            }
            for label, points in scene.objects
        ]
        content = {"version": "5.4.1", "flags": {}, "shapes": shapes, "imageData": None}
        content |= {"imagePath": scene.name, "imageHeight": scene.height, "imageWidth": scene.width}
        write_json(folder / f"{Path(scene.name).stem}.json", content)


def write_yolo(folder: Path, train: Sequence[Scene], val: Sequence[Scene]) -> None:
    """Write a data set in YOLO's layout.

    As in Roboflow's exports, paths in `data.yaml` are relative to a folder that does not exist.
    """
    for split, scenes in (("train", train), ("valid", val)):
        save_images(folder / split / "images", scenes)
        (folder / split / "labels").mkdir()
        for scene in scenes:
            lines = [
                " ".join([str(NAMES.index(n)), *(f"{v:.6f}" for v in (p / scene[2:0:-1]).ravel())])
                for n, p in scene.objects
            ]
            path = folder / split / "labels" / f"{Path(scene.name).stem}.txt"
            path.write_text("".join(line + "\n" for line in lines))
    names = ", ".join(NAMES)
    (folder / "data.yaml").write_text(
        f"train: ../train/images\nval: ../valid/images\n\nnc: {len(NAMES)}\nnames: [{names}]\n"
    )


WRITERS: dict[str, Callable[[Path, Sequence[Scene], Sequence[Scene]], None]] = {
    "COCO": write_coco,
    "Roboflow": write_roboflow,
    "CVAT": write_cvat,
    "LabelMe": write_labelme,
    "YOLO": write_yolo,
}


def assert_same(dataset: CocoDataset, scenes: list[Scene]) -> None:
    """Check that a data set has the images, classes, masks and boxes of the scenes."""
    names = [category.name for category in dataset.categories]
    assert {r.path.name for r in dataset.records} == {scene.name for scene in scenes}
    by_name = {scene.name: scene for scene in scenes}
    for record in dataset.records:
        scene = by_name[record.path.name]
        size = (record.height, record.width)
        assert size == (scene.height, scene.width)
        assert [names[i.label - 1] for i in record.objects] == [n for n, _ in scene.objects]
        for instance, (_, points) in zip(record.objects, scene.objects, strict=True):
            (expected,) = coco_mask.frPyObjects([points.ravel().tolist()], *size)
            mask = mask_from_segmentation(instance.segmentation, size, size)
            reference = coco_mask.decode(expected)
            assert np.logical_xor(mask, reference).sum() <= 0.03 * reference.sum()
            low, high = points.min(axis=0), points.max(axis=0)
            np.testing.assert_allclose(instance.bbox, [*low, *(high - low)], atol=0.01)
