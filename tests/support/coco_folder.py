"""Hand-made data set with all kinds of COCO annotations, and configurations that read it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pycocotools import mask as coco_mask

from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.model.config.schema import ModelConfig, RoiConfig
from maskrcnn_trt.training.config import DataConfig, DatasetConfig, TrainConfig
from maskrcnn_trt.training.solver_config import SolverConfig

HEIGHT, WIDTH = 128, 160


def write_image(path: Path, height: int, width: int, **options: Any) -> None:
    """Write an image of smooth noise, with the file name as seed."""
    rng = np.random.default_rng([ord(letter) for letter in path.name])
    noise = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((width, height)).save(path, **options)


def annotation(id_: int, image_id: int, **changes: Any) -> dict[str, Any]:
    """Return a valid annotation of a rectangle, updated by `changes`. None removes the key."""
    valid = {
        "id": id_,
        "image_id": image_id,
        "category_id": 7,
        "bbox": [10, 20, 30, 40],
        "area": 1200,
        "iscrowd": 0,
        "segmentation": [[10, 20, 40, 20, 40, 60, 10, 60]],
    }
    return {key: value for key, value in {**valid, **changes}.items() if value is not None}


def ring_mask() -> NDArray[np.uint8]:
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    distance = np.hypot(y - 64, x - 80)
    return np.asfortranarray((distance < 40) & (distance > 20), np.uint8)


def ring_segmentation(*, compressed: bool) -> dict[str, Any]:
    if compressed:
        return {"size": [HEIGHT, WIDTH], "counts": coco_mask.encode(ring_mask())["counts"].decode()}
    edges = np.flatnonzero(np.diff(ring_mask().ravel(order="F"), prepend=0))
    runs = np.diff([0, *edges, HEIGHT * WIDTH]).tolist()
    return {"size": [HEIGHT, WIDTH], "counts": runs}


def valid_content() -> dict[str, Any]:
    """Return the content of a valid COCO annotation file.

    The images with the IDs 5, 8, 9 and 11 are landscape, image 2 is portrait. Image 9 has only a
    crowd annotation, image 11 none.
    """
    landscape = {"height": HEIGHT, "width": WIDTH}
    ring = {"bbox": [41, 25, 79, 79], "area": int(ring_mask().sum())}
    pieces = [[50, 50, 90, 50, 90, 70], [100, 80, 140.5, 80, 140.5, 110.25, 100, 110]]
    compressed, runs = ring_segmentation(compressed=True), ring_segmentation(compressed=False)
    return {
        "images": [
            *({"id": n, "file_name": f"{n}.jpg", **landscape} for n in (11, 5, 8, 9)),
            {"id": 2, "file_name": "2.png", "height": WIDTH, "width": HEIGHT},
        ],
        "categories": [{"id": 30, "name": "thing"}, {"id": 7, "name": "square"}],
        "annotations": [
            annotation(0, 5),
            annotation(1, 5, segmentation=pieces, bbox=[50, 50, 90.5, 60.25], category_id=30),
            annotation(2, 8, segmentation=compressed, **ring),
            annotation(3, 8, segmentation=runs, category_id=30, **ring),
            annotation(4, 8, segmentation=runs, iscrowd=1, **ring),
            annotation(5, 2, area=None),
            annotation(6, 9, segmentation=compressed, iscrowd=1, **ring),
        ],
    }


def write_folder(folder: Path, content: Any) -> DatasetConfig:
    """Write an annotation file and its missing images. Return the data set's configuration."""
    for image in content["images"]:
        if not (folder / image["file_name"]).exists():
            write_image(folder / image["file_name"], image["height"], image["width"])
    (folder / "instances.json").write_text(json.dumps(content))
    return DatasetConfig(images=folder, annotations=folder / "instances.json")


def make_config(dataset: DatasetConfig, **changes: Any) -> TrainConfig:
    """Return a configuration for inputs of 128x160 and 160x128, with masks of the whole input.

    `changes` replace fields of `DataConfig` and `SolverConfig`, `seed` or `mask_crop_size`.
    """
    solver = {"images_per_batch": 4, "max_iterations": 6, "steps": ()}
    data = {
        "train": dataset,
        "min_size": 128,
        "max_size": 160,
        "buckets": (ShapeBucket(128, 160), ShapeBucket(160, 128)),
        "workers": 0,
        "keep_empty": True,
    }
    data |= {key: value for key, value in changes.items() if key in DataConfig.model_fields}
    solver |= {key: value for key, value in changes.items() if key in SolverConfig.model_fields}
    roi = RoiConfig(mask_crop_size=changes.get("mask_crop_size"))
    return TrainConfig(
        data=DataConfig(**data),
        solver=SolverConfig(**solver),
        model=ModelConfig(roi=roi),
        seed=changes.get("seed", 0),
    )


def synthetic_config(dataset: DatasetConfig, **changes: Any) -> TrainConfig:
    """Return the result of `make_config`, but for inputs of the size of the synthetic images."""
    sizes = {"min_size": 64, "max_size": 96, "buckets": (ShapeBucket(64, 96), ShapeBucket(96, 64))}
    return make_config(dataset, **{**sizes, **changes})
