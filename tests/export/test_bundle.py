import json
import math
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from maskrcnn_trt.export.bundle import bundle_from_checkpoint
from maskrcnn_trt.model.bundle.manifest import BundleError, read_manifest, verified_path
from maskrcnn_trt.model.checkpoint import load_checkpoint, save_checkpoint


def test_bundle_has_the_files_of_its_manifest(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert manifest.class_names == ("disc", "box", "ring")
    assert {str(a.bucket) for a in manifest.artifacts_for("fp32")} == {"96x160", "160x96"}
    for artifact in manifest.artifacts:
        assert verified_path(bundle, artifact).is_file()


@pytest.mark.slow
def test_polygraphy_finds_no_fault(half_bundle: Path, tmp_path: Path) -> None:
    """NVIDIA's linter runs every subgraph in ONNX Runtime, our nodes by their function bodies.

    The fp16 graph has the nodes of the fp32 graph, and conversions between the two types.
    """
    path = half_bundle / read_manifest(half_bundle).artifacts[0].path
    polygraphy, report = Path(sys.executable).with_name("polygraphy"), tmp_path / "report.json"
    command = (polygraphy, "check", "lint", path, "--output", report)
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert json.loads(report.read_text())["lint_entries"] == []


@pytest.mark.usefixtures("quick_graphs")
@pytest.mark.parametrize("name", ["bundle", "new/../bundle", "link"])
def test_folder_of_an_older_bundle_has_any_name(
    tiny_checkpoint: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A damaged bundle is replaced."""
    older = shutil.copytree(bundle, tmp_path / "bundle")
    (tmp_path / "link").symlink_to(older)
    if name == "bundle":
        (older / "manifest.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    manifest = bundle_from_checkpoint(tiny_checkpoint, Path(name), precisions=("tf32",))
    assert read_manifest(older) == manifest
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "link"}


@pytest.mark.parametrize("name", [".", "../bundle", "../link", ".."])
def test_the_current_folder_is_not_replaced(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "outer" / "bundle").mkdir(parents=True)
    (tmp_path / "outer" / "link").symlink_to("bundle")
    (tmp_path / "outer" / "manifest.json").write_text("{")  # a damaged bundle
    monkeypatch.chdir(tmp_path / "outer" / "bundle")
    with pytest.raises(BundleError, match=rf"{name} .*current folder"):
        bundle_from_checkpoint(tiny_checkpoint, Path(name))
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.usefixtures("quick_graphs")
@pytest.mark.parametrize("kind", [list, iter])
def test_input_sizes_may_be_plain_tuples(
    tiny_checkpoint: Path, tmp_path: Path, kind: Callable[[list[Any]], Any]
) -> None:
    precisions, buckets = kind(["fp32"]), kind([(96, 160)])
    bundle_from_checkpoint(
        str(tiny_checkpoint), str(tmp_path), precisions=precisions, buckets=buckets
    )
    (artifact,) = read_manifest(tmp_path).artifacts
    assert artifact.path == "model-fp32-96x160.onnx"


@pytest.mark.usefixtures("quick_graphs")
def test_torchvisions_resize_rule_needs_float_inputs(tiny_checkpoint: Path, tmp_path: Path) -> None:
    tiny = load_checkpoint(tiny_checkpoint)
    rule = tiny.preprocessing.model_copy(update={"resize": "torchvision"})
    save_checkpoint(tmp_path / "floats.pth", replace(tiny, preprocessing=rule))
    export = partial(bundle_from_checkpoint, tmp_path / "floats.pth", tmp_path / "bundle")
    manifest = export(precisions=("fp32",))
    assert read_manifest(tmp_path / "bundle").preprocessing.resize == "torchvision"
    assert {artifact.input_dtype for artifact in manifest.artifacts} == {"float32"}
    with pytest.raises(BundleError, match=r"uint8.*preprocessing\.resize=pillow"):
        export(precisions=("fp32",), input_dtype="uint8")


@pytest.mark.usefixtures("quick_graphs")
def test_metrics_that_are_not_finite_are_left_out(tiny_checkpoint: Path, tmp_path: Path) -> None:
    metrics = {"bbox/AP": 0.5, "segm/AP": math.nan, "loss": math.inf}
    save_checkpoint(tmp_path / "m.pth", replace(load_checkpoint(tiny_checkpoint), metrics=metrics))
    bundle_from_checkpoint(tmp_path / "m.pth", tmp_path / "bundle", precisions=("fp32",))
    assert read_manifest(tmp_path / "bundle").provenance.metrics == {"bbox/AP": 0.5}


@pytest.mark.usefixtures("quick_graphs")
def test_full_disk_names_the_folder_and_keeps_the_older_bundle(
    tiny_checkpoint: Path, bundle: Path, tmp_path: Path
) -> None:
    """A limit of 1 MB per file simulates a full disk."""
    older = shutil.copytree(bundle, tmp_path / "bundle")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match=r"too large") as caught:
            bundle_from_checkpoint(tiny_checkpoint, older)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(tmp_path)
    for artifact in read_manifest(older).artifacts:
        assert verified_path(older, artifact).is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [({"precisions": "fp32"}, ["precisions is 'fp32'", "list of fp32"]),
     ({"precisions": ["fp64"]}, ["precisions.0 is 'fp64'", "fp32"]),
     ({"precisions": []}, ["precisions is []", "not empty"]),
     ({"input_dtype": "float16"}, ["input_dtype is 'float16'", "float32"]),
     ({"buckets": [96, 96]}, ["buckets.0 is 96", "[height, width]"]),
     ({"buckets": ["96x96"]}, ["buckets.0 is '96x96'", "[height, width]"]),
     ({"builders": None}, ["builders is None", "list"]),
     ({"with_programs": "no"}, ["with_programs is 'no'"]),
     ({"builders": iter(["tensorrt"])}, ["builders.0 is 'tensorrt'"]),
     ({"precisions": ["int8"], "calibration": "a.jpg"}, ["calibration is 'a.jpg'", "list"])],
)  # fmt: skip
def test_arguments_of_other_types_are_refused_before_the_export(
    tiny_checkpoint: Path, tmp_path: Path, arguments: dict[str, Any], facts: list[str]
) -> None:
    with pytest.raises(BundleError) as caught:
        bundle_from_checkpoint(tiny_checkpoint, tmp_path / "bundle", **arguments)
    assert all(fact in str(caught.value) for fact in facts)
    assert not (tmp_path / "bundle").exists()


def test_unusable_folders_and_sizes_are_refused_before_the_export(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images are resized to a shorter side of 96 pixels or a longer side of 160."""
    for size in ((64, 128), (100, 160), (0, 160), (64000, 64000)):
        with pytest.raises(BundleError, match=rf"{size[0]}x{size[1]}.*--shape"):
            bundle_from_checkpoint(tiny_checkpoint, tmp_path / "bundle", buckets=[size])
    assert not (tmp_path / "bundle").exists()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", "a\0b"):
        with pytest.raises(BundleError, match=r"is a file|not a path"):
            bundle_from_checkpoint(tiny_checkpoint, path)
    with pytest.raises(BundleError, match="mount point"):
        bundle_from_checkpoint(tiny_checkpoint, tmp_path)
