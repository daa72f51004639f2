"""The verb `quickstart`: the whole path once, from drawn pictures to a measured server."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from .benchmarks.infer import InferResult
    from .benchmarks.serve_results import ServeResult
    from .serving.detections import Detections
    from .training.config import TrainConfig

_MARKER = ".quickstart"
_PICTURE_SIZE = (192, 128)
_CLASSES = ("circle", "square", "triangle", "star", "ring")
_TRAIN_PER_VAL = 15
_BENCH_SECONDS = 4.0
_BENCH_IMAGES = 32
_CLIENTS = (1, 8)
"""That measure the server, at once."""
_STEPS = 7
_SHOWN_METRICS = [
    f"{kind}/{metric}" for kind in ("bbox", "segm") for metric in ("AP", "AP50", "AP75", "AR100")
]
_OUTPUTS = {
    "metrics.json": "metrics",
    "loss.png": "loss curve",
    "predictions.png": "predictions beside ground truth",
    "bundle": "bundle with its manifest.json",
    "train": "checkpoints and log",
    "bench": "benchmark records",
}


class QuickstartError(Exception):
    """The path broke, or its output would overwrite something else."""


@click.command()
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs/quickstart"), show_default=True,
    help="Folder of everything that is made; an earlier quickstart there is replaced.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--images", type=click.IntRange(8), default=3000, show_default=True, help="Training images."
)
@click.option(
    "--iterations", type=click.IntRange(1), help="Training steps; those of the preset if left out."
)
def quickstart(output: Path, seed: int, images: int, iterations: int | None) -> None:
    """Draw a data set, train, export, serve and measure a small model.

    Takes minutes on two CPU cores and needs neither a GPU nor the network.
    """
    from .export.bundle import bundle_from_checkpoint
    from .quickstart_figures import plot_losses
    from .training.run import run_training

    start, console = time.monotonic(), Console(markup=False, emoji=False)
    _claim(output)
    with _step(console, 1, "drawing a data set", output / "data"):
        config = _drawn_config(output, seed, images, iterations)
    with _step(console, 2, "training from scratch and evaluating", output / "train"):
        checkpoint = run_training(config)
        plot_losses(output / "train" / "metrics.jsonl", output / "loss.png")
    bundle = output / "bundle"
    with _step(console, 3, "exporting to ONNX", bundle):
        bundle_from_checkpoint(checkpoint, bundle, report=console.print)
    with _step(console, 4, "verifying the bundle against the checkpoint"):
        _verify(console, bundle, checkpoint, output / "data" / "val")
    with _step(console, 5, "serving the bundle and asking it through the client"):
        _serve_and_draw(console, bundle, config, output / "predictions.png")
    with _step(console, 6, "measuring the engine"):
        engine = _measure_engine(bundle)
    with _step(console, 7, "measuring the server"):
        server = _measure_server(bundle, output / "data" / "val")
    metrics = _metrics_from(checkpoint, engine, server)
    (output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    console.print(_summary(metrics, time.monotonic() - start))
    for name, what in _OUTPUTS.items():
        click.echo(f"{what}: {output / name}")


@contextmanager
def _step(console: Console, number: int, title: str, made: Path | None = None) -> Iterator[None]:
    console.rule(f"{number}/{_STEPS} {title}", align="left")
    start = time.monotonic()
    yield
    where = f", in {made}" if made else ""
    console.print(f"done in {time.monotonic() - start:.0f} s{where}", soft_wrap=True)


def _claim(output: Path) -> None:
    """Empty the folder if an earlier quickstart made it."""
    if output.exists() and any(output.iterdir()):
        if not (output / _MARKER).exists():
            raise QuickstartError(
                f"{output} holds something else than a quickstart; choose another folder with -o"
            )
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    (output / _MARKER).touch()


def _drawn_config(output: Path, seed: int, images: int, iterations: int | None) -> "TrainConfig":
    """Draw the data; the training configuration for it."""
    from .training.config import load_config
    from .training.data.synthetic import SyntheticConfig, draw_dataset

    data, (width, height) = output / "data", _PICTURE_SIZE
    drawing = SyntheticConfig(
        train=images,
        val=max(16, images // _TRAIN_PER_VAL),
        width=width,
        height=height,
        seed=seed,
        classes=_CLASSES,
    )
    draw_dataset(data, drawing, workers=os.cpu_count() or 1)
    overrides = [f"output_dir={output / 'train'}", f"seed={seed}"]
    for split in ("train", "val"):
        overrides.append(f"data.{split}.images={data / split}")
        overrides.append(f"data.{split}.annotations={data / 'annotations' / f'{split}.json'}")
    if iterations is not None:
        overrides.append(f"solver.max_iterations={iterations}")
    return load_config("quick", overrides)


def _verify(console: Console, bundle: Path, checkpoint: Path, pictures: Path) -> None:
    from .export.commands import table_of
    from .export.verify import verify_bundle
    from .model.checkpoint import load_checkpoint
    from .model.manifest import read_manifest

    comparisons = verify_bundle(
        bundle,
        read_manifest(bundle),
        load_checkpoint(checkpoint),
        sorted(pictures.iterdir())[:16],
    )
    console.print(table_of(comparisons))
    if not all(comparison.passed for comparison in comparisons):
        raise QuickstartError("the bundle does not compute what the checkpoint computes")


def _serve_and_draw(console: Console, bundle: Path, config: "TrainConfig", picture: Path) -> None:
    """Send validation images to a real server, compare with `predict`, draw some answers."""
    from .benchmarks.server_process import running_server
    from .quickstart_figures import draw_comparison
    from .serving.client import DetectorClient
    from .serving.detections import Detections
    from .serving.offline.predictor import Predictor
    from .training.data.coco import CocoDataset

    assert config.data.val is not None
    dataset = CocoDataset(config.data.val)
    contents = [record.path.read_bytes() for record in dataset.records[:64]]
    with running_server(bundle) as server, DetectorClient(server.address) as client:
        answers = list(client.detect_many(contents))
    predictor = Predictor(bundle)
    found = [answer for answer in answers if isinstance(answer, Detections)]
    equal = len(found) == len(contents) and all(
        _are_equal(answer, predictor.detect(content))
        for answer, content in zip(found, contents, strict=True)
    )
    predictor.close()
    if not equal:
        raise QuickstartError("the server's answers differ from `maskrcnn predict`'s")
    count = sum(map(len, found))
    console.print(f"{count} detections in {len(found)} images, equal to those of `predict`")
    draw_comparison(dataset, found, picture)


def _are_equal(answer: "Detections", prediction: "Detections") -> bool:
    return (
        (answer.boxes == prediction.boxes).all()
        and (answer.scores == prediction.scores).all()
        and (answer.labels == prediction.labels).all()
        and answer.rles == prediction.rles
    )


def _measure_engine(bundle: Path) -> "list[InferResult]":
    from .benchmarks.infer import InferSettings, measure_models
    from .benchmarks.report import Report, infer_table, show

    results = measure_models([bundle], InferSettings(batches=(1, 8), seconds=_BENCH_SECONDS))
    show(Report(results), infer_table(results), bundle.parent / "bench" / "infer.json")
    return results


def _measure_server(bundle: Path, pictures: Path) -> "list[ServeResult]":
    from .benchmarks.report import Report, show
    from .benchmarks.serve import ServeSettings, measure_bundle
    from .benchmarks.serve_report import serve_table

    images = [path.read_bytes() for path in sorted(pictures.iterdir())[:_BENCH_IMAGES]]
    settings = ServeSettings(concurrencies=_CLIENTS, images=images, seconds=_BENCH_SECONDS)
    results = list(measure_bundle(bundle, settings))
    show(Report(results), serve_table(results), bundle.parent / "bench" / "serve.json")
    return results


def _metrics_from(
    checkpoint: Path, engine: "list[InferResult]", server: "list[ServeResult]"
) -> dict[str, float]:
    """Everything that was measured, under one name each."""
    from .model.checkpoint import load_checkpoint

    metrics = dict(load_checkpoint(checkpoint).metrics)
    named: list[tuple[str, InferResult | ServeResult]] = [
        *((f"infer/batch_{r.batch}", r) for r in engine),
        *((f"serve/clients_{n}", r) for n, r in zip(_CLIENTS, server, strict=True)),
    ]
    for name, result in named:
        metrics[f"{name}/images_per_second"] = result.images_per_second
        for percentile in ("p50", "p90", "p99"):
            metrics[f"{name}/{percentile}_ms"] = getattr(result.latency, percentile)
    return metrics


def _summary(metrics: dict[str, float], seconds: float) -> Table:
    table = Table("", "", title=f"quickstart, {seconds:.0f} s", show_header=False)
    for name, value in metrics.items():
        if name in _SHOWN_METRICS:
            table.add_row(name, f"{value:.3f}")
        elif name.startswith(("infer/", "serve/")):
            table.add_row(name, f"{value:.1f}")
    return table
