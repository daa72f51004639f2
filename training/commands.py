"""The verbs `train` and `eval`."""

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table


@click.command()
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--resume", is_flag=True, help="Continue the run in output_dir if there is one.")
def train(config: str, overrides: tuple[str, ...], resume: bool) -> None:
    """Train a model.

    CONFIG is a YAML file or the name of a preset; KEY=VALUE sets single keys, as in
    `solver.base_lr=0.01`. For several processes run `torchrun --nproc-per-node N -m maskrcnn_trt
    train ...`.
    """
    from .config import load_config
    from .run import run_training

    checkpoint = run_training(load_config(config, overrides), resume=resume)
    click.echo(f"the final checkpoint is {checkpoint}")


@click.command(name="eval")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def evaluate(checkpoint: Path, config: str, overrides: tuple[str, ...]) -> None:
    """Measure the average precision of CHECKPOINT on the validation set of CONFIG.

    CONFIG and KEY=VALUE are those of `maskrcnn train`; the detections are written into output_dir
    as bbox.json and segm.json.
    """
    from .config import load_config
    from .run import run_evaluation

    metrics = run_evaluation(checkpoint, load_config(config, overrides))
    table = Table("metric", "value", title=f"{checkpoint}")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4f}")
    Console().print(table)
