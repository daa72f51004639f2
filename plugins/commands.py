"""Commands of `maskrcnn kernels`."""

import tempfile
from collections import defaultdict

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from .runtime.compute_capability import CapabilityType
from .runtime.console import table_console


@click.group()
def kernels() -> None:
    """Compile the CUDA kernels."""


@kernels.command()
@click.option(
    "--compute-capability", "capabilities", multiple=True, type=CapabilityType(),
    help="Compute capability of a target GPU, such as 9.0; repeatable. Default: all that the "
    "tests cover.",
)  # fmt: skip
def build(capabilities: tuple[str, ...]) -> None:
    """Compile all kernels for the default model configuration into the user's cache.

    A kernel that is not in the cache is compiled at its first use, in a tenth of a second. Use this
    command for container images, or for machines that often start without a cache. The command
    needs no GPU. Model configurations with other settings, such as another threshold, need other
    kernels, which are compiled at their first use.
    """
    from .kernel_list import all_kernels
    from .runtime.compilation import ARCHITECTURES, compile_kernel, supported_architectures
    from .runtime.user_cache import cache_folder

    architectures = [
        int(capability.replace(".", "")) for capability in capabilities
    ] or ARCHITECTURES
    unknown = sorted({*architectures} - {*supported_architectures()})
    if unknown:
        raise click.BadParameter(
            f"the installed NVRTC does not compile for {_capability(unknown[0])}; choose from "
            f"{', '.join(map(_capability, supported_architectures()))}",
            param_hint="--compute-capability",
        )
    folder = cache_folder("kernels")
    folder.mkdir(parents=True, exist_ok=True)
    # Fail if the folder is not writable. `compile_kernel` would ignore this error.
    tempfile.TemporaryFile(dir=folder).close()
    code_sizes: dict[str, list[list[int]]] = defaultdict(list)
    for kernel in track(all_kernels(), "compiling", console=Console(stderr=True)):
        codes = [compile_kernel(kernel, architecture, "cubin") for architecture in architectures]
        code_sizes[kernel.name].append([len(code) for code in codes])
    table = Table("kernel", "variants", *map(_capability, architectures))
    for name, variants in sorted(code_sizes.items()):
        totals = (f"{sum(sizes) / 1024:.0f} KiB" for sizes in zip(*variants, strict=True))
        table.add_row(name, str(len(variants)), *totals)
    table_console().print(table)
    click.echo(f"the compiled kernels are in {folder}")


def _capability(architecture: int) -> str:
    return f"{architecture // 10}.{architecture % 10}"
