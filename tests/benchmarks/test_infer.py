"""Inference benchmarks of the tiny model, through the command that users type."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from maskrcnn_trt.benchmarks.commands import bench
from maskrcnn_trt.benchmarks.images import batch_from_encoded, noise_jpeg
from maskrcnn_trt.benchmarks.torch_engines import (
    engine_from_checkpoint,
    torchvision_from_checkpoint,
)
from maskrcnn_trt.model.checkpoint import load_checkpoint
from maskrcnn_trt.model.spec import ShapeBucket

QUICK = ("--seconds", "0.05", "--warmup", "1")


def test_bundle_checkpoint_and_peer_in_one_run(bundle: Path, tiny_checkpoint: Path, tmp_path: Path):
    record = tmp_path / "new" / "record.json"
    models = (str(bundle), str(tiny_checkpoint))
    options = ("--batch", "1", "--batch", "3", "--peer", "torchvision", "--json", str(record))
    result = CliRunner().invoke(bench, ["infer", *models, *options, *QUICK])
    assert result.exit_code == 0, result.output
    found = json.loads(record.read_text())
    assert [(r["engine"], r["batch"]) for r in found["results"]] == [
        ("onnxruntime", 1),
        ("onnxruntime", 3),
        ("torch", 1),
        ("torch", 3),
        ("torchvision", 1),
        ("torchvision", 3),
    ]
    for r in found["results"]:
        assert r["iterations"] >= 1
        mean_seconds = r["latency"]["mean"] / 1000
        assert r["images_per_second"] == pytest.approx(r["batch"] / mean_seconds)
        assert 0 < r["latency"]["p50"] <= r["latency"]["p90"] <= r["latency"]["p99"]
        assert r["peak_memory_mib"] > 10
        assert r["bucket"] == "96x160"
    assert found["machine"]["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert "torchvision" in result.output


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
    ],
)
def test_what_cannot_be_measured_is_named(bundle: Path, arguments: list[str], sentence: str):
    result = CliRunner().invoke(bench, ["infer", str(bundle), *arguments, *QUICK])
    assert result.exit_code != 0
    assert sentence in f"{result.output} {result.exception}"


def test_peer_computes_the_same_detections(tiny_checkpoint: Path):
    checkpoint = load_checkpoint(tiny_checkpoint)
    bucket = checkpoint.buckets[0]
    images = torch.from_numpy(batch_from_encoded([noise_jpeg(bucket)], bucket, 2))
    ours, theirs = (
        make(checkpoint, "fp32") for make in (engine_from_checkpoint, torchvision_from_checkpoint)
    )
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
