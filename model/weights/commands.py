"""Commands of `maskrcnn weights`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from ...plugins.runtime.console import table_console
from ..config.option_types import OUTPUT_FILE
from ..config.reference import text_from_value

if TYPE_CHECKING:
    from .conversion import WeightsConversion


@click.group()
def weights() -> None:
    """List published models, and convert weights of other implementations."""


@weights.command()
@click.argument("file")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "-o", "--output", required=True, type=OUTPUT_FILE,
    help="Checkpoint to write.",
)  # fmt: skip
@click.option(
    "--categories", type=click.Path(path_type=Path), metavar="COCO.json",
    help="Annotation file that names the classes. Default: the published model's classes; COCO's "
    "names if there are 80 or 90 classes; otherwise `class 1`, `class 2`, ...",
)  # fmt: skip
@click.option(
    "--config", type=click.Path(path_type=Path), metavar="config.yaml",
    help="detectron2's configuration of the model. Default: config.yaml beside FILE.",
)  # fmt: skip
@click.option(
    "--other-channel-order", is_flag=True,
    help="Set this if the network takes RGB although the program that wrote FILE usually takes BGR "
    "(as detectron2 does), or the reverse.",
)  # fmt: skip
def convert(
    file: str,
    overrides: tuple[str, ...],
    output: Path,
    categories: Path | None,
    config: Path | None,
    other_channel_order: bool,
) -> None:
    """Convert FILE to a checkpoint that gives the same results.

    FILE is a Mask R-CNN of torchvision, detectron2, maskrcnn-benchmark, NVIDIA or Caffe2's
    Detectron, recognised by its content. It can also be a URL, or a name of `maskrcnn weights
    list`. If the file lacks a setting, the default of the program that wrote the file is used and
    printed. KEY=VALUE overrides a setting, as in `backbone.stride_in_1x1=false` or
    `preprocessing.min_size=1024`.
    """
    from ..checkpoint import save_checkpoint
    from .references import convert_reference

    for source in (Path(file), categories, config):
        if source and source.exists() and output.exists() and output.samefile(source):
            raise click.BadParameter(
                f"{output} is the same file as the input {source}; choose another output file",
                param_hint="--output",
            )
    conversion = convert_reference(
        file, overrides, categories, other_channel_order=other_channel_order, config=config
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(output, conversion.checkpoint)
    table_console().print(_conversion_table(conversion))
    click.echo(f"wrote the checkpoint {output}")


@weights.command(name="list")
def list_() -> None:
    """List the published models that can be given by name, as in `torchvision:NAME`."""
    from .zoo import LICENCES, ZOO_MODELS

    # Print plain lines, because a table of rich would cut names on narrow terminals.
    for model in ZOO_MODELS:
        click.echo(f"{model!s:<65} {model.dataset:<10} {model.min_size}/{model.max_size}")
    click.echo(
        "\ncolumns: name; training data; test size in pixels (shorter side / maximum of the longer "
        "side)"
    )
    for zoo, licence in LICENCES.items():
        click.echo(f"licence of the weights of {zoo}: {licence}")


def _conversion_table(conversion: "WeightsConversion") -> Table:
    """Tabulate loaded and ignored tensors and assumed settings of a conversion."""
    config = conversion.checkpoint.model_config
    body = f"{config.backbone.name} {config.backbone.features}, {config.backbone.norm}"
    table = Table("", "", title=f"{conversion.origin}: {body}", show_header=False)
    table.add_row("classes", str(config.num_classes))
    table.add_row("loaded", f"{conversion.num_loaded} tensors, all that the model has")
    table.add_row("missing", "0")
    table.add_row("ignored", "\n".join((str(len(conversion.ignored)), *conversion.ignored)))
    assumed = (f"{key}={text_from_value(value)}" for key, value in conversion.assumed.items())
    table.add_row("assumed", "\n".join(assumed))
    return table
