"""`bench train` of a tiny model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from tiny_run import write_config

from maskrcnn_trt.benchmarks.common.gpu_time import IDLE, KERNEL_KINDS, NCCL
from maskrcnn_trt.benchmarks.common.machine import MatmulRoofline
from maskrcnn_trt.benchmarks.common.record import write_record
from maskrcnn_trt.benchmarks.common.timing import Latency
from maskrcnn_trt.benchmarks.common.torchvision_baseline import TorchvisionTrainer
from maskrcnn_trt.benchmarks.train import train
from maskrcnn_trt.benchmarks.train.measure import (
    GpuSteps,
    TrainEngine,
    TrainPrecision,
    TrainResult,
    TrainSettings,
    measure_rank,
)
from maskrcnn_trt.benchmarks.train.record import train_record
from maskrcnn_trt.model.checkpoint import load_checkpoint
from maskrcnn_trt.training.config import ConfigError, TrainConfig, load_config
from maskrcnn_trt.training.data.coco.dataset import CocoDataset, DataError
from maskrcnn_trt.training.data.loading.batches import Batch
from maskrcnn_trt.training.data.loading.loader import train_loader
from maskrcnn_trt.training.data.synthetic.dataset import SyntheticConfig, draw_dataset
from maskrcnn_trt.training.distributed import Worker
from maskrcnn_trt.training.reporting import DivergenceError
from maskrcnn_trt.training.run import run_training
from maskrcnn_trt.training.trainer import GpuMemoryError, Trainer

SETTINGS = TrainSettings(precisions=("fp32",), iterations=1, warmup=0)
CHANGES = """
base: tiny.yaml
log_period: 1
model: {roi: {mask_crop_size: 28}}
solver: {images_per_batch: 2, max_iterations: 3, steps: []}
"""


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench train")
    draw_dataset(folder, SyntheticConfig(train=8, val=1, width=96, height=64))
    write_config(folder)
    path = folder / "changed.yaml"
    path.write_text(CHANGES)
    return path


def make_result(engine: TrainEngine, precision: TrainPrecision, seed: int = 0) -> TrainResult:
    losses = [[5 / step, 0, 0, 0, 1] for step in range(6, 26)]
    losses[-2:] = [[0.25, 0, 0, 0, 1], [0.2, 0, 0, 0, 1]]
    latency = Latency(1, 1, 1, 1, 1, 1)
    return TrainResult(
        engine, precision, seed, "cpu", 1, 2, 20, 1, 1.0, latency, 0.1, 1.0, None, 1.0, losses,
        {"bbox/AP": 0.2 + 0.1 * seed, "segm/AP": 0.1},
    )  # fmt: skip


def first_batch(config: TrainConfig) -> Batch:
    dataset = CocoDataset(config.data.train)
    return next(iter(train_loader(dataset, config)))


@pytest.mark.slow
def test_losses_are_those_of_a_training_run(config_path: Path, tmp_path: Path):
    lengths = ["--iterations", "3", "--warmup", "1", "--output", str(tmp_path / "new")]
    peers = ["--peer", "eager", "--peer", "torchvision"]
    options = ["--precision", "fp32", *peers, "--evaluate", *lengths]
    result = CliRunner().invoke(train, [str(config_path), "seed=5", *options])
    assert result.exit_code == 0, result.output
    (record,) = (tmp_path / "new").glob("train-*.json")
    own, eager, peer = json.loads(record.read_text())["results"]
    assert (own["engine"], eager["engine"], peer["engine"]) == ("this", "eager", "torchvision")
    # Nothing is compiled on a CPU, so both are the same model.
    assert eager["losses"] == own["losses"] != peer["losses"]
    for run in (own, eager, peer):
        assert torch.tensor(run["losses"]).shape == (3, 5)
        assert torch.tensor(run["losses"]).isfinite().all()
        assert run["images_per_second"] == pytest.approx(2 / (run["latency"]["mean"] / 1000))
        assert 0 < run["latency"]["p50"] <= run["latency"]["p90"] <= run["latency"]["p99"]
        assert 0 < run["data_share"] < 1
        assert run["peak_memory_mib"] > 10
        assert -1 <= run["metrics"]["segm/AP"] <= 1

    changes = ["seed=5", "evaluation.skip_test=false", f"output_dir={tmp_path / 'run'}"]
    checkpoint = load_checkpoint(run_training(load_config(str(config_path), changes)))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    logged = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    assert [sum(row) for row in own["losses"]] == pytest.approx(logged, rel=1e-4)
    assert own["metrics"] == pytest.approx(checkpoint.metrics)


@pytest.mark.parametrize(("key", "error"), [("val", ConfigError), ("extra_train", DataError)])
def test_classes_that_training_lacks_are_an_error(
    config_path: Path, tmp_path: Path, key: str, error: type[Exception]
) -> None:
    folder = config_path.parent
    content = json.loads((folder / "annotations/val.json").read_text())
    content["categories"].append({"id": 99, "name": "new"})
    annotations = tmp_path / "new.json"
    annotations.write_text(json.dumps(content))
    entry = f"{{images: {folder / 'val'}, annotations: {annotations}}}"
    config = load_config(
        str(config_path), [f"data.{key}={entry if key == 'val' else f'[{entry}]'}"]
    )
    with pytest.raises(error, match="'new'"):
        measure_rank(config, "this", replace(SETTINGS, with_average_precision=True), {})


@pytest.mark.slow
def test_two_processes_report_one_step(config_path: Path, tmp_path: Path):
    """The result is kept although the next run fails, because fp16 needs a GPU."""
    lengths = ["--iterations", "2", "--warmup", "1", "--output", str(tmp_path)]
    precisions = ["--precision", "fp32", "--precision", "fp16"]
    result = CliRunner().invoke(train, [str(config_path), "processes=2", *precisions, *lengths])
    assert isinstance(result.exception, ConfigError)
    (record,) = tmp_path.glob("train-*.json")
    (run,) = json.loads(record.read_text())["results"]
    assert (run["processes"], run["batch"]) == (2, 2)
    assert torch.tensor(run["losses"]).shape == (2, 5)


@pytest.mark.parametrize(
    ("error", "expected", "facts"),
    [
        (GpuMemoryError(), ConfigError, r"GPU memory at solver\.images_per_batch=2"),
        (DivergenceError("the scale fell"), DivergenceError, "'this' with seed=7: the scale fell"),
    ],
)
def test_the_error_of_a_step_describes_the_run(
    config_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    expected: type[Exception],
    facts: str,
):
    def step(*_: object) -> None:
        raise error

    monkeypatch.setattr(Trainer, "step", step)
    config = load_config(str(config_path), ["seed=7"])
    with pytest.raises(expected, match=facts):
        measure_rank(config, "this", SETTINGS, {})


def test_torchvision_is_not_trained_by_two_processes(config_path: Path):
    result = CliRunner().invoke(train, [str(config_path), "processes=2", "--peer", "torchvision"])
    assert isinstance(result.exception, ConfigError)
    assert "--peer" in str(result.exception)


def test_torchvision_is_not_trained_with_other_conventions(config_path: Path):
    config = load_config(str(config_path), ["model.anchors.convention=detectron2"])
    with pytest.raises(ConfigError, match="--peer"):
        TorchvisionTrainer(config, Worker(0, 1, torch.device("cpu")))


def test_devices_that_contradict_the_processes(config_path: Path):
    result = CliRunner().invoke(train, [str(config_path), "processes=3", "device=0,1"])
    assert isinstance(result.exception, ConfigError)


def test_more_gpus_than_there_are(config_path: Path):
    result = CliRunner().invoke(train, [str(config_path), "--gpus", "100"])
    assert result.exit_code == 2
    assert "--gpus 100" in result.output


def test_page_and_plots(tmp_path: Path):
    results = [make_result(e, p) for p in ("fp32", "bf16") for e in ("this", "torchvision")]
    # The mean of the last tenth of the iterations.
    assert results[0].final_loss == pytest.approx((0.25 + 0.2) / 2 + 1)
    page = write_record(train_record(results), tmp_path)
    rows = [line.split(" | ") for line in page.read_text().splitlines()]
    engines = [row[1] for row in rows if row[0] in ("| fp32", "| bf16")]
    # The table of the runs, and that of the average precision.
    assert engines == ["this", "torchvision"] * 4
    with Image.open(page.with_suffix(".png")) as image:
        assert min(image.size) > 500
        assert len(image.convert("RGB").getcolors(1 << 20)) > 10


def test_page_of_a_gpu(tmp_path: Path):
    """The roofline of two GPUs, and the times of a step by kind of kernel."""
    kinds = dict.fromkeys((*KERNEL_KINDS, IDLE), 0.0) | {
        "convolutions": 12.5,
        NCCL: 0.5,
        IDLE: 1.25,
    }
    gpu = GpuSteps(4.0, 770, 0.8, kinds)
    own = replace(make_result("this", "fp16"), device="cuda", processes=2, gpu=gpu, metrics={})
    # 100 images/s on each GPU, and 1 image/s measured
    roofline = MatmulRoofline("fp16", 150.0, flops_per_image=1_500_000_000_000)
    text = write_record(train_record([own], [roofline]), tmp_path).read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| fp16")]
    assert rows[0][5] == "0.5%"
    assert rows[0][12:14] == ["0.80", "0.50"]
    assert {"12.50", "1.25"} <= {cell.removesuffix(" |") for cell in rows[1]}
    assert "fp16 150 TFLOP/s" in text


def test_average_precision_over_seeds(tmp_path: Path):
    results = [make_result("this", "fp32", seed) for seed in range(3)]
    page = write_record(train_record(results), tmp_path)
    # Box AP 0.2, 0.3, 0.4.
    assert "| fp32 | this | 3 | 0.3000 ± 0.1000 | 0.1000 ± 0.0000 |" in page.read_text()


def test_torchvision_starts_with_the_same_losses(config_path: Path):
    """All anchors and RoIs of one image are sampled, so that the losses are deterministic."""
    everything = [
        "solver.images_per_batch=1",
        "model.roi.mask_crop_size=null",
        "model.rpn.sampling.batch_size_per_image=100000",
        "model.rpn.sampling.positive_fraction=1.0",
        "model.roi.sampling.batch_size_per_image=100000",
        "model.roi.sampling.positive_fraction=1.0",
    ]
    config = load_config(str(config_path), everything)
    own = Worker(0, 1, torch.device("cpu"))
    batch = first_batch(config)
    losses, peers = (make(config, own).step([batch]) for make in (Trainer, TorchvisionTrainer))
    assert torch.allclose(losses, peers, rtol=1e-3, atol=1e-4), (losses, peers)


def test_torchvision_trainer_learns_and_accumulates(config_path: Path):
    own, settings = Worker(0, 1, torch.device("cpu")), ["model.roi.mask_crop_size=null"]
    config = load_config(str(config_path), [*settings, "solver.clip_gradient_norm=1.0"])
    trainer = TorchvisionTrainer(config, own)
    batch = first_batch(config)
    losses = [float(trainer.step([batch, batch]).sum()) for _ in range(6)]
    assert losses[-1] < losses[0]
    config = load_config(str(config_path), [*settings, "model.backbone.features=c4"])
    with pytest.raises(ConfigError, match="torchvision has no model"):
        TorchvisionTrainer(config, own)


def test_missing_data_and_too_long_a_warmup_are_errors(config_path: Path):
    config = load_config(str(config_path), ["data.train.images=nowhere"])
    with pytest.raises(DataError, match="nowhere"):
        measure_rank(config, "this", SETTINGS, {})
    options = ["--warmup", "3", "--iterations", "3"]
    result = CliRunner().invoke(train, [str(config_path), *options])
    assert result.exit_code == 2
    assert "--warmup 3" in result.output
