"""The verb `kernels`."""

from collections import defaultdict

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from .compute_capability import CapabilityType


@click.group()
def kernels() -> None:
    """Compile the CUDA kernels."""


@kernels.command()
@click.option(
    "--compute-capability", "capabilities", multiple=True, type=CapabilityType(),
    help="GPUs to compile for, as in 9.0; repeat it for several. All that are tested if left out.",
)  # fmt: skip
def build(capabilities: tuple[str, ...]) -> None:
    """Compile every kernel into the user's cache, in the variants of the default model.

    Kernels compile when they are first used, a tenth of a second each; this does it beforehand, for
    an image or a machine that starts often. It needs no GPU. What a configuration changes, such as
    a threshold, makes another variant, which compiles when it is first used all the same.
    """
    from .compilation import ARCHITECTURES, compiled, known_architectures
    from .kernels import all_kernels
    from .user_cache import cache_folder

    wanted = [int(capability.replace(".", "")) for capability in capabilities] or ARCHITECTURES
    unknown = sorted({*wanted} - {*known_architectures()})
    if unknown:
        raise click.BadParameter(
            f"the installed NVRTC does not compile for {_capability(unknown[0])}; choose from "
            f"{', '.join(map(_capability, known_architectures()))}",
            param_hint="--compute-capability",
        )
    sizes: dict[str, list[list[int]]] = defaultdict(list)
    for kernel in track(all_kernels(), "compiling", console=Console(stderr=True)):
        codes = [compiled(kernel, architecture, "cubin") for architecture in wanted]
        sizes[kernel.name].append([len(code) for code in codes])
    table = Table("kernel", "variants", *map(_capability, wanted))
    for name, variants in sorted(sizes.items()):
        totals = (f"{sum(own) / 1024:.0f} KiB" for own in zip(*variants, strict=True))
        table.add_row(name, str(len(variants)), *totals)
    Console().print(table)
    click.echo(f"the cache is {cache_folder('kernels')}")


def _capability(architecture: int) -> str:
    return f"{architecture // 10}.{architecture % 10}"
