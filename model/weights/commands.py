"""The verb `weights`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from ..overrides import text_from_value

if TYPE_CHECKING:
    from .conversion import Conversion


@click.group()
def weights() -> None:
    """Take over weights of other implementations."""


@weights.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False),
    help="Checkpoint to write.",
)  # fmt: skip
@click.option(
    "--categories", type=click.Path(path_type=Path), metavar="COCO.json",
    help="Annotation file that names the classes; COCO's names if left out.",
)  # fmt: skip
@click.option(
    "--other-channel-order", is_flag=True,
    help="The network took RGB although its origin usually takes BGR, or the reverse.",
)  # fmt: skip
def convert(
    file: Path,
    overrides: tuple[str, ...],
    output: Path,
    categories: Path | None,
    other_channel_order: bool,
) -> None:
    """Turn FILE into a checkpoint that computes what its origin computed.

    FILE is a Mask R-CNN of torchvision, detectron2, maskrcnn-benchmark, NVIDIA or Caffe2's
    Detectron, recognised by its content. What it does not say is assumed and printed; KEY=VALUE
    sets it otherwise, as in `backbone.stride_in_1x1=false`.
    """
    from ..checkpoint import save_checkpoint
    from .conversion import checkpoint_from_weights
    from .files import WeightsError
    from .recognition import OWN, read_weights

    read = read_weights(file)
    if read.origin == OWN:
        raise WeightsError(f"{file} is a checkpoint of this program already; use it as it is")
    try:
        conversion = checkpoint_from_weights(
            read, overrides, categories, other_channel_order=other_channel_order
        )
    except WeightsError as error:
        raise WeightsError(f"{file}: {error}") from None
    output.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(output, conversion.checkpoint)
    Console(markup=False, emoji=False).print(table_of(conversion))
    click.echo(f"the checkpoint is {output}")


def table_of(conversion: "Conversion") -> Table:
    """What was taken from a file, what was left, and what was assumed."""
    config = conversion.checkpoint.model_config
    body = f"{config.backbone.name} {config.backbone.features}, {config.backbone.norm}"
    table = Table("", "", title=f"{conversion.origin}: {body}", show_header=False)
    table.add_row("classes", str(config.num_classes))
    table.add_row("taken", f"{conversion.taken} tensors, all that the model has")
    table.add_row("missing", "0")
    table.add_row("left over", "\n".join((str(len(conversion.left_over)), *conversion.left_over)))
    assumed = (f"{key}={text_from_value(value)}" for key, value in conversion.assumed.items())
    table.add_row("assumed", "\n".join(assumed))
    return table
