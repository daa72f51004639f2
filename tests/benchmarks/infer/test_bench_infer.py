"""`bench infer` of the tiny model."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from click.testing import Result
from command_line import invoke

from maskrcnn_trt.benchmarks.common.gpu_time import STAGES
from maskrcnn_trt.benchmarks.common.images import batch_from_encoded, noise_jpeg
from maskrcnn_trt.benchmarks.infer import infer
from maskrcnn_trt.benchmarks.infer.measure import (
    InferSettings,
    MeasurementError,
    engine_specs,
    measure_models,
)
from maskrcnn_trt.benchmarks.infer.runners import (
    runner_from_checkpoint,
    torchvision_from_checkpoint,
)
from maskrcnn_trt.export.bundle import bundle_from_checkpoint
from maskrcnn_trt.model.bundle.manifest import Precision, read_manifest, sha256_of, write_manifest
from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.model.checkpoint import CheckpointError, load_checkpoint


def run(*args: object) -> Result:
    """Run the command with short measurements."""
    return invoke(infer, *args, "--seconds", "0.05", "--warmup", "1")


@pytest.fixture(scope="module")
def single_image_bundle(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle with models that accept only batches of one."""
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


@pytest.mark.slow
def test_bundle_checkpoint_and_peer_in_one_run(bundle: Path, tiny_checkpoint: Path, tmp_path: Path):
    record = tmp_path / "new" / "record.json"
    peers = ("--peer", "torchvision", "--peer", "onnxruntime")
    result = run(bundle, tiny_checkpoint, "--batch", 3, "--batch", 1, *peers, "--json", record)
    assert result.exit_code == 0, result.output
    content = json.loads(record.read_text())
    measured = [(r["engine"], r["data"], r["batch"]) for r in content["results"]]
    on_cpu = content["results"][0]["device"] == "cpu"
    assert measured == [
        *(("onnxruntime", d, b) for b in (1, 3) for d in ("device", "host")[: 1 if on_cpu else 2]),
        ("eager", "device", 1),
        ("eager", "device", 3),
        ("torchvision", "device", 1),
        ("torchvision", "device", 3),
    ]
    for r in content["results"]:
        assert r["iterations"] >= 1
        assert r["images_per_second"] > 0
        assert 0 < r["latency"]["p50"] <= r["latency"]["p90"] <= r["latency"]["p99"]
        assert r["peak_memory_mib"] > 10
        assert (r["bucket"], r["precision"]) == ("96x160", "fp32")
        assert (r["memory"] == "cpu") == (r["device"] == "cpu")
        assert r["detections_per_image"] == content["results"][-1]["detections_per_image"] > 0
    assert content["failures"] == []
    if not torch.cuda.is_available():
        assert (content["floors"], content["stages"]) == ([], [])
    assert content["machine"]["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert "torchvision in fp32 at batch 3: " in result.output


def test_failures_are_rows_and_other_engines_are_measured(
    single_image_bundle: Path, tmp_path: Path
):
    """The runtime fails at batch 2, and there is no model in bf16."""
    options = ("--precision", "bf16", "--precision", "fp32", "--batch", 1, "--batch", 2)
    backend = ("--backend", "onnxruntime", "--peer", "onnxruntime")
    result = run(single_image_bundle, *options, *backend, "--output", tmp_path)
    assert result.exit_code == 3, result.output
    (record,) = tmp_path.glob("infer-*.json")
    content = json.loads(record.read_text())
    assert {(r["precision"], r["batch"]) for r in content["results"]} == {("fp32", 1)}
    missing, failed = content["failures"]
    assert (missing["precision"], missing["batch"]) == ("bf16", None)
    assert "no ONNX model in bf16" in missing["reason"]
    assert (failed["precision"], failed["batch"]) == ("fp32", 2)
    assert failed["reason"].startswith("RuntimeError: ")
    assert re.search(r"onnxruntime +2 +failed", result.output)
    assert "onnxruntime in fp32 at batch 2: RuntimeError: " in result.output.replace("\n", " ")


@pytest.mark.slow
def test_torch_bundle_is_measured_from_the_host_too_on_a_gpu(torch_bundle: Path, tmp_path: Path):
    record = tmp_path / "record.json"
    result = run(torch_bundle, "--backend", "torch", "--batch", 2, "--json", record)
    assert result.exit_code == 0, result.output
    content = json.loads(record.read_text())
    measured = [(r["engine"], r["data"], r["batch"]) for r in content["results"]]
    places = ("device", "host") if torch.cuda.is_available() else ("device",)
    assert measured == [("torch", place, 2) for place in places]


@pytest.mark.gpu
@pytest.mark.slow
def test_gpu_time_is_measured_by_stage(tiny_checkpoint: Path, tmp_path: Path):
    folder, output = tmp_path / "bundle", tmp_path / "record"
    bundle_from_checkpoint(tiny_checkpoint, folder, precisions=("fp16",), with_programs=True)
    options = ("--precision", "fp16", "--batch", 1, "--batch", 2, "--output", output)
    result = run(folder, tiny_checkpoint, *options)
    assert result.exit_code == 0, result.output
    content = json.loads(next(output.glob("infer-*.json")).read_text())
    assert content["failures"] == []
    assert {(r["engine"], r["data"], r["memory"]) for r in content["results"]} == {
        ("torch", "device", "torch"),
        ("torch", "host", "torch"),
        ("eager", "device", "torch"),
    }
    assert [times["batch"] for times in content["stages"]] == [1, 2]
    for times in content["stages"]:
        assert all(times["milliseconds"][stage] > 0 for stage in STAGES)
        assert all(kernel["milliseconds"] > 0 for kernel in times["costliest"])
    (floor,) = content["floors"]
    assert floor["flops_per_image"] > 0


def test_failure_is_raised_without_a_callback(single_image_bundle: Path):
    settings = InferSettings(batches=(2,), seconds=0.05)
    with pytest.raises(MeasurementError, match="invalid dimensions"):
        measure_models([single_image_bundle], settings)


def test_engines_are_ordered_by_precision_and_peers_last(bundle: Path, tiny_checkpoint: Path):
    settings = InferSettings(precisions=("fp16", "fp32"), peers=("onnxruntime", "torchvision"))
    specs = engine_specs([bundle, tiny_checkpoint], settings)
    names = ["bundle", "eager", "onnxruntime", "torchvision"]
    assert [(c.precision, c.name) for c in specs] == [
        (precision, name) for precision in ("fp16", "fp32") for name in names
    ]


def test_other_input_size_and_image(bundle: Path, tmp_path: Path):
    image = tmp_path / "image.jpg"
    image.write_bytes(noise_jpeg(ShapeBucket(50, 40)))
    result = run(bundle, "--shape", "160x96", "--images", image, "--batch", 2)
    assert result.exit_code == 0, result.output
    assert "160x96" in result.output


def test_by_default_a_bundle_is_measured_as_it_is_served(half_bundle: Path):
    result = run(half_bundle, "--batch", 1)
    assert result.exit_code == 0, result.output
    assert "Inference in fp16" in result.output


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["BUNDLE", "--shape", "64x64"], "choose from 96x160, 160x96"),
        (["BUNDLE", "--precision", "fp16"], "no fp16 onnx artifact, only fp32 onnx"),
        (["BUNDLE", "--shape", "big"], "800x1344"),
        (["BUNDLE", "--peer", "torchvision"], "add a checkpoint to MODELS"),
        (["BUNDLE", "--images", "IMAGE"], "not a JPEG"),
        (["CHECKPOINT", "--peer", "onnxruntime"], "add a bundle to MODELS"),
    ],
)
def test_invalid_arguments_are_errors(
    bundle: Path, tiny_checkpoint: Path, tmp_path: Path, arguments: list[str], fact: str
):
    image = tmp_path / "image.jpg"
    image.write_bytes(b"none")
    paths = {"BUNDLE": bundle, "CHECKPOINT": tiny_checkpoint, "IMAGE": image}
    result = run(*(paths.get(word, word) for word in arguments))
    assert result.exit_code != 0
    assert fact in f"{result.output} {result.exception}"


def test_torchvision_needs_the_same_architecture(tiny_checkpoint: Path):
    checkpoint = load_checkpoint(tiny_checkpoint)
    weights = {name: w for name, w in checkpoint.weights.items() if "mask_head" not in name}
    with pytest.raises(CheckpointError, match="torchvision has no model"):
        torchvision_from_checkpoint(replace(checkpoint, weights=weights), "fp32")


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_torch_models_support_every_precision(tiny_checkpoint: Path, precision: Precision):
    runner = runner_from_checkpoint(load_checkpoint(tiny_checkpoint), precision)
    (run,) = runner.batch_runs(np.zeros((1, 3, 96, 160), np.uint8))
    run.run()
    assert (run.engine, run.data) == ("eager", "device")


def test_peer_computes_the_same_detections(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    checkpoint = load_checkpoint(tiny_checkpoint)
    bucket = checkpoint.buckets[0]
    images = torch.from_numpy(batch_from_encoded([noise_jpeg(bucket)], bucket, 2))
    ours, theirs = (
        make(checkpoint, "fp32") for make in (runner_from_checkpoint, torchvision_from_checkpoint)
    )
    images = images.to(ours.device)
    with torch.inference_mode():
        outputs = ours.model(*ours.make_inputs(images))
        expected = theirs.model(*theirs.make_inputs(images))
    for i, peer in enumerate(expected):
        count = int(outputs.num_detections[i])
        assert count == len(peer["boxes"]) > 0
        assert torch.allclose(outputs.boxes[i, :count], peer["boxes"], atol=1e-2)
        assert torch.allclose(outputs.scores[i, :count], peer["scores"], atol=1e-4)
        assert torch.equal(outputs.labels[i, :count], peer["labels"])


def test_batches_repeat_the_images():
    small, large = noise_jpeg(ShapeBucket(32, 32)), noise_jpeg(ShapeBucket(64, 96))
    batch = batch_from_encoded([small, large], ShapeBucket(64, 96), 3)
    assert batch.shape == (3, 3, 64, 96)
    assert (batch[0] == batch[2]).all()
    assert (batch[0] != batch[1]).any()
