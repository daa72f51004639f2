"""Rejection of invalid manifests."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskrcnn_trt.model.bundle.manifest import BundleError, Preprocessing, read_manifest
from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.model.image_limits import ImageError
from maskrcnn_trt.model.resizing import resized_size, smallest_bucket

Write = Callable[..., Path]


@pytest.fixture
def write(bundle: Path, tmp_path: Path) -> Write:
    """Return a function that writes the tiny bundle's manifest with changed entries."""

    def written(**changes: Any) -> Path:
        content = json.loads((bundle / "manifest.json").read_text())
        (tmp_path / "manifest.json").write_text(json.dumps(content | changes))
        return tmp_path

    return written


@pytest.mark.parametrize(
    "name", ["", "two\nlines", "line\n", "a\x00b", "a b", "a/b", "größe", "a\x7f"]
)
def test_invalid_model_names_are_rejected(write: Write, name: str) -> None:
    with pytest.raises(BundleError, match=r"model_name: .*; export the bundle again"):
        read_manifest(write(model_name=name))


def test_manifest_without_categories_is_rejected(write: Write) -> None:
    with pytest.raises(BundleError, match=r"categories: .* at least 1 item"):
        read_manifest(write(categories=[]))


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1])
def test_category_ids_are_int64(write: Write, number: int) -> None:
    with pytest.raises(BundleError, match=rf"categories\.0\.id: .*{2**63}"):
        read_manifest(write(categories=[{"id": number, "name": "disc"}]))


def test_an_unknown_precision_is_answered_with_those_of_the_bundle(bundle: Path) -> None:
    unknown: Any = "half"
    with pytest.raises(BundleError, match=r"no precision 'half'; the bundle has fp32"):
        read_manifest(bundle).artifacts_for(unknown)


def test_exported_model_names_are_valid(write: Write) -> None:
    for name in itertools.product(("resnet18", "resnet50", "resnet101"), ("fpn", "c4", "c5")):
        assert read_manifest(write(model_name="maskrcnn_{}_{}".format(*name)))


def test_buckets_too_small_for_any_image_are_rejected(bundle: Path, write: Write) -> None:
    preprocessing = read_manifest(bundle).preprocessing.model_dump()
    facts = r"'model-fp32-96x160.onnx'.* 96x160 .*min_size 800 .*max_size 1333"
    with pytest.raises(BundleError, match=facts):
        read_manifest(write(preprocessing=preprocessing | {"min_size": 800, "max_size": 1333}))


def holds_an_image(bucket: ShapeBucket, sizes: Preprocessing) -> bool:
    """Whether a resized image of one of many aspect ratios fits into the bucket."""
    for ratio in np.geomspace(1, 1000, 200):
        for sides in ((8, round(8 * ratio)), (round(8 * ratio), 8)):
            resized = resized_size(*sides, sizes.min_size, sizes.max_size)
            try:
                smallest_bucket(*resized, [bucket])
            except ImageError:
                continue
            return True
    return False


def test_fits_agrees_with_resized_sizes() -> None:
    generator = np.random.default_rng(0)
    for _ in range(60):
        low, high, height, width = (int(side) for side in generator.integers(32, 256, 4))
        colours: Any = {"pixel_mean": (0, 0, 0), "pixel_std": (1, 1, 1)}
        sizes = Preprocessing(min_size=low, max_size=high, **colours)
        bucket = ShapeBucket(height, width)
        assert sizes.fits(bucket) == holds_an_image(bucket, sizes), (sizes, bucket)


REWRITE = """
import sys
from pathlib import Path
from maskrcnn_trt.model.bundle.manifest import read_manifest, write_manifest

folder = Path(sys.argv[1])
manifest = read_manifest(folder)
write_manifest(folder, manifest)
assert read_manifest(folder) == manifest
"""


def test_class_names_are_independent_of_the_locale(write: Write) -> None:
    settings = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", REWRITE, write(categories=[{"id": 1, "name": "Löwe"}])]
    subprocess.run(command, env={**os.environ, **settings, **paths}, check=True)


def test_the_folder_of_a_training_run_is_answered_with_its_checkpoint(tmp_path: Path) -> None:
    for name in ("model_0002500.pth", "model_final.pth", "log.txt"):
        (tmp_path / name).touch()
    with pytest.raises(BundleError, match=r"not a bundle.*model_final\.pth"):
        read_manifest(tmp_path)


def test_manifest_that_is_a_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(BundleError, match=r"manifest.json cannot be read \(Is a directory\)"):
        read_manifest(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read all files")
def test_manifest_without_read_permission_is_rejected(write: Write) -> None:
    folder = write()
    (folder / "manifest.json").chmod(0)
    with pytest.raises(BundleError, match=r"cannot be read \(Permission denied\)"):
        read_manifest(folder)
