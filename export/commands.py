"""`maskrcnn export`: turn a checkpoint into a bundle."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..model.bundle.manifest import (
    MISSING_PRECISIONS,
    EngineKind,
    InputDtype,
    Manifest,
    Precision,
)
from ..model.bundle.spec import BUCKET_STEP, ShapeBucket
from ..model.config.option_types import OUTPUT_FOLDER
from ..model.exit_signals import exit_on_signals
from ..model.image_files import is_image_file
from ..plugins.runtime.console import table_console
from .engines.options import engine_options
from .errors import VerificationError

if TYPE_CHECKING:
    from .verify import Comparison


class BucketType(click.ParamType[ShapeBucket]):
    """Click type of an input size HEIGHTxWIDTH in pixels, as in `800x1344`.

    Both sides must be multiples of 32.
    """

    name = "HxW"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> ShapeBucket:
        """Parse `HEIGHTxWIDTH`, or fail with a usage error."""
        height, _, width = str(value).partition("x")
        if not (height.isdecimal() and width.isdecimal()):
            self.fail(f"{value!r} is not of the form HEIGHTxWIDTH, as in 800x1344", param, ctx)
        bucket = ShapeBucket(int(height), int(width))
        if not bucket.is_multiple_of_step:
            self.fail(
                f"{value} must be a multiple of {BUCKET_STEP} pixels on both sides", param, ctx
            )
        return bucket


class VariadicCommand(click.Command):
    """Command whose repeatable options take several values: `--size 1 2` is `--size 1 --size 2`.

    A word after a value is another value of the option if the option's type accepts the word.
    Otherwise the word is a positional argument, as `model.pth` is in `--size 1 2 model.pth`.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Rewrite `--size 1 2` as `--size 1 --size 2`, which click understands, then parse."""
        rejections: list[click.BadParameter] = []
        words = list(self._expanded(ctx, args, rejections))
        try:
            return super().parse_args(ctx, words)
        except click.UsageError as error:
            if type(error) is not click.UsageError or not rejections:
                raise
            # The unexpected argument may be a mistyped value of the option before it, so append the
            # reason why the option rejected it.
            sentence = f"{error.message.rstrip('.')}, as {rejections[0].message}"
            raise click.UsageError(sentence, ctx) from None

    def _expanded(
        self, ctx: click.Context, args: Sequence[str], rejections: list[click.BadParameter]
    ) -> Iterator[str]:
        options = {
            name: option
            for option in self.get_params(ctx)
            if isinstance(option, click.Option) and option.multiple
            for name in option.opts
        }
        words = iter(args)
        repeated = ""
        for word in words:
            if repeated and not word.startswith("-"):
                try:
                    options[repeated].type(word, options[repeated], ctx)
                except click.BadParameter as rejection:
                    rejections.append(rejection)
                else:
                    yield from (repeated, word)
                    continue
            name, equals, _ = word.partition("=")
            repeated = name if name in options else ""
            yield word
            if repeated and not equals:
                yield from islice(words, 1)
            elif word == "--":
                yield from words


@click.command(cls=VariadicCommand)
@click.argument("checkpoint")
@click.option(
    "-o", "--output", "bundle", required=True, type=OUTPUT_FOLDER,
    help="Folder of the bundle. If it holds a bundle of the same checkpoint, the new files are "
    "added to that bundle; a bundle of another checkpoint is replaced.",
)  # fmt: skip
@click.option(
    "--precision", "precisions", multiple=True, type=click.Choice(get_args(Precision)),
    default=("fp32", "fp16"), show_default=True, help="Precisions to export, one or more.",
)  # fmt: skip
@click.option(
    "--shape", "buckets", multiple=True, type=BucketType(),
    help="Input sizes as HEIGHTxWIDTH, such as 800x1344, one or more. Default: those that the "
    "checkpoint was trained with.",
)  # fmt: skip
@click.option(
    "--input-dtype", type=click.Choice(["uint8", "float32"]),
    help="Data type of input images. Pixel values are 0..255 in both types. Default: float32 if "
    "the checkpoint resizes images as torchvision does, without rounding pixel values, else uint8.",
)  # fmt: skip
@click.option(
    "--calibration", metavar="IMAGES",
    help="Image or folder of images on which the value ranges of tensors are measured, for int8 "
    "and fp8.",
)  # fmt: skip
@click.option(
    "--samples", metavar="IMAGES",
    help="Folder of images. The first six become samples on the server's web page.",
)  # fmt: skip
@engine_options
@click.option(
    "--triton-repository", type=OUTPUT_FOLDER, metavar="DIR",
    help="Add the ONNX files and TensorRT plans to a model repository for Triton Inference Server. "
    "An existing model of the same name gets a new version. Plans with plugins get one "
    "optimization profile per batch size.",
)  # fmt: skip
@click.option(
    "--verify", "images", metavar="[IMAGES]", is_flag=False, flag_value="",
    help="Compare ONNX files and torch programs with the checkpoint on an image or a folder of "
    "images. Without IMAGES, compare on noise.",
)  # fmt: skip
def export(
    checkpoint: str,
    bundle: Path,
    precisions: tuple[Precision, ...],
    buckets: tuple[ShapeBucket, ...],
    input_dtype: InputDtype | None,
    triton_repository: Path | None,
    images: str | None,
    calibration: str | None,
    samples: str | None,
    kinds: tuple[Literal["torch"] | EngineKind, ...],
    **engines: Any,
) -> None:
    """Turn CHECKPOINT into a bundle that `maskrcnn serve` and `maskrcnn predict` load.

    CHECKPOINT is a checkpoint, weights of another implementation, a URL of either, or a name that
    `maskrcnn weights list` prints, such as torchvision:maskrcnn_resnet50_fpn_v2.

    Options with several values take them one after another, as in --precision fp32 fp16.
    """
    from ..model.image_decoding import decode_image
    from ..model.image_files import errors_of_file, read_image_file
    from .bundle import bundle_from_checkpoint
    from .engines.build import builders_from_options
    from .output_folder import copy_samples, sample_images
    from .triton_repository import triton_repository_from_bundle

    without_onnx = [p for p in MISSING_PRECISIONS["onnx"] if p in precisions]
    if without_onnx and engines["strip_weights"]:
        raise click.UsageError(
            "weights that --strip-weights leaves out are inserted later from an ONNX file, but the "
            f"bundle will have no ONNX file for the precision {without_onnx[0]}; leave out "
            "--strip-weights, or choose another precision"
        )
    if triton_repository and triton_repository.resolve().is_relative_to(bundle.resolve()):
        raise click.UsageError(
            f"--triton-repository {triton_repository} is inside the bundle, which is replaced as a "
            "whole; choose a folder outside of it"
        )
    image_paths = [] if not images else _images_in(Path(images), "--verify")
    for path in image_paths:  # now, because the export can take minutes
        with errors_of_file(path):
            decode_image(read_image_file(path))
    sample_paths = sample_images(_images_in(Path(samples), "--samples")) if samples else []
    if samples and not sample_paths:
        raise click.BadParameter(
            f"{samples} holds no JPEG, PNG or WebP image", param_hint="--samples"
        )
    calibration_paths = _images_in(Path(calibration), "--calibration") if calibration else []
    builders = builders_from_options(
        bundle,
        [kind for kind in kinds if kind != "torch"],
        for_triton=triton_repository is not None,
        **engines,
    )
    with exit_on_signals():  # so that a signal does not leave the temporary folder
        manifest = bundle_from_checkpoint(
            checkpoint,
            bundle,
            precisions=precisions,
            buckets=buckets,
            input_dtype=input_dtype,
            builders=builders,
            with_programs="torch" in kinds,
            calibration=calibration_paths,
            report=click.echo,
        )
    if sample_paths:
        copy_samples(sample_paths, bundle)
    click.echo(f"the bundle is {bundle}")
    if images is not None:
        _verify(checkpoint, bundle, manifest, image_paths)
    if triton_repository is not None:
        names = triton_repository_from_bundle(bundle, triton_repository)
        click.echo(f"added to the Triton repository {triton_repository}: {', '.join(names)}")


def _verify(checkpoint: str, bundle: Path, manifest: Manifest, images: list[Path]) -> None:
    """Compare detections of a bundle and its checkpoint on image files, and print the result.

    If `images` is empty, compare on noise.

    Raises:
        VerificationError: the detections of an ONNX file or a torch program differ from those of
            the checkpoint by more than the tolerance of its precision.
    """
    from ..model.weights.references import checkpoint_from_reference
    from .verify import verify_bundle

    comparisons = verify_bundle(bundle, manifest, checkpoint_from_reference(checkpoint), images)
    table_console().print(table_of(comparisons))
    failed = [c.artifact.path for c in comparisons if not c.passed]
    if failed:
        raise VerificationError(
            f"the outputs of {', '.join(failed)} differ from those of the checkpoint by more than "
            f"their precision allows; do not serve {bundle}: delete it, or export another precision"
        )


def table_of(comparisons: "list[Comparison]") -> Table:
    """Return a table of differences in detections between exported models and their checkpoint.

    Each row shows one ONNX file or torch program. Below them, one row per precision shows its
    tolerances.
    """
    names = ("artifact", "images", "found", "boxes px", "scores", "masks", "outside", "")
    table = Table(*names, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for c in comparisons:
        result = "passed" if c.detections else "not compared: no detections"
        table.add_row(
            f"{c.artifact.kind} {c.artifact.precision} {c.artifact.bucket}",
            str(c.images),
            str(c.detections),
            *(f"{value:.0e}" for value in (c.boxes, c.scores, c.masks)),
            str(c.missed),
            result if c.passed else "FAILED",
        )
    for precision, t in {c.artifact.precision: c.tolerance for c in comparisons}.items():
        allowed = (f"{t.boxes:g}", f"{t.scores:g}", f"{t.masks:g}", f"{t.share:.0%}", "allowed")
        table.add_row(f"{precision}", "", "", *allowed, style="dim")
    return table


def _images_in(path: Path, option: str) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.exists():
        raise click.BadParameter(
            f"{path} does not exist; give an image or a folder of images", param_hint=option
        )
    # If the folder itself has no images, search its subfolders, where data sets often have them.
    found = (sorted(filter(is_image_file, path.glob(pattern))) for pattern in ("*", "**/*"))
    images = next(filter(None, found), [])
    if not images:
        raise click.BadParameter(
            f"{path} is neither an image nor a folder of images", param_hint=option
        )
    return images
