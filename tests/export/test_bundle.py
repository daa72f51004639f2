from pathlib import Path

import pytest

from maskrcnn_trt.export.bundle import bundle_from_checkpoint
from maskrcnn_trt.model.manifest import BundleError, read_manifest, verified_path
from maskrcnn_trt.model.spec import ShapeBucket


def test_bundle_holds_what_its_manifest_names(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert manifest.class_names == ("disc", "box", "ring")
    assert {str(a.bucket) for a in manifest.artifacts_for("fp32")} == {"96x160", "160x96"}
    for artifact in manifest.artifacts:
        assert verified_path(bundle, artifact).is_file()


def test_input_sizes_that_hold_no_image_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Images are resized to 96 pixels, or at most 160, and none is both lower and narrower."""
    with pytest.raises(BundleError, match="inputs of 64x128 hold no image"):
        bundle_from_checkpoint(tiny_checkpoint, tmp_path / "bundle", buckets=[ShapeBucket(64, 128)])
    assert not (tmp_path / "bundle").exists()
