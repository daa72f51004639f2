"""The verb `kernels`."""

from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

if TYPE_CHECKING:
    from .compilation import Kernel


@click.group()
def kernels() -> None:
    """Compile the CUDA kernels."""


@kernels.command()
@click.option(
    "--architecture", "architectures", multiple=True, type=click.IntRange(min=50),
    help="Compute capability, ten times its number: 90 for 9.0. All that are tested if left out.",
)  # fmt: skip
def build(architectures: tuple[int, ...]) -> None:
    """Compile every kernel into the user's cache, so that no first use has to.

    Kernels compile when they are first used, a tenth of a second each; this does it beforehand, for
    an image or a machine without a compiler. It needs no GPU.
    """
    from .compilation import ARCHITECTURES, compiled
    from .kernels import all_kernels
    from .user_cache import cache_folder

    wanted = architectures or ARCHITECTURES
    table = Table("kernel", "variant", *(f"sm_{architecture}" for architecture in wanted))
    for kernel in track(all_kernels(), "compiling", console=Console(stderr=True)):
        sizes = [len(compiled(kernel, architecture, "cubin")) for architecture in wanted]
        table.add_row(kernel.name, _variant(kernel), *(f"{size / 1024:.0f} KiB" for size in sizes))
    Console().print(table)
    click.echo(f"the cache is {cache_folder('kernels')}")


def _variant(kernel: "Kernel") -> str:
    return " ".join(str(value) for _, value in kernel.constants)
