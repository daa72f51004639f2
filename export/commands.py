"""The verb `export`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..model.images import IMAGE_SUFFIXES
from ..model.manifest import EngineKind, InputDtype, Manifest, Precision
from ..model.spec import ShapeBucket
from .engine_options import builders_from_options, engine_options
from .variadic_options import VariadicCommand

if TYPE_CHECKING:
    from .verify import Comparison


class BucketType(click.ParamType[ShapeBucket]):
    """An input size on the command line, as in `800x1344`; both sides divide by 32."""

    name = "HxW"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> ShapeBucket:
        """Parse a value; what is wrong with it is a usage error."""
        height, _, width = str(value).partition("x")
        if not (height.isdecimal() and width.isdecimal()):
            self.fail(f"{value!r} is not of the form HEIGHTxWIDTH, as in 800x1344", param, ctx)
        bucket = ShapeBucket(int(height), int(width))
        if min(bucket) < 32 or bucket.height % 32 or bucket.width % 32:
            self.fail(f"{value} must be a multiple of 32 pixels on both sides", param, ctx)
        return bucket


@click.command(cls=VariadicCommand)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", "bundle", required=True, type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the bundle; an older bundle there is replaced.",
)  # fmt: skip
@click.option(
    "--precision", "precisions", multiple=True, type=click.Choice(get_args(Precision)),
    default=("fp32", "fp16"), show_default=True, help="Numeric types, one or more.",
)  # fmt: skip
@click.option(
    "--shape", "buckets", multiple=True, type=BucketType(),
    help="Input heights and widths, one or more. Those of the training if left out.",
)  # fmt: skip
@click.option(
    "--input-dtype", type=click.Choice(["uint8", "float32"]), default="uint8", show_default=True,
    help="Type of the image input; values are 0..255 either way.",
)  # fmt: skip
@engine_options
@click.option(
    "--triton-repository", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Model repository to which to add the ONNX files and TensorRT plans as models of Triton "
    "Inference Server; what has the name already gets a further version.",
)  # fmt: skip
@click.option(
    "--verify", "images", metavar="[IMAGES]", is_flag=False, flag_value="",
    help="Compare ONNX files and programs of torch with the checkpoint on a picture or a folder of "
    "them; noise if none is named.",
)  # fmt: skip
def export(
    checkpoint: Path,
    bundle: Path,
    precisions: tuple[Precision, ...],
    buckets: tuple[ShapeBucket, ...],
    input_dtype: InputDtype,
    triton_repository: Path | None,
    images: str | None,
    kinds: tuple[Literal["torch"] | EngineKind, ...],
    **engines: Any,
) -> None:
    """Turn CHECKPOINT into a bundle that `maskrcnn serve` and `maskrcnn predict` load.

    Options for several values take them one after another, as in --precision fp32 fp16.
    """
    from .bundle import bundle_from_checkpoint
    from .triton_repository import triton_repository_from_bundle

    pictures = [] if not images else _pictures_in(Path(images))
    manifest = bundle_from_checkpoint(
        checkpoint,
        bundle,
        precisions=precisions,
        buckets=buckets,
        input_dtype=input_dtype,
        builders=builders_from_options(bundle, [k for k in kinds if k != "torch"], **engines),
        with_programs="torch" in kinds,
        report=click.echo,
    )
    click.echo(f"the bundle is {bundle}")
    if images is not None:
        _verify(checkpoint, bundle, manifest, pictures)
    if triton_repository is not None:
        names = triton_repository_from_bundle(bundle, triton_repository)
        click.echo(f"Triton's models in {triton_repository} are {', '.join(names)}")


def _verify(checkpoint: Path, bundle: Path, manifest: Manifest, pictures: list[Path]) -> None:
    """Compare a bundle with its checkpoint, and say what came of it.

    Raises:
        VerificationError: they differ by more than precision allows.
    """
    from ..model.checkpoint import load_checkpoint
    from .verify import VerificationError, verify_bundle

    comparisons = verify_bundle(bundle, manifest, load_checkpoint(checkpoint), pictures)
    Console().print(table_of(comparisons))
    failed = [c.artifact.path for c in comparisons if not c.passed]
    if failed:
        raise VerificationError(
            f"{', '.join(failed)} differ from the checkpoint by more than their precision allows; "
            f"{bundle} is there, but unfit to serve: delete it, or export another precision"
        )


def table_of(comparisons: "list[Comparison]") -> Table:
    """Comparisons as a table: largest differences, and how many detections missed a tolerance."""
    names = ("artefact", "images", "found", "boxes px", "scores", "masks", "outside", "")
    table = Table(*names, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for c in comparisons:
        table.add_row(
            f"{c.artifact.kind} {c.artifact.precision} {c.artifact.bucket}",
            str(c.images),
            str(c.detections),
            *(f"{value:.0e}" for value in (c.boxes, c.scores, c.masks)),
            str(c.missed),
            "passed" if c.passed else "FAILED",
        )
    for precision, t in {c.artifact.precision: c.tolerance for c in comparisons}.items():
        allowed = (f"{t.boxes:g}", f"{t.scores:g}", f"{t.masks:g}", f"{t.share:.0%}", "allowed")
        table.add_row(f"{precision}", "", "", *allowed, style="dim")
    return table


def _pictures_in(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    pictures = sorted(p for p in path.glob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
    if not pictures:
        raise click.BadParameter(
            f"{path} is no picture and no folder of pictures", param_hint="--verify"
        )
    return pictures
