"""From a checkpoint to a bundle: ONNX files, engines built from them, and the manifest."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import onnx
import torch

from .. import __version__
from ..model.checkpoint import Checkpoint, load_checkpoint
from ..model.manifest import (
    MANIFEST_NAME,
    Artifact,
    BundleError,
    InputDtype,
    Manifest,
    Precision,
    Preprocessing,
    Provenance,
    read_manifest,
    sha256_of,
    write_manifest,
)
from ..model.mask_rcnn import MaskRCNN
from ..model.spec import ShapeBucket
from .engine_build import EngineBuilder
from .engine_limits import TOP_K_LIMIT, limited_checkpoint
from .engine_options import ENGINE_SUFFIXES
from .fused_modules import rearrange_for_gpu
from .onnx_export import onnx_from_model
from .precision import fold_batch_norms, halve
from .torch_program import Compilation, compile_programs, program_from_model, write_program

_TYPES: dict[Precision, Precision] = {
    "fp32": "fp32",
    "tf32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
}
"""Numeric types of weights and features, by precision."""

_INPUT_DTYPES: dict[InputDtype, torch.dtype] = {"uint8": torch.uint8, "float32": torch.float32}


def bundle_from_checkpoint(
    checkpoint_path: Path,
    bundle: Path,
    *,
    precisions: Sequence[Precision] = ("fp32", "fp16"),
    buckets: Sequence[ShapeBucket] = (),
    input_dtype: InputDtype = "uint8",
    builders: Sequence[EngineBuilder] = (),
    with_programs: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Export a checkpoint; the bundle appears whole or not at all.

    It holds an ONNX file a numeric type and input size, and as many programs of torch and engines
    of every kind as there are precisions and input sizes. What is in bf16 is a program only.

    Args:
        checkpoint_path: file that training wrote.
        bundle: folder to make; an older bundle there is replaced, anything else is refused.
        precisions: which to export; `fp32` and `tf32` share an ONNX file.
        buckets: input sizes, multiples of 32; those of the training where empty.
        input_dtype: type of the `images` input; its values are 0..255 either way.
        builders: a builder a kind of engine.
        with_programs: whether programs of torch are wanted.
        report: told in a sentence what is being done.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        EngineError: an engine cannot be built.
        BundleError: something that is no bundle is in the way, an input size holds no image, or
            bf16 is wanted and programs are not.
        OSError: the bundle cannot be written.
    """
    _check_place(bundle)
    if "bf16" in precisions and not with_programs:
        raise BundleError("bf16 is for programs of torch alone; add --engine torch")
    checkpoint = load_checkpoint(checkpoint_path)
    _check_buckets(buckets, checkpoint.preprocessing)
    wanted = _Wanted(precisions, buckets or checkpoint.buckets, input_dtype, report)
    with _whole_folder(bundle) as partial:
        graphs = _export_graphs(checkpoint, partial, wanted)
        engines = []
        if builders:
            sources = _sources_of_engines(checkpoint, partial, wanted)
            engines = [
                _build_engine(b, g, sources, partial, report) for b in builders for g in graphs
            ]
        programs = _export_programs(checkpoint, partial, wanted) if with_programs else []
        manifest = _manifest_from(checkpoint, checkpoint_path, [*graphs, *programs, *engines])
        write_manifest(partial, manifest)
    return manifest


@contextmanager
def _whole_folder(path: Path) -> Iterator[Path]:
    """A new folder that takes its name when it is filled; what had the name goes only then.

    Raises:
        OSError: it cannot be made or filled.
    """
    path = path.resolve()  # what a link names, or `.`, is to be replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
        partial = Path(scratch, "new")
        partial.mkdir()
        try:
            yield partial
        except OSError as error:
            # Where a disk is full, Python names no file.
            error.filename = error.filename or str(path.parent)
            raise
        if path.exists():
            path.replace(Path(scratch, "older"))
        partial.replace(path)


def _check_place(bundle: Path) -> None:
    """Refuse a path at which no bundle can be put.

    Raises:
        BundleError: it holds something else, or cannot be replaced.
    """
    held = {path.name for path in bundle.iterdir()} if bundle.exists() else set()
    try:
        held -= {MANIFEST_NAME, *(n for a in read_manifest(bundle).artifacts for n in a.paths)}
    except BundleError:
        if MANIFEST_NAME in held:  # it is damaged, which a new one mends
            held.clear()
    if held:
        raise BundleError(
            f"{bundle} holds something else than a bundle, {min(held)} for one; choose another "
            "folder"
        )
    if bundle.resolve().is_mount():
        raise BundleError(
            f"{bundle} is a mount point, which no bundle can replace; choose a folder in it"
        )


class _Wanted(NamedTuple):
    precisions: Sequence[Precision]
    buckets: Sequence[ShapeBucket]
    input_dtype: InputDtype
    report: Callable[[str], None]


def _export_graphs(checkpoint: Checkpoint, folder: Path, wanted: _Wanted) -> list[Artifact]:
    """Write the ONNX files, each once, and list them by precision and bucket."""
    hashes: dict[str, str] = {}
    artifacts = []
    for precision in dict.fromkeys(wanted.precisions):
        if precision == "bf16":
            continue
        types = _TYPES[precision]
        model = prepared_model(checkpoint, types)
        for bucket in dict.fromkeys(wanted.buckets):
            path = folder / f"model-{types}-{bucket}.onnx"
            if path.name not in hashes:
                wanted.report(f"exporting {types} for inputs of {bucket}")
                onnx.save(onnx_from_model(model, bucket, _INPUT_DTYPES[wanted.input_dtype]), path)
                hashes[path.name] = sha256_of(path)
            artifacts.append(
                Artifact(
                    path=path.name,
                    sha256=hashes[path.name],
                    kind="onnx",
                    precision=precision,
                    input_dtype=wanted.input_dtype,
                    bucket=bucket,
                )
            )
    return artifacts


def _export_programs(checkpoint: Checkpoint, folder: Path, wanted: _Wanted) -> list[Artifact]:
    """Write the programs of torch, each once, and compile them where a GPU is."""
    hashes: dict[Path, str] = {}
    compilations = []
    dtype = _INPUT_DTYPES[wanted.input_dtype]
    for precision in dict.fromkeys(wanted.precisions):
        types = _TYPES[precision]
        model = prepared_model(checkpoint, types)
        rearrange_for_gpu(model)
        for bucket in dict.fromkeys(wanted.buckets):
            path = folder / f"model-{types}-{bucket}.pt2"
            if path not in hashes:
                wanted.report(f"exporting a program of torch in {types} for inputs of {bucket}")
                write_program(program_from_model(model, bucket, dtype), path)
                hashes[path] = sha256_of(path)
            compilations.append(Compilation(path, precision, bucket, dtype))
    if torch.cuda.is_available():
        wanted.report("compiling the programs for this machine's GPU")
    return [
        Artifact(
            path=c.path.name,
            sha256=hashes[c.path],
            kind="torch",
            precision=c.precision,
            input_dtype=wanted.input_dtype,
            bucket=c.bucket,
            compiled=compiled,
        )
        for c, compiled in zip(compilations, compile_programs(compilations), strict=True)
    ]


def _sources_of_engines(checkpoint: Checkpoint, partial: Path, wanted: _Wanted) -> Path:
    """Folder of the ONNX files to build from: the bundle's, unless they select too many."""
    limited, changes = limited_checkpoint(checkpoint)
    if not changes:
        return partial
    wanted.report(f"TensorRT selects at most {TOP_K_LIMIT} candidates: its engines have {changes}")
    folder = partial.with_name("limited")
    folder.mkdir()
    _export_graphs(limited, folder, wanted)
    return folder


def _build_engine(
    builder: EngineBuilder,
    graph: Artifact,
    sources: Path,
    folder: Path,
    report: Callable[[str], None],
) -> Artifact:
    """Build the engine for an ONNX artefact's precision and bucket from the file of its name."""
    report(f"building {graph.precision} for inputs of {graph.bucket} with {builder.product}")
    path = folder / f"model-{graph.precision}-{graph.bucket}{ENGINE_SUFFIXES[builder.kind]}"
    build = builder.build(sources / graph.path, path, graph.precision)
    return Artifact(
        path=path.name,
        sha256=sha256_of(path),
        kind=builder.kind,
        precision=graph.precision,
        input_dtype=graph.input_dtype,
        bucket=graph.bucket,
        engine=build,
    )


def _check_buckets(buckets: Sequence[ShapeBucket], preprocessing: Preprocessing) -> None:
    """Refuse input sizes into which no image fits after it is resized.

    Raises:
        BundleError: one is smaller than every resized image.
    """
    shorter, longer = preprocessing.min_size, preprocessing.max_size
    for bucket in buckets:
        if not preprocessing.fits(bucket):
            raise BundleError(
                f"inputs of {bucket} hold no image, because images are resized to a shorter side "
                f"of {shorter} pixels or a longer one of {longer}; give --shape that holds them"
            )


def prepared_model(checkpoint: Checkpoint, precision: Precision) -> MaskRCNN:
    """The checkpoint's model as it is exported: batch norms folded, in its numeric types."""
    model = checkpoint.build_model()
    fold_batch_norms(model)
    if precision in ("fp16", "bf16"):
        halve(model, torch.float16 if precision == "fp16" else torch.bfloat16)
    return model


def _manifest_from(checkpoint: Checkpoint, path: Path, artifacts: Sequence[Artifact]) -> Manifest:
    backbone = checkpoint.model_config.backbone
    return Manifest(
        model_name=f"maskrcnn_{backbone.name}_{backbone.features}",
        categories=checkpoint.categories,
        preprocessing=checkpoint.preprocessing,
        max_detections=checkpoint.model_config.roi.max_detections,
        mask_side=checkpoint.model_config.mask_side,
        mask_paste=checkpoint.model_config.mask_paste,
        artifacts=tuple(artifacts),
        provenance=Provenance(
            checkpoint=path.name,
            checkpoint_sha256=sha256_of(path),
            iteration=checkpoint.iteration,
            metrics=checkpoint.metrics,
            exported_by=f"maskrcnn-trt {__version__}",
            exported_at=datetime.now(UTC).isoformat(timespec="seconds"),
        ),
    )
