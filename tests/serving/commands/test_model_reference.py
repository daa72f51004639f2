"""Commands that take a published model's name or a checkpoint instead of a bundle."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from command_line import invoke
from PIL import Image

torch = pytest.importorskip("torch")

from small_models import random_model  # noqa: E402
from zoo_mirror import zoo_mirror  # noqa: E402

from maskrcnn_trt.benchmarks.accuracy import evaluate  # noqa: E402
from maskrcnn_trt.benchmarks.bulk import bulk  # noqa: E402
from maskrcnn_trt.benchmarks.infer import infer  # noqa: E402
from maskrcnn_trt.benchmarks.serve import serve as bench_serve  # noqa: E402
from maskrcnn_trt.model.bundle.manifest import read_manifest  # noqa: E402
from maskrcnn_trt.model.bundle.spec import ShapeBucket  # noqa: E402
from maskrcnn_trt.model.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from maskrcnn_trt.model.config.schema import ModelConfig  # noqa: E402
from maskrcnn_trt.model.download.local_files import DownloadError  # noqa: E402
from maskrcnn_trt.model.weights.zoo import ZooError  # noqa: E402
from maskrcnn_trt.serving import host  # noqa: E402
from maskrcnn_trt.serving.commands import options  # noqa: E402
from maskrcnn_trt.serving.commands.predict import predict  # noqa: E402
from maskrcnn_trt.serving.commands.serve import serve  # noqa: E402

Encode = Callable[..., bytes]

NAME = "torchvision:maskrcnn_resnet50_fpn"


def detecting_weights() -> bytes:
    """Return a torchvision file of a narrow model that detects objects in any image."""
    values = {
        "num_classes": 90,
        "backbone": {"name": "resnet18", "fpn_channels": 32, "norm_eps": 0},
        "roi": {"box_head_dim": 32, "mask_head_dim": 32, "mask_head_depth": 1},
    }
    state = random_model(ModelConfig.model_validate(values)).state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


@pytest.mark.slow
def test_one_command_downloads_exports_detects_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, picture: Encode
) -> None:
    """A later run needs neither the server nor the weights."""
    # One input size instead of two, and the smallest that fits the image: 800x1067 after resizing.
    one_size = partial(options.bundle_for_backend, buckets=[ShapeBucket(800, 1088)])
    monkeypatch.setattr(options, "bundle_for_backend", one_size)
    street = tmp_path / "street.jpg"
    street.write_bytes(picture(size=(240, 320)))
    output = tmp_path / "detections"
    with zoo_mirror(tmp_path, monkeypatch, {NAME: detecting_weights()}):
        result = invoke(predict, NAME, street, "-o", output)
    assert result.exit_code == 0, result.output
    with Image.open(output / "street.png") as drawn, Image.open(street) as source:
        assert drawn.size == source.size
        assert (np.array(drawn) != np.array(source)).any()
    records = json.loads((output / "detections.json").read_text())
    assert records
    assert all(1 <= record["category_id"] <= 90 for record in records)
    (weights,) = (tmp_path / "cache").rglob("*.pth")
    weights.unlink()
    again = invoke(predict, NAME, street, "-o", tmp_path / "again")
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "again" / "detections.json").read_text()) == records
    (bundle,) = (path.parent for path in (tmp_path / "cache").rglob("manifest.json"))
    manifest = read_manifest(bundle)
    assert manifest.class_names[0] == "person"
    assert manifest.precisions == ("fp32",)


@pytest.mark.slow
def test_a_checkpoint_is_exported_once(
    tiny_checkpoint: Path,
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    picture: Encode,
) -> None:
    """`predict` and `eval` of a checkpoint give the results of its bundle."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "images").mkdir()
    image = tmp_path / "images" / "1.png"
    image.write_bytes(picture(size=(96, 160), codec="PNG"))
    # With one input size, because each takes an export of six seconds.
    checkpoint = tmp_path / "one_size.pth"
    tiny = load_checkpoint(tiny_checkpoint)
    save_checkpoint(checkpoint, replace(tiny, buckets=tiny.buckets[:1]))
    records = []
    for name, model in (("bundle", bundle), ("checkpoint", checkpoint)):
        words = (image, "-o", tmp_path / name, "--score-threshold", 0.2, "--format", "coco")
        result = invoke(predict, model, *words)
        assert result.exit_code == 0, result.output
        records.append(json.loads((tmp_path / name / "detections.json").read_text()))
    assert records[0] == records[1]
    exported = list((tmp_path / "cache").rglob("*.onnx"))
    annotations = {
        "images": [{"id": 1, "file_name": "1.png", "height": 96, "width": 160}],
        "annotations": [
            {"id": 1, "image_id": 1, "iscrowd": 0, **{k: records[0][0][k] for k in
             ("category_id", "bbox", "segmentation")}, "area": 100.0}
        ],
        "categories": [{"id": i, "name": n} for i, n in ((3, "disc"), (7, "box"), (8, "ring"))],
    }  # fmt: skip
    (tmp_path / "val.json").write_text(json.dumps(annotations))
    options = ("--images", image.parent, "--annotations", tmp_path / "val.json")
    result = invoke(evaluate, checkpoint, *options, "--json", tmp_path / "metrics.json")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "metrics.json").read_text())["metrics"]["segm/AP50"] > 0
    assert list((tmp_path / "cache").rglob("*.onnx")) == exported


@pytest.mark.parametrize("command", [predict, serve, infer, bulk, bench_serve])
def test_unknown_names_have_a_suggestion(command: object, tmp_path: Path, picture: Encode) -> None:
    image = tmp_path / "1.png"
    image.write_bytes(picture())
    images = (image,) if command is predict else ()
    result = invoke(command, "torchvision:maskrcnn_resnet50", *images)
    assert isinstance(result.exception, ZooError)
    assert "did you mean torchvision:maskrcnn_resnet50_fpn" in str(result.exception)


@pytest.mark.slow
def test_failed_downloads_and_exports_end_the_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    picture: Encode,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The exporting process reports that a weights file is damaged."""
    image = tmp_path / "1.png"
    image.write_bytes(picture())
    with zoo_mirror(tmp_path, monkeypatch, {NAME: b"x"}):
        missing, damaged = (
            invoke(predict, name, image, "-o", tmp_path / "out") for name in (f"{NAME}_v2", NAME)
        )
    assert isinstance(missing.exception, DownloadError)
    assert "404" in str(missing.exception)
    assert damaged.exit_code == 1
    assert "damaged" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "cache").rglob("*.onnx"))


@pytest.mark.parametrize("command", [predict, evaluate])
@pytest.mark.parametrize(
    ("backend", "precision", "facts"),
    [
        ("auto", "bf16", ("ONNX Runtime", "--backend torch")),
        ("onnxruntime", "fp8", ("ONNX Runtime", "--backend tensorrt", "--calibration")),
        ("torch", "int8", ("torch", "--backend onnxruntime", "--calibration")),
    ],
)
def test_precisions_that_the_backend_lacks_are_errors_before_the_export(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, picture: Encode,
    command: object, backend: str, precision: str, facts: tuple[str, ...],
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(host, "gpu_names", list)  # as on a machine without a GPU
    image = tmp_path / "1.png"
    image.write_bytes(picture())
    content: dict[str, list[object]] = {
        "images": [{"id": 1, "file_name": "1.png"}],
        "annotations": [],
        "categories": [{"id": 3, "name": "disc"}],
    }
    (tmp_path / "val.json").write_text(json.dumps(content))
    words = (
        (image, "-o", tmp_path / "out") if command is predict
        else ("--images", tmp_path, "--annotations", tmp_path / "val.json")
    )  # fmt: skip
    result = invoke(
        command, tiny_checkpoint, *words, "--backend", backend, "--precision", precision
    )
    assert result.exit_code == 2
    assert all(fact in result.stderr for fact in (*facts, precision))
    assert "--engine" not in result.stderr
    assert not (tmp_path / "cache").exists()


def test_variables_of_the_zoo_are_not_settings_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASKRCNN_ZOO_MIRROR", "http://localhost:1")
    assert invoke(serve, tmp_path / "none", "--doctor").exit_code == 1
