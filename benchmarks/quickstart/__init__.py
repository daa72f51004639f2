"""`maskrcnn quickstart`: data set, training, export, serving and benchmarks of a small model."""

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from ...model.config.option_types import OUTPUT_FOLDER
from ...model.plurals import counted

if TYPE_CHECKING:
    from ...model.bundle.manifest import Precision
    from ...serving.detections import Detections
    from ...training.config import TrainConfig
    from ...training.data.synthetic.dataset import SyntheticConfig
    from ..infer.measure import InferResult
    from ..serve.results import ServeResult

# Empty file in an output folder, which shows that a quickstart created the folder.
_MARKER = ".quickstart"
# Width and height of a synthetic image.
_IMAGE_SIZE = (192, 128)
_CLASSES = ("circle", "square", "triangle", "star", "ring")
_TRAIN_PER_VAL = 15
_BENCH_SECONDS = 2.0
# Number of validation images with which the server is measured.
_BENCH_IMAGES = 32
# Numbers of concurrent clients with which the server is measured.
_CLIENTS = (1, 8)
# Number of validation images for which predictions are drawn during training.
_DRAWN_IMAGES = 4
_SHOWN_METRICS = [
    f"{kind}/{metric}" for kind in ("bbox", "segm") for metric in ("AP", "AP50", "AP75", "AR100")
]
_OUTPUTS = {
    "metrics.json": "metrics",
    "train/curves.png": "training curves",
    "progress.png": "predictions for the same images during training, the earliest on top",
    "predictions.png": "predictions beside ground truth",
    "bundle": "bundle with its manifest.json",
    "train": "checkpoints and log",
    "bench": "benchmark records",
}


class QuickstartError(Exception):
    """A step gave a wrong result, or the output folder holds files that no quickstart wrote."""


@click.command()
@click.option(
    "-o", "--output", type=OUTPUT_FOLDER,
    default=Path("runs/quickstart"), show_default=True,
    help="Output folder. It is emptied first if an earlier quickstart created it.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--images",
    type=click.IntRange(8),
    default=3000,
    show_default=True,
    help="Number of training images.",
)
@click.option(
    "--iterations",
    type=click.IntRange(1),
    help="Number of training steps. Default: that of the preset `quick`.",
)
def quickstart(output: Path, seed: int, images: int, iterations: int | None) -> None:
    """Generate a data set, and train, export, serve and measure a small model on it.

    This takes minutes on two CPU cores, and needs neither a GPU nor the network.
    """
    import torch

    from ...export.bundle import bundle_from_checkpoint
    from ...export.output_folder import copy_samples, sample_images
    from ...training.curves import draw_curves
    from ...training.data.synthetic.dataset import draw_dataset
    from ...training.evaluation.validation import PROGRESS_FILE
    from ...training.run import run_training
    from .report import next_commands, plan_steps, plan_table, step

    start, console = time.monotonic(), Console(markup=False, emoji=False)
    _prepare_folder(output)
    synthetic, config = _configure(output, seed, images, iterations)
    steps = plan_steps(synthetic.train + synthetic.val, config)
    console.print(plan_table(steps))
    with step(console, steps, 1, output / "data"):
        draw_dataset(output / "data", synthetic, workers=None)
    with step(console, steps, 2, output / "train", has_progress=True):
        # The training writes PROGRESS_FILE after 10, 30 and 100 % of its steps. Link to it now, so
        # that the file can be opened by the link while the training runs.
        (output / PROGRESS_FILE).symlink_to(f"train/{PROGRESS_FILE}")
        checkpoint = run_training(config)
        draw_curves(output / "train")
    bundle = output / "bundle"
    with step(console, steps, 3, bundle):
        # Without a GPU, omit fp16: it would not be used, and its export takes seconds.
        precisions: list[Precision] = ["fp32", "fp16"] if torch.cuda.is_available() else ["fp32"]
        bundle_from_checkpoint(checkpoint, bundle, precisions=precisions, report=console.print)
    with step(console, steps, 4):
        _verify(console, bundle, checkpoint, output / "data" / "val")
    copy_samples(sample_images(sorted((output / "data" / "val").iterdir())), bundle)
    with step(console, steps, 5):
        _serve_and_compare(console, bundle, config, output / "predictions.png")
    with step(console, steps, 6):
        infer_results = _measure_inference(bundle)
    with step(console, steps, 7):
        serve_results = _measure_server(bundle, output / "data" / "val")
    metrics = _metrics_from(checkpoint, infer_results, serve_results)
    (output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    console.print(_summary(metrics, time.monotonic() - start))
    for name, description in _OUTPUTS.items():
        click.echo(f"{description}: {output / name}")
    for purpose, command in next_commands(bundle).items():
        click.echo(f"\n{purpose}:\n  {command}")


def _prepare_folder(output: Path) -> None:
    """Create the output folder, or empty it if an earlier quickstart created it.

    A quickstart leaves a marker file in its output folder.

    Raises:
        QuickstartError: the folder holds files, but not the marker file.
    """
    output.mkdir(parents=True, exist_ok=True)
    older = list(output.iterdir())
    if older and output / _MARKER not in older:
        raise QuickstartError(
            f"{output} holds files that no quickstart wrote; choose another folder with -o"
        )
    (output / _MARKER).touch()
    # The folder itself stays, because it can be a link, a mount point or the current folder.
    for path in older:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != _MARKER:
            path.unlink()


def _configure(
    output: Path, seed: int, images: int, iterations: int | None
) -> "tuple[SyntheticConfig, TrainConfig]":
    """Return the configurations of a quickstart's data set and training.

    Args:
        output: output folder of the quickstart.
        seed: random seed of the data set and of the training.
        images: number of training images.
        iterations: number of training iterations. None: use the preset's number.
    """
    from ...training.config import load_config
    from ...training.data.synthetic.dataset import SyntheticConfig

    data, (width, height) = output / "data", _IMAGE_SIZE
    synthetic = SyntheticConfig(
        train=images,
        val=max(16, images // _TRAIN_PER_VAL),
        width=width,
        height=height,
        seed=seed,
        classes=_CLASSES,
    )
    paths = {"output_dir": output / "train"}
    for split in ("train", "val"):
        paths[f"data.{split}.images"] = data / split
        paths[f"data.{split}.annotations"] = data / "annotations" / f"{split}.json"
    # The values of overrides are YAML, in which a path in quotes can have any characters.
    overrides = [f"{key}={json.dumps(str(path))}" for key, path in paths.items()]
    overrides += [f"seed={seed}", f"evaluation.draw_images={_DRAWN_IMAGES}"]
    if iterations is not None:
        overrides.append(f"solver.max_iterations={iterations}")
    return synthetic, load_config("quick", overrides)


def _verify(console: Console, bundle: Path, checkpoint: Path, images: Path) -> None:
    from ...export.commands import table_of
    from ...export.verify import verify_bundle
    from ...model.bundle.manifest import read_manifest
    from ...model.checkpoint import load_checkpoint

    paths = sorted(images.iterdir())[:16]
    comparisons = verify_bundle(bundle, read_manifest(bundle), load_checkpoint(checkpoint), paths)
    console.print(table_of(comparisons))
    if not all(comparison.passed for comparison in comparisons):
        raise QuickstartError(
            "the outputs of the bundle differ from those of the checkpoint by more than the "
            "bundle's precision allows; the table above shows the differences"
        )


def _serve_and_compare(console: Console, bundle: Path, config: "TrainConfig", image: Path) -> None:
    """Check that a server's detections equal those of offline prediction.

    The first validation images are sent to a server of the bundle. From these images, the ones with
    the most annotated objects are drawn into the PNG file `image`, ground truth beside detections.

    Raises:
        QuickstartError: a request failed, or the detections differ.
    """
    from ...serving.client import DetectorClient
    from ...serving.detections import Detections
    from ...serving.offline import Detector
    from ...training.data.coco.dataset import CocoDataset
    from ..serve.measure import running_server
    from .report import draw_comparison

    assert config.data.val is not None
    dataset = CocoDataset(config.data.val)
    contents = [record.path.read_bytes() for record in dataset.records[:64]]
    with running_server(bundle) as server, DetectorClient(server.address) as client:
        outcomes = list(client.detect_many(contents))
    served = [outcome for outcome in outcomes if isinstance(outcome, Detections)]
    failed = [outcome for outcome in outcomes if not isinstance(outcome, Detections)]
    if failed:
        raise QuickstartError(
            f"{len(failed)} of {len(contents)} requests to the server failed, the first because: "
            f"{failed[0]}"
        )
    predictor = Detector(bundle)
    equal = all(
        _are_equal(detections, predictor.detect(content))
        for detections, content in zip(served, contents, strict=True)
    )
    predictor.close()
    if not equal:
        raise QuickstartError("the server's detections differ from those of `maskrcnn predict`")
    found, images = counted(sum(map(len, served)), "detection"), counted(len(served), "image")
    console.print(f"{found} in {images}, equal to those of `predict`")
    draw_comparison(dataset, served, image)


def _are_equal(first: "Detections", second: "Detections") -> bool:
    return (
        (first.boxes == second.boxes).all()
        and (first.scores == second.scores).all()
        and (first.labels == second.labels).all()
        and first.rles == second.rles
    )


def _measure_inference(bundle: Path) -> "list[InferResult]":
    from ..common.record import publish
    from ..infer.measure import InferSettings, measure_models
    from ..infer.record import infer_record

    results = measure_models([bundle], InferSettings(batches=(1, 8), seconds=_BENCH_SECONDS))
    publish(infer_record(results), bundle.parent / "bench" / "infer.json")
    return results


def _measure_server(bundle: Path, images: Path) -> "list[ServeResult]":
    from ..common.record import publish
    from ..serve.measure import ServeSettings, measure_bundle
    from ..serve.record import serve_record

    contents = [path.read_bytes() for path in sorted(images.iterdir())[:_BENCH_IMAGES]]
    settings = ServeSettings(concurrencies=_CLIENTS, images=contents, seconds=_BENCH_SECONDS)
    results = list(measure_bundle(bundle, settings))
    record = serve_record(results, f"{len(contents)} validation images")
    publish(record, bundle.parent / "bench" / "serve.json")
    return results


def _metrics_from(
    checkpoint: Path, infer_results: "list[InferResult]", serve_results: "list[ServeResult]"
) -> dict[str, float]:
    """Return one dict with a checkpoint's COCO metrics and the results of two benchmarks.

    The results of the inference benchmark have keys such as `infer/batch_1/images_per_second`. The
    results of the serving benchmark have keys such as `serve/clients_1/p50_ms`.
    """
    from ...model.checkpoint import load_checkpoint

    metrics = dict(load_checkpoint(checkpoint).metrics)
    named: list[tuple[str, InferResult | ServeResult]] = [
        *((f"infer/batch_{r.batch}", r) for r in infer_results),
        *((f"serve/clients_{n}", r) for n, r in zip(_CLIENTS, serve_results, strict=True)),
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
