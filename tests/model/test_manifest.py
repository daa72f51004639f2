"""Manifests that promise what no server could keep."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskrcnn_trt.model.config import BackboneConfig
from maskrcnn_trt.model.images import ImageError, resized_size, smallest_bucket
from maskrcnn_trt.model.manifest import BundleError, Preprocessing, read_manifest
from maskrcnn_trt.model.spec import ShapeBucket

Write = Callable[..., Path]


@pytest.fixture
def write(bundle: Path, tmp_path: Path) -> Write:
    """Writer of a folder with the tiny bundle's manifest, in which entries are others."""

    def written(**changes: Any) -> Path:
        content = json.loads((bundle / "manifest.json").read_text())
        (tmp_path / "manifest.json").write_text(json.dumps(content | changes))
        return tmp_path

    return written


@pytest.mark.parametrize(
    "name", ["", "two\nlines", "line\n", "a\x00b", "a b", "a/b", "größe", "a\x7f"]
)
def test_name_by_which_no_client_can_ask_is_refused(write: Write, name: str) -> None:
    with pytest.raises(BundleError, match="model_name: String should match pattern") as caught:
        read_manifest(write(model_name=name))
    assert str(caught.value).endswith("export the bundle again")


@pytest.mark.parametrize("features", ["fpn", "c4", "c5"])
@pytest.mark.parametrize("backbone", ["resnet18", "resnet50", "resnet101"])
def test_names_that_export_makes_are_taken(write: Write, backbone: Any, features: Any) -> None:
    config = BackboneConfig(name=backbone, features=features)
    name = f"maskrcnn_{config.name}_{config.features}"
    assert read_manifest(write(model_name=name)).model_name == name


def test_manifest_without_categories_is_refused(write: Write) -> None:
    with pytest.raises(BundleError, match=r"categories: .* at least 1 item .*; export the bundle"):
        read_manifest(write(categories=[]))


def test_input_sizes_without_an_image_are_refused(bundle: Path, write: Write) -> None:
    preprocessing = read_manifest(bundle).preprocessing.model_dump()
    sentence = r"bucket 96x160 holds no image by preprocessing, whose min_size is 800 and max_size"
    with pytest.raises(BundleError, match=rf"'model-fp32-96x160.onnx'.*{sentence} 1333; export"):
        read_manifest(write(preprocessing=preprocessing | {"min_size": 800, "max_size": 1333}))


def holds_an_image(bucket: ShapeBucket, sizes: Preprocessing) -> bool:
    """Whether some image, of many ratios of sides, is resized so that it fits."""
    for ratio in np.geomspace(1, 1000, 200):
        for sides in ((8, round(8 * ratio)), (round(8 * ratio), 8)):
            resized = resized_size(*sides, sizes.min_size, sizes.max_size)
            try:
                smallest_bucket(*resized, [bucket])
            except ImageError:
                continue
            return True
    return False


def test_a_bucket_fits_where_an_image_does() -> None:
    generator = np.random.default_rng(0)
    for _ in range(60):
        low, high, height, width = (int(side) for side in generator.integers(32, 256, 4))
        colours: Any = {"pixel_mean": (0, 0, 0), "pixel_std": (1, 1, 1)}
        sizes = Preprocessing(min_size=low, max_size=high, **colours)
        bucket = ShapeBucket(height, width)
        assert sizes.fits(bucket) == holds_an_image(bucket, sizes), (sizes, bucket)


def test_manifest_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(BundleError, match=r"manifest.json cannot be read \(Is a directory\); it"):
        read_manifest(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read all files")
def test_manifest_without_permission_is_told(write: Write) -> None:
    folder = write()
    (folder / "manifest.json").chmod(0)
    with pytest.raises(BundleError, match=r"cannot be read \(Permission denied\)"):
        read_manifest(folder)
