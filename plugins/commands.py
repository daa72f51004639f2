"""The verb `kernels`."""

from collections import defaultdict

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table


@click.group()
def kernels() -> None:
    """Compile the CUDA kernels."""


@kernels.command()
@click.option(
    "--architecture", "architectures", multiple=True, type=click.IntRange(min=50),
    help="Compute capability, ten times its number: 90 for 9.0. All that are tested if left out.",
)  # fmt: skip
def build(architectures: tuple[int, ...]) -> None:
    """Compile every kernel into the user's cache, in the variants of the default model.

    Kernels compile when they are first used, a tenth of a second each; this does it beforehand, for
    an image or a machine that starts often. It needs no GPU. What a configuration changes, such as
    a threshold, makes another variant, which compiles when it is first used all the same.
    """
    from .compilation import ARCHITECTURES, compiled
    from .kernels import all_kernels
    from .user_cache import cache_folder

    wanted = architectures or ARCHITECTURES
    sizes: dict[str, list[list[int]]] = defaultdict(list)
    for kernel in track(all_kernels(), "compiling", console=Console(stderr=True)):
        codes = [compiled(kernel, architecture, "cubin") for architecture in wanted]
        sizes[kernel.name].append([len(code) for code in codes])
    table = Table("kernel", "variants", *(f"sm_{architecture}" for architecture in wanted))
    for name, variants in sorted(sizes.items()):
        totals = (f"{sum(own) / 1024:.0f} KiB" for own in zip(*variants, strict=True))
        table.add_row(name, str(len(variants)), *totals)
    Console().print(table)
    click.echo(f"the cache is {cache_folder('kernels')}")
