import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from PIL import Image

from maskrcnn_trt.export.commands import table_of
from maskrcnn_trt.export.verify import (
    TOLERANCES,
    Comparison,
    compare_artifact,
    reference_batches,
    verify_bundle,
)
from maskrcnn_trt.model.bundle.manifest import (
    BundleError,
    Manifest,
    read_manifest,
    sha256_of,
)
from maskrcnn_trt.model.bundle.spec import OUTPUT_NAMES
from maskrcnn_trt.model.checkpoint import load_checkpoint
from maskrcnn_trt.model.image_limits import ImageError
from maskrcnn_trt.model.mask_rcnn import BatchDetections


def test_untouched_bundle_passes(torch_bundle: Path, tiny_checkpoint: Path) -> None:
    manifest = read_manifest(torch_bundle)
    comparisons = verify_bundle(torch_bundle, manifest, load_checkpoint(tiny_checkpoint), [])
    assert {c.artifact.kind for c in comparisons} == {"onnx", "torch"}
    assert [c.artifact for c in comparisons] == list(manifest.artifacts)
    for comparison in comparisons:
        assert comparison.passed
        assert comparison.images > 0
        assert comparison.detections > 0
        assert comparison.missed == 0


def test_images_are_compared_in_their_bucket(
    bundle: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    paths = []
    for index, shape in enumerate([(96, 150, 3), (70, 160, 3), (200, 130, 3), (9, 9, 3)] * 2):
        pixels = np.random.default_rng(index).integers(0, 256, shape, np.uint8)
        paths.append(tmp_path / f"{index}.png")
        Image.fromarray(pixels).save(paths[-1])
    comparisons = verify_bundle(
        bundle, read_manifest(bundle), load_checkpoint(tiny_checkpoint), paths
    )
    # Of two buckets with the same area, square images use the first.
    assert {str(c.artifact.bucket): c.images for c in comparisons} == {"96x160": 6, "160x96": 2}
    assert all(comparison.passed for comparison in comparisons)


def with_shifted_weights(
    bundle: Path, copy: Path, name: str, shift: float | list[float]
) -> Manifest:
    """Copy a bundle's first artifact with shifted weights, and return its manifest."""
    manifest = read_manifest(bundle)
    first = manifest.artifacts[0]
    proto = onnx.load(bundle / first.path)
    (tensor,) = (t for t in proto.graph.initializer if t.name == name)
    weights = numpy_helper.to_array(tensor) + np.array(shift, np.float32)
    tensor.CopyFrom(numpy_helper.from_array(weights, name))
    onnx.save(proto, copy / first.path)
    first = first.model_copy(update={"sha256": sha256_of(copy / first.path)})
    return manifest.model_copy(update={"artifacts": (first,)})


@pytest.mark.parametrize(
    ("name", "shift"),
    [
        ("roi_heads.box_predictor.bbox_pred.bias", 0.05),
        ("roi_heads.box_predictor.cls_score.bias", [0.0, 0.0, 0.0, 0.05]),
        ("roi_heads.box_predictor.cls_score.bias", [100.0, 0.0, 0.0, 0.0]),
        ("roi_heads.mask_predictor.conv5_mask.weight", 0.1),
    ],
    ids=["boxes", "scores", "no detections", "masks"],
)
def test_changed_weights_fail(
    bundle: Path, tiny_checkpoint: Path, tmp_path: Path, name: str, shift: float | list[float]
) -> None:
    manifest = with_shifted_weights(bundle, tmp_path, name, shift)
    (changed,) = verify_bundle(tmp_path, manifest, load_checkpoint(tiny_checkpoint), [])
    assert not changed.passed
    assert changed.missed > 0


def test_additional_detections_fail(bundle: Path, tiny_checkpoint: Path) -> None:
    """As if NMS kept a box that overlaps another one of the same class."""
    manifest = read_manifest(bundle)
    artifact = manifest.artifacts[0]
    batches = reference_batches(load_checkpoint(tiny_checkpoint), manifest, [])[artifact.bucket]
    outputs = [output.numpy().copy() for output in batches[0].expected]
    few = BatchDetections(torch.full_like(batches[0].expected[0], 3), *batches[0].expected[1:])
    batch = batches[0]._replace(expected=few)
    outputs[0][:] = 3
    assert compare_artifact(artifact, [batch], lambda *_: outputs).passed
    outputs[0][:] = 4
    comparison = compare_artifact(artifact, [batch], lambda *_: outputs)
    assert (comparison.missed, comparison.passed) == (len(batch.images), False)


def test_without_detections_nothing_was_compared(bundle: Path) -> None:
    artifact = read_manifest(bundle).artifacts[0]
    comparisons = [Comparison(artifact, TOLERANCES["fp32"], images=1, detections=n) for n in (0, 5)]
    results = list(table_of(comparisons).columns[-1].cells)
    assert "not compared" in str(results[0])
    assert results[1] == "passed"


@pytest.mark.parametrize("part", ["boxes", "scores", "masks"])
def test_one_output_of_nan_fails(
    bundle: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """NaN fails even if any number of detections may be wrong."""
    monkeypatch.setitem(TOLERANCES, "fp32", TOLERANCES["fp32"]._replace(share=1.0))
    manifest = read_manifest(bundle)
    artifact = manifest.artifacts[0]
    batches = reference_batches(load_checkpoint(tiny_checkpoint), manifest, [])[artifact.bucket]
    outputs = [output.numpy().copy() for output in batches[0].expected]
    assert compare_artifact(artifact, batches, lambda *_: outputs).passed
    outputs[OUTPUT_NAMES.index(part)][0, 0] = np.nan
    comparison = compare_artifact(artifact, batches, lambda *_: outputs)
    assert comparison.missed
    assert not comparison.passed
    assert np.isnan(getattr(comparison, part))


def test_damaged_files_and_images_raise(
    bundle: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    checkpoint, manifest = load_checkpoint(tiny_checkpoint), read_manifest(bundle)
    copy, image = shutil.copytree(bundle, tmp_path / "copy"), tmp_path / "broken.jpg"
    with (copy / manifest.artifacts[0].path).open("ab") as file:
        file.write(b"\0")
    with pytest.raises(BundleError, match=manifest.artifacts[0].path):
        verify_bundle(copy, manifest, checkpoint, [])
    image.write_bytes(b"\xff\xd8\xff\xe0 no more")
    with pytest.raises(ImageError, match=str(image)):
        verify_bundle(bundle, manifest, checkpoint, [image])
    Image.new("RGB", (96, 160)).save(image)
    wide = manifest.model_copy(update={"artifacts": manifest.artifacts[:1]})
    with pytest.raises(ImageError, match=rf"{image}: .*fits into none .*: 96x160; .*--shape"):
        verify_bundle(bundle, wide, checkpoint, [image])
