"""The verbs of `maskrcnn bench`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from ..export.commands import BucketType
from ..model.manifest import Precision
from ..model.spec import ShapeBucket
from ..serving.config import BackendName
from .bulk_commands import bulk
from .infer import Peer
from .options import images_option, json_option, output_option, read_images, seconds_option
from .serve_commands import serve
from .train import TrainPrecision

if TYPE_CHECKING:
    from .infer import InferSettings
    from .report import InferReport


@click.group()
def bench() -> None:
    """Measure throughput and latency."""


bench.add_command(bulk)
bench.add_command(serve)


@bench.command(context_settings={"show_default": True})
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--batch", "batches", multiple=True, type=click.IntRange(min=1), default=(1, 8))
@click.option(
    "--precision", "precisions", multiple=True, type=click.Choice(get_args(Precision)),
    default=("fp32",), help="May be given several times; time by stage is taken in the first.",
)  # fmt: skip
@click.option(
    "--backend", type=click.Choice(get_args(BackendName)), default="auto",
    help="What computes bundles; auto takes the fastest that runs here.",
)  # fmt: skip
@click.option("--shape", "bucket", type=BucketType(), help="Input size.")
@click.option(
    "--peer", "peers", multiple=True, type=click.Choice(get_args(Peer)),
    help="Measure it too; torchvision takes the weights of a checkpoint.",
)  # fmt: skip
@images_option("noise")
@seconds_option
@click.option("--warmup", type=click.IntRange(min=0), default=3, help="Batches not counted.")
@json_option
@output_option("a page, time by stage included, a picture")
def infer(
    models: tuple[Path, ...],
    batches: tuple[int, ...],
    precisions: tuple[Precision, ...],
    backend: BackendName,
    bucket: ShapeBucket | None,
    peers: tuple[Peer, ...],
    sources: tuple[Path, ...],
    seconds: float,
    warmup: int,
    json_path: Path | None,
    output: Path | None,
) -> None:
    """Measure models one after the other, precision after precision, batch after batch.

    Each is a bundle, which --backend runs, or a checkpoint, which torch runs. All get the same
    input; its size is the first that the first model has, unless --shape says otherwise. What
    cannot be measured is named, and the rest goes on.
    """
    from .infer import InferSettings
    from .report import infer_table, show

    if "torchvision" in peers and not any(model.is_file() for model in models):
        raise click.UsageError("--peer torchvision needs the weights of a checkpoint among MODELS")
    if "onnxruntime" in peers and not any(model.is_dir() for model in models):
        raise click.UsageError("--peer onnxruntime needs a bundle among MODELS")
    settings = InferSettings(
        batches=batches,
        precisions=precisions,
        backend=backend,
        peers=peers,
        bucket=bucket,
        images=read_images(sources),
        seconds=seconds,
        warmup=warmup,
        with_stages=output is not None,
    )
    report = _infer_report(models, settings)
    show(report, infer_table(report.results, report.failures, report.floors), json_path)
    if output is not None:
        from .infer_record import write_record

        click.echo(f"the record is {write_record(report, output)}")


def _infer_report(models: Sequence[Path], settings: "InferSettings") -> "InferReport":
    """Measure, saying every figure when it comes."""
    from .infer import Answer, InferFailure, measure_floors, measure_models
    from .machine import describe_machine
    from .report import InferReport, answer_sentence
    from .stages import StageTimes

    answers: list[Answer] = []

    def take(answer: Answer) -> None:
        answers.append(answer)
        click.echo(answer_sentence(answer), err=True)

    machine = describe_machine()
    floors = measure_floors(models, settings) if machine.gpus else []
    results = measure_models(models, settings, take)
    failures = [answer for answer in answers if isinstance(answer, InferFailure)]
    stages = [answer for answer in answers if isinstance(answer, StageTimes)]
    if not results:
        raise click.ClickException(failures[0].reason)
    return InferReport(results, machine=machine, failures=failures, floors=floors, stages=stages)


@bench.command(context_settings={"show_default": True})
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice(["fp32", "tf32", "fp16", "bf16"]),
    default=("fp32", "tf32", "fp16", "bf16"),
    help="May be given several times.",
)
@click.option("--peer", type=click.Choice(["torchvision"]), help="Train it too, as it ships.")
@click.option("--use-synthetic-data", is_flag=True, help="Train on drawn pictures.")
@click.option("--iterations", type=click.IntRange(min=1), default=100, help="Steps of each run.")
@click.option("--warmup", type=click.IntRange(min=0), default=10, help="First steps, not timed.")
@output_option("a page, a picture of the losses")
def train(
    config: str,
    overrides: tuple[str, ...],
    precisions: tuple[TrainPrecision, ...],
    peer: str | None,
    use_synthetic_data: bool,
    iterations: int,
    warmup: int,
    output: Path | None,
) -> None:
    """Train a configuration in several precisions, and compare speed and losses.

    CONFIG and KEY=VALUE are those of `maskrcnn train`. Every run starts from the same weights, sees
    the same batches and writes no checkpoint.
    """
    from ..training.config import load_config
    from ..training.data.stand_in import with_synthetic_data
    from .report import Report, show, train_table
    from .train import TrainSettings, measure_training
    from .train_record import write_record

    if warmup >= iterations:
        raise click.UsageError(f"--warmup {warmup} leaves none of {iterations} iterations to time")
    trained = load_config(config, overrides)
    if use_synthetic_data:
        trained = with_synthetic_data(trained)
    settings = TrainSettings(
        precisions=precisions,
        iterations=iterations,
        warmup=warmup,
        with_torchvision=peer == "torchvision",
    )
    results = measure_training(
        trained,
        settings,
        on_run=lambda engine, precision: click.echo(f"{engine} in {precision} ...", err=True),
    )
    report = Report(results)
    show(report, train_table(results), None)
    if output is not None:
        click.echo(f"the record is {write_record(report, results, output)}")


@bench.command()
@click.option(
    "--kernel",
    "names",
    multiple=True,
    metavar="NAME",
    help="Measure this one only; may be given several times.",
)
@json_option
@output_option("a page, a picture of the ratios")
def kernels(names: tuple[str, ...], json_path: Path | None, output: Path | None) -> None:
    """Measure the CUDA kernels at working sizes, and what others offer for the same tasks.

    Sizes are those of a batch of 8 images of 800x1344 pixels.
    """
    import torch

    from .kernel_cases import KERNEL_CASES, working_cases
    from .kernel_record import write_record
    from .kernels import measure_kernels
    from .report import Report, kernel_table, show
    from .workload import Workload

    for name in names:
        if name not in KERNEL_CASES:
            known = ", ".join(KERNEL_CASES)
            raise click.BadParameter(f"there is no kernel {name!r}; choose from {known}")
    if not torch.cuda.is_available():
        raise click.UsageError(
            "kernels are measured on an NVIDIA GPU, and torch finds none here; run this where "
            "nvidia-smi lists one"
        )
    results = measure_kernels(
        working_cases(Workload(), names or KERNEL_CASES),
        on_case=lambda case: click.echo(f"{case.kernel} {case.size} ...", err=True),
    )
    report = Report(results)
    show(report, kernel_table(results), json_path)
    if output is not None:
        click.echo(f"the record is {write_record(report, results, output)}")
