"""Inference benchmarks of the tiny model, through the command that users type."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner

from maskrcnn_trt.benchmarks.commands import bench
from maskrcnn_trt.benchmarks.images import batch_from_encoded, noise_jpeg
from maskrcnn_trt.benchmarks.infer import (
    InferSettings,
    MeasurementError,
    engine_choices,
    measure_models,
)
from maskrcnn_trt.benchmarks.stages import STAGES
from maskrcnn_trt.benchmarks.torch_engines import (
    engine_from_checkpoint,
    torchvision_from_checkpoint,
)
from maskrcnn_trt.export.bundle import bundle_from_checkpoint
from maskrcnn_trt.model.checkpoint import CheckpointError, load_checkpoint
from maskrcnn_trt.model.manifest import Precision, read_manifest, sha256_of, write_manifest
from maskrcnn_trt.model.spec import ShapeBucket

QUICK = ("--seconds", "0.05", "--warmup", "1")


@pytest.fixture(scope="module")
def single_image_bundle(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle with models that refuse every batch but of one."""
    folder = shutil.copytree(bundle, tmp_path_factory.mktemp("bundles") / "single")
    manifest = read_manifest(folder)
    artifacts = []
    for artifact in manifest.artifacts:
        model = onnx.load(folder / artifact.path)
        for tensor in model.graph.input:
            tensor.type.tensor_type.shape.dim[0].dim_value = 1
        onnx.save(model, folder / artifact.path)
        digest = sha256_of(folder / artifact.path)
        artifacts.append(artifact.model_copy(update={"sha256": digest}))
    write_manifest(folder, manifest.model_copy(update={"artifacts": tuple(artifacts)}))
    return folder


def test_bundle_checkpoint_and_peer_in_one_run(bundle: Path, tiny_checkpoint: Path, tmp_path: Path):
    record = tmp_path / "new" / "record.json"
    models = (str(bundle), str(tiny_checkpoint))
    peers = ("--peer", "torchvision", "--peer", "onnxruntime")
    options = ("--batch", "3", "--batch", "1", *peers, "--json", str(record))
    result = CliRunner().invoke(bench, ["infer", *models, *options, *QUICK])
    assert result.exit_code == 0, result.output
    found = json.loads(record.read_text())
    assert [(r["engine"], r["data"], r["batch"]) for r in found["results"]] == [
        ("onnxruntime", "device", 1),
        ("onnxruntime", "host", 1),
        ("onnxruntime", "device", 3),
        ("onnxruntime", "host", 3),
        ("eager", "device", 1),
        ("eager", "device", 3),
        ("torchvision", "device", 1),
        ("torchvision", "device", 3),
    ]
    for r in found["results"]:
        assert r["iterations"] >= 1
        assert r["images_per_second"] > 0
        assert 0 < r["latency"]["p50"] <= r["latency"]["p90"] <= r["latency"]["p99"]
        assert r["peak_memory_mib"] > 10
        assert (r["bucket"], r["precision"]) == ("96x160", "fp32")
        assert (r["memory"] == "cpu") == (r["device"] == "cpu")
        assert r["detections_per_image"] == found["results"][-1]["detections_per_image"] > 0
    assert found["failures"] == []
    if not torch.cuda.is_available():
        assert (found["floors"], found["stages"]) == ([], [])
    assert found["machine"]["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert "torchvision in fp32 at batch 3: " in result.output


def test_what_fails_is_a_row_and_the_rest_goes_on(single_image_bundle: Path, tmp_path: Path):
    """At batch 2 the runtime fails, in bf16 there is no model, and neither ends the run."""
    options = ("--precision", "bf16", "--precision", "fp32", "--batch", "1", "--batch", "2")
    backend = ("--backend", "onnxruntime", "--peer", "onnxruntime")
    arguments = [str(single_image_bundle), *options, *backend, "--output", str(tmp_path)]
    result = CliRunner().invoke(bench, ["infer", *arguments, *QUICK])
    assert result.exit_code == 0, result.output
    (record,) = tmp_path.glob("infer-*.json")
    found = json.loads(record.read_text())
    assert {(r["precision"], r["batch"]) for r in found["results"]} == {("fp32", 1)}
    lacking, failed = found["failures"]
    assert (lacking["precision"], lacking["batch"]) == ("bf16", None)
    assert lacking["reason"] == "there is no ONNX model in bf16, which only torch computes"
    assert (failed["precision"], failed["batch"]) == ("fp32", 2)
    assert failed["reason"].startswith("RuntimeError: ")
    assert re.search(r"onnxruntime +2 +failed", result.output)
    assert "onnxruntime in fp32 at batch 2: RuntimeError: " in result.output.replace("\n", " ")


def test_program_of_torch_is_measured_on_the_device_and_as_served(
    tiny_checkpoint: Path, tmp_path: Path
):
    folder, record = tmp_path / "bundle", tmp_path / "record.json"
    bundle_from_checkpoint(tiny_checkpoint, folder, precisions=("bf16",), with_programs=True)
    options = ("--precision", "bf16", "--backend", "torch", "--peer", "onnxruntime")
    arguments = [str(folder), *options, "--batch", "2", "--json", str(record)]
    result = CliRunner().invoke(bench, ["infer", *arguments, *QUICK])
    assert result.exit_code == 0, result.output
    found = json.loads(record.read_text())
    measured = [(r["engine"], r["data"], r["precision"], r["batch"]) for r in found["results"]]
    assert measured == [("torch", "device", "bf16", 2), ("torch", "host", "bf16", 2)]
    (lacking,) = found["failures"]
    assert lacking["reason"] == "there is no ONNX model in bf16, which only torch computes"


@pytest.mark.gpu
@pytest.mark.slow
def test_graphs_of_a_gpu_are_measured_by_stage(tiny_checkpoint: Path, tmp_path: Path):
    folder, output = tmp_path / "bundle", tmp_path / "record"
    bundle_from_checkpoint(tiny_checkpoint, folder, precisions=("fp16",), with_programs=True)
    models = (str(folder), str(tiny_checkpoint))
    options = ("--precision", "fp16", "--batch", "1", "--batch", "2", "--output", str(output))
    result = CliRunner().invoke(bench, ["infer", *models, *options, *QUICK])
    assert result.exit_code == 0, result.output
    found = json.loads(next(output.glob("infer-*.json")).read_text())
    assert found["failures"] == []
    assert {(r["engine"], r["data"], r["memory"]) for r in found["results"]} == {
        ("torch", "device", "torch"),
        ("torch", "host", "torch"),
        ("eager", "device", "torch"),
    }
    assert [times["batch"] for times in found["stages"]] == [1, 2]
    for times in found["stages"]:
        assert all(times["milliseconds"][stage] > 0 for stage in STAGES)
        assert all(kernel["milliseconds"] > 0 for kernel in times["costliest"])
    (floor,) = found["floors"]
    assert floor["flops_per_image"] > 0


def test_failure_is_raised_where_nobody_takes_it(single_image_bundle: Path):
    settings = InferSettings(batches=(2,), seconds=0.05)
    with pytest.raises(MeasurementError, match="invalid dimensions"):
        measure_models([single_image_bundle], settings)


def test_engines_come_by_precision_and_peers_last(bundle: Path, tiny_checkpoint: Path):
    settings = InferSettings(precisions=("fp16", "fp32"), peers=("onnxruntime", "torchvision"))
    choices = engine_choices([bundle, tiny_checkpoint], settings)
    names = ["bundle", "eager", "onnxruntime", "torchvision"]
    assert [(c.precision, c.name) for c in choices] == [
        (precision, name) for precision in ("fp16", "fp32") for name in names
    ]


def test_other_input_size_and_own_picture(bundle: Path, tmp_path: Path):
    picture = tmp_path / "picture.jpg"
    picture.write_bytes(noise_jpeg(ShapeBucket(50, 40)))
    arguments = [str(bundle), "--shape", "160x96", "--images", str(picture), "--batch", "2"]
    result = CliRunner().invoke(bench, ["infer", *arguments, *QUICK])
    assert result.exit_code == 0, result.output
    assert "160x96" in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--shape", "64x64"], "has no input size 64x64; choose from 96x160, 160x96"),
        (["--precision", "fp16"], "the bundle has no fp16 onnx artefact, only fp32 onnx"),
        (["--backend", "tensorrt"], "the bundle has no fp32 tensorrt artefact, only fp32 onnx"),
        (["--shape", "big"], "'big' is not of the form HEIGHTxWIDTH, as in 800x1344"),
        (["--peer", "torchvision"], "--peer torchvision needs the weights of a checkpoint"),
        (["--images", "IMAGE"], "the data is no JPEG, PNG or WebP image"),
    ],
)
def test_what_cannot_be_measured_is_named(
    bundle: Path, tmp_path: Path, arguments: list[str], sentence: str
):
    image = tmp_path / "image.jpg"
    image.write_bytes(b"none")
    arguments = [str(image) if word == "IMAGE" else word for word in arguments]
    result = CliRunner().invoke(bench, ["infer", str(bundle), *arguments, *QUICK])
    assert result.exit_code != 0
    assert sentence in f"{result.output} {result.exception}"


def test_onnxruntime_as_a_peer_needs_a_bundle(tiny_checkpoint: Path):
    arguments = [str(tiny_checkpoint), "--peer", "onnxruntime"]
    result = CliRunner().invoke(bench, ["infer", *arguments, *QUICK])
    assert result.exit_code == 2
    assert "--peer onnxruntime needs a bundle among MODELS" in result.output


def test_peer_without_such_a_model_is_named(tiny_checkpoint: Path):
    checkpoint = load_checkpoint(tiny_checkpoint)
    weights = {name: w for name, w in checkpoint.weights.items() if "mask_head" not in name}
    with pytest.raises(CheckpointError, match="torchvision has no model of the checkpoint's"):
        torchvision_from_checkpoint(replace(checkpoint, weights=weights), "fp32")


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_torch_models_take_every_precision(tiny_checkpoint: Path, precision: Precision):
    engine = engine_from_checkpoint(load_checkpoint(tiny_checkpoint), precision)
    (run,) = engine.runs_over(np.zeros((1, 3, 96, 160), np.uint8))
    run.complete()
    assert (run.engine, run.data) == ("eager", "device")


def test_peer_computes_the_same_detections(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    checkpoint = load_checkpoint(tiny_checkpoint)
    bucket = checkpoint.buckets[0]
    images = torch.from_numpy(batch_from_encoded([noise_jpeg(bucket)], bucket, 2))
    ours, theirs = (
        make(checkpoint, "fp32") for make in (engine_from_checkpoint, torchvision_from_checkpoint)
    )
    images = images.to(ours.device)
    with torch.inference_mode():
        found = ours.model(*ours.inputs_from(images))
        expected = theirs.model(*theirs.inputs_from(images))
    for i, peer in enumerate(expected):
        count = int(found.num_detections[i])
        assert count == len(peer["boxes"]) > 0
        assert torch.allclose(found.boxes[i, :count], peer["boxes"], atol=1e-2)
        assert torch.allclose(found.scores[i, :count], peer["scores"], atol=1e-4)
        assert torch.equal(found.labels[i, :count], peer["labels"])


def test_batches_hold_the_images_in_turn():
    small, large = noise_jpeg(ShapeBucket(32, 32)), noise_jpeg(ShapeBucket(64, 96))
    batch = batch_from_encoded([small, large], ShapeBucket(64, 96), 3)
    assert batch.shape == (3, 3, 64, 96)
    assert (batch[0] == batch[2]).all()
    assert (batch[0] != batch[1]).any()
