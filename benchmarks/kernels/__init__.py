"""`maskrcnn bench kernels`: times of the CUDA kernels and of other implementations."""

from pathlib import Path

import click

from ..common.record import json_option, output_option, publish


@click.command()
@click.option(
    "--kernel", "names", multiple=True, metavar="NAME",
    help="Measure this kernel only; repeatable.",
)  # fmt: skip
@json_option
@output_option("a page, a plot of the speedups")
def kernels(names: tuple[str, ...], json_path: Path | None, output: Path | None) -> None:
    """Measure the CUDA kernels and other implementations of their tasks.

    Sizes are those of a batch of 8 images of 800x1344 pixels.
    """
    import torch

    from .cases import KERNEL_CASES, working_cases
    from .measure import Workload, measure_kernels
    from .record import kernels_record

    for name in names:
        if name not in KERNEL_CASES:
            known = ", ".join(KERNEL_CASES)
            raise click.BadParameter(f"there is no kernel {name!r}; choose from {known}")
    if not torch.cuda.is_available():
        raise click.UsageError(
            "torch finds no NVIDIA GPU to measure kernels on; use a machine where nvidia-smi lists "
            "one"
        )
    results = measure_kernels(
        working_cases(Workload(), names or KERNEL_CASES),
        on_case=lambda case: click.echo(f"measuring {case.kernel}: {case.size} ...", err=True),
    )
    publish(kernels_record(results), json_path, output)
