"""Exports into the folder of an older bundle."""

import hashlib
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from maskrcnn_trt.export.bundle import bundle_from_checkpoint
from maskrcnn_trt.export.output_folder import (
    atomic_folder,
    copy_samples,
    sample_images,
    with_older_artifacts,
)
from maskrcnn_trt.model.bundle.manifest import (
    BundleError,
    CompiledProgram,
    CompileTarget,
    Manifest,
    Precision,
    read_manifest,
    verified_path,
    write_manifest,
)
from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.model.checkpoint import load_checkpoint, save_checkpoint
from maskrcnn_trt.model.image_limits import ImageError

pytestmark = pytest.mark.usefixtures("quick_graphs")
WIDE, HIGH = ShapeBucket(96, 160), ShapeBucket(160, 96)


@pytest.fixture
def older(bundle: Path, tmp_path: Path) -> Path:
    """Bundle of the tiny checkpoint in fp32 for both sizes, with a sample image."""
    folder = tmp_path / "bundle"
    shutil.copytree(bundle, folder)
    (folder / "samples").mkdir()
    (folder / "samples" / "street.png").write_bytes(b"image")
    return folder


def contents(folder: Path, manifest: Manifest) -> list[tuple[Precision, ShapeBucket]]:
    """Return precision and size of each artifact, whose files have the hashes of the manifest."""
    assert read_manifest(folder) == manifest
    assert all(verified_path(folder, artifact).is_file() for artifact in manifest.artifacts)
    return [(artifact.precision, artifact.bucket) for artifact in manifest.artifacts]


def test_artifacts_of_the_same_checkpoint_are_added(tiny_checkpoint: Path, older: Path) -> None:
    manifest = bundle_from_checkpoint(tiny_checkpoint, older, precisions=("fp16",), buckets=(WIDE,))
    assert contents(older, manifest) == [("fp32", WIDE), ("fp32", HIGH), ("fp16", WIDE)]
    assert (older / "samples" / "street.png").read_bytes() == b"image"
    assert {path.name for path in older.parent.iterdir()} == {"bundle"}


def test_damaged_artifacts_are_left_out(tiny_checkpoint: Path, older: Path) -> None:
    damaged, other = read_manifest(older).artifacts
    (older / damaged.path).write_bytes((older / damaged.path).read_bytes()[:1000])
    reports: list[str] = []
    manifest = bundle_from_checkpoint(
        tiny_checkpoint, older, precisions=("fp16",), buckets=(WIDE,), report=reports.append
    )
    assert contents(older, manifest) == [("fp32", other.bucket), ("fp16", WIDE)]
    assert any(damaged.path in message for message in reports)


@pytest.mark.parametrize("content", ["{", '{"name": "My web app", "icons": []}', None])
def test_other_files_beside_a_damaged_manifest_are_not_deleted(
    tiny_checkpoint: Path, older: Path, content: str | None
) -> None:
    """Without manifest, even the folder `samples` may be the user's."""
    for path in older.glob("m*"):
        path.unlink()
    if content is not None:
        (older / "manifest.json").write_text(content)
        (older / "index.html").touch()
    files = set(older.iterdir())
    with pytest.raises(BundleError, match="already holds"):
        bundle_from_checkpoint(tiny_checkpoint, older)
    assert set(older.iterdir()) == files


def test_artifacts_are_replaced_by_those_of_the_same_kind(
    tiny_checkpoint: Path, older: Path
) -> None:
    before = read_manifest(older)
    manifest = bundle_from_checkpoint(tiny_checkpoint, older, precisions=("fp32",), buckets=(HIGH,))
    assert contents(older, manifest) == [("fp32", WIDE), ("fp32", HIGH)]
    assert manifest.artifacts[1].sha256 != before.artifacts[1].sha256


def test_precisions_share_a_file_that_was_exported_again(
    tiny_checkpoint: Path, older: Path
) -> None:
    manifest = bundle_from_checkpoint(tiny_checkpoint, older, precisions=("tf32",), buckets=(HIGH,))
    assert contents(older, manifest) == [("fp32", WIDE), ("fp32", HIGH), ("tf32", HIGH)]
    assert len({artifact.path for artifact in manifest.artifacts}) == 2


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_kept_entry_of_a_shared_file_takes_its_input_type(
    older: Path, tmp_path: Path, dtype: str
) -> None:
    """A program that was compiled for another input type is left out."""
    manifest = read_manifest(older)
    target = CompileTarget(torch_version="2", python_version="3", compute_capability="9.0")
    empty = hashlib.sha256().hexdigest()
    compiled = CompiledProgram(path="model.compiled", sha256=empty, target=target)
    fields = {"kind": "torch", "path": "model.pt2", "sha256": empty, "compiled": compiled}
    fp32 = manifest.artifacts[0].model_copy(update=fields)
    shared = {"input_dtype": dtype, "sha256": "new"}
    tf32 = fp32.model_copy(update={"precision": "tf32", "compiled": None, **shared})
    (folder := tmp_path / "new").mkdir()
    for path in (older / "model.pt2", older / "model.compiled", folder / "model.pt2"):
        path.touch()
    write_manifest(older, manifest.model_copy(update={"artifacts": (fp32,)}))
    new = manifest.model_copy(update={"artifacts": (tf32,)})
    kept, _ = with_older_artifacts(new, folder, older, print).artifacts
    expected = compiled if dtype == "uint8" else None
    assert kept == fp32.model_copy(update={"compiled": expected, **shared})
    assert (folder / "model.compiled").exists() == (dtype == "uint8")


def test_samples_are_images_that_browsers_show(older: Path, tmp_path: Path) -> None:
    images = [tmp_path / f"{number}.jpg" for number in range(8)]
    for path in (scan := tmp_path / "0.tiff", *images):
        Image.new("RGB", (8, 8)).save(path)
    copy_samples(sample_images([scan, *images]), older)
    assert {path.name for path in (older / "samples").iterdir()} == {p.name for p in images[:6]}
    copy_samples(sample_images(sorted((older / "samples").iterdir())), older)
    assert len(list((older / "samples").iterdir())) == 6
    images[3].write_bytes(b"text")
    with pytest.raises(ImageError, match=r"3\.jpg: "):
        copy_samples(sample_images(images), older)
    assert len(list((older / "samples").iterdir())) == 6
    (tmp_path / "b").mkdir()
    copy_samples(sample_images([images[0], images[1].rename(tmp_path / "b" / "0.jpg")]), older)
    assert len(list((older / "samples").iterdir())) == 2


def test_bundles_of_other_checkpoints_are_replaced(
    tiny_checkpoint: Path, older: Path, tmp_path: Path
) -> None:
    other = replace(load_checkpoint(tiny_checkpoint), iteration=7)
    save_checkpoint(tmp_path / "other.pth", other)
    reports: list[str] = []
    manifest = bundle_from_checkpoint(
        tmp_path / "other.pth", older, precisions=("tf32",), report=reports.append
    )
    assert contents(older, manifest) == [("tf32", WIDE), ("tf32", HIGH)]
    assert any("replacing" in sentence and str(older) in sentence for sentence in reports)
    assert (older / "samples" / "street.png").read_bytes() == b"image"


def test_bundles_of_other_configurations_are_replaced(
    tiny_checkpoint: Path, older: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """detectron2's configuration is a file beside the weights."""
    tiny = load_checkpoint(tiny_checkpoint)
    config = tiny.model_config.model_copy(update={"pixel_mean": (1.0, 2.0, 3.0)})
    other = replace(tiny, model_config=config)
    monkeypatch.setattr("maskrcnn_trt.export.bundle.checkpoint_from_reference", lambda _: other)
    manifest = bundle_from_checkpoint(tiny_checkpoint, older, precisions=("tf32",), buckets=(WIDE,))
    assert contents(older, manifest) == [("tf32", WIDE)]


def test_leftovers_of_killed_exports_are_removed(older: Path, tmp_path: Path) -> None:
    """The folder of an export that is alive stays. A bundle that was moved away comes back."""
    program = (
        "from maskrcnn_trt.export.output_folder import *\n"
        "with atomic_folder(Path('bundle')) as (partial, _):\n"
        "    Path('bundle').replace(partial.with_name('older'))\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"import sys\n{program}"],
        cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with atomic_folder(tmp_path / "bundle") as (first, _):
            assert len(list(tmp_path.glob(".bundle.*"))) == 2
            (first / "alone").touch()
            (tmp_path / ".bundle.mine").mkdir()
            (tmp_path / ".bundle.v2.abcd1234").mkdir()  # of a bundle `bundle.v2`
            (tmp_path / ".bundle.v2.abcd1234" / ".export-lock").touch()
        shutil.rmtree(tmp_path / "bundle")
        process.kill()
    with atomic_folder(tmp_path / "bundle") as (second, _):
        assert {p.name for p in tmp_path.glob(".bundle.*")} == {
            ".bundle.mine",
            ".bundle.v2.abcd1234",
            second.parent.name,
        }
        assert read_manifest(older).artifacts


def test_concurrent_exports_keep_each_others_files(tmp_path: Path) -> None:
    bundle, names = tmp_path / "bundle", [f"model-{number}.onnx" for number in range(40)]

    def export(name: str) -> None:
        with atomic_folder(bundle) as (partial, lock):
            (partial / name).touch()
            lock()
            for older in bundle.glob("*"):
                (partial / older.name).touch()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(export, names))
    assert sorted(path.name for path in bundle.iterdir()) == sorted(names)
    assert list(tmp_path.iterdir()) == [bundle]
