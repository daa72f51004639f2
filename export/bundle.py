"""Export of a checkpoint to a bundle: ONNX files, torch programs, engines and manifest."""

import hashlib
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import onnx
import torch

from .. import __version__
from ..model.bundle.manifest import (
    ARTIFACT_SUFFIXES,
    MISSING_PRECISIONS,
    Artifact,
    InputDtype,
    Manifest,
    Precision,
    Provenance,
    sha256_of,
    write_manifest,
)
from ..model.checkpoint import Checkpoint
from ..model.mask_rcnn import MaskRCNN
from ..model.weights.files import local_path
from ..model.weights.references import checkpoint_from_reference
from .engines.build import TOP_K_LIMIT, limited_checkpoint
from .engines.builder import EngineBuilder
from .onnx.export import onnx_from_model
from .onnx.precision import fold_batch_norms, halve, replace_transposed_convolution
from .onnx.quantization import calibration_images, float8_model, quantized_model
from .output_folder import atomic_folder, check_output_folder, with_older_artifacts
from .settings import (
    ExportSettings,
    check_buckets,
    check_precisions,
    checked_dtype,
    validated_arguments,
)
from .torch_program.fused_modules import optimize_for_gpu
from .torch_program.program import Compilation, compile_programs, program_from_model, write_program

# Data type of weights and features, for each precision that is not a data type itself. TF32 is a
# mode of fp32 arithmetic.
_TYPES: dict[Precision, Precision] = {"tf32": "fp32"}

# Data type of the `images` input by its name in the manifest.
_INPUT_DTYPES: dict[InputDtype, torch.dtype] = {"uint8": torch.uint8, "float32": torch.float32}


def bundle_from_checkpoint(
    reference: str | Path,
    bundle: str | Path,
    *,
    precisions: Sequence[Precision] = ("fp32", "fp16"),
    buckets: Sequence[tuple[int, int]] = (),
    input_dtype: InputDtype | None = None,
    builders: Sequence[EngineBuilder] = (),
    with_programs: bool = False,
    calibration: Sequence[str | Path] = (),
    report: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Export a checkpoint to a bundle folder.

    The folder is replaced atomically. If it holds a bundle of the same checkpoint, model
    configuration and package version, the model files of that bundle are kept, unless this export
    replaces them. Of any other bundle, only the sample images are kept.

    For each precision and input size, the new bundle has an ONNX file, an engine of each builder
    and, if `with_programs` is set, a torch program. Exceptions: bf16 has no ONNX file, int8 no
    torch program, and fp8 neither of the two.

    Args:
        reference: path or URL of a checkpoint or of another implementation's weights, or name of a
            published model.
        bundle: folder to write. It may hold an older bundle.
        precisions: precisions to export. `fp32` and `tf32` share an ONNX file.
        buckets: input sizes as (height, width) in pixels, multiples of 32. Empty: use the input
            sizes of the training.
        input_dtype: data type of the model's input `images`: uint8 or float32, both with pixel
            values 0..255. None: use float32 if the checkpoint resizes images as torchvision does,
            without rounding pixel values, and uint8 otherwise.
        builders: one engine builder per kind of engine to build.
        with_programs: whether to export torch programs.
        calibration: image files on which value ranges for int8 and fp8 are measured, such as a part
            of the training images. Other precisions need none.
        report: function that is called with a progress message at the start of each step.

    Returns:
        the manifest of the bundle.

    Raises:
        CheckpointError: the checkpoint cannot be read or converted.
        ZooError: no published model has this name, or this package does not support that model.
        DownloadError: the download failed, or the file has another checksum.
        EngineError: an engine cannot be built, or a target GPU does not support one of the
            precisions.
        BundleError: in one of these cases. `precisions`, `buckets`, `input_dtype`, `builders`,
            `with_programs` or `calibration` has another type or value than described, or
            `precisions` is empty. The folder holds other files than a bundle, or cannot be
            replaced. An input size is not a multiple of 32, is too large, or is so small that no
            resized image fits. `input_dtype` is uint8, and the checkpoint's resizing does not round
            pixel values. A precision needs `builders`, `with_programs` or `calibration`, which is
            not given. `with_programs` or `calibration` is given, and no precision uses it.
        ImageError: a calibration image cannot be read.
        ModuleNotFoundError: int8 or fp8 is requested, and ONNX Runtime is not installed.
        OSError: the bundle cannot be written.
    """
    bundle = Path(bundle)
    check_output_folder(bundle)
    given = validated_arguments(
        precisions=precisions,
        buckets=buckets,
        input_dtype=input_dtype,
        builders=builders,
        with_programs=with_programs,
        calibration=calibration,
    )
    precisions, builders = given.precisions, given.builders
    check_precisions(precisions, bool(builders), with_programs, bool(given.calibration))
    for builder in builders:
        builder.check(precisions)
    checkpoint = checkpoint_from_reference(reference)
    sizes = given.buckets or checkpoint.buckets
    check_buckets(sizes, checkpoint.preprocessing)
    dtype = checked_dtype(input_dtype, checkpoint.preprocessing)
    images = calibration_images(given.calibration, checkpoint.preprocessing)
    settings = ExportSettings(precisions, sizes, dtype, images, report)
    with atomic_folder(bundle) as (partial, lock):
        for_onnxruntime = [p for p in precisions if p not in MISSING_PRECISIONS["onnx"]]
        graphs = _export_graphs(checkpoint, partial, settings._replace(precisions=for_onnxruntime))
        engines = []
        if builders:
            sources = _engine_sources(checkpoint, graphs, partial, settings)
            engines = [
                _build_engine(builder, graph, path, partial, report)
                for builder in builders
                for graph, path in sources
            ]
        programs = _export_programs(checkpoint, partial, settings) if with_programs else []
        manifest = _manifest_from(checkpoint, local_path(reference), [*graphs, *programs, *engines])
        lock()  # so that no other export replaces the older bundle while its models are read
        manifest = with_older_artifacts(manifest, partial, bundle, report)
        write_manifest(partial, manifest)
    return manifest


def _export_graphs(
    checkpoint: Checkpoint, folder: Path, settings: ExportSettings
) -> list[Artifact]:
    """Write a checkpoint's ONNX files. Return one manifest entry per precision and input size."""
    # SHA-256 by file name. fp32 and tf32 share a file, which is written once.
    hashes: dict[str, str] = {}
    artifacts = []
    for precision in dict.fromkeys(settings.precisions):
        types = _TYPES.get(precision, precision)
        model = model_for_export(checkpoint, types)
        if precision == "bf16":  # TensorRT-RTX has no transposed convolution in bf16
            replace_transposed_convolution(model)
        for bucket in dict.fromkeys(settings.buckets):
            path = folder / f"model-{types}-{bucket}{ARTIFACT_SUFFIXES['onnx']}"
            if path.name not in hashes:
                settings.report(f"exporting to ONNX in {types} for inputs of {bucket}")
                graph = onnx_from_model(model, bucket, _INPUT_DTYPES[settings.input_dtype])
                quantize = {"int8": quantized_model, "fp8": float8_model}.get(precision)
                if quantize is not None:
                    graph = quantize(graph, settings.calibration, checkpoint.preprocessing, bucket)
                onnx.save(graph, path)
                hashes[path.name] = sha256_of(path)
            artifacts.append(
                Artifact(
                    path=path.name,
                    sha256=hashes[path.name],
                    kind="onnx",
                    precision=precision,
                    input_dtype=settings.input_dtype,
                    bucket=bucket,
                )
            )
    return artifacts


def _export_programs(
    checkpoint: Checkpoint, folder: Path, settings: ExportSettings
) -> list[Artifact]:
    """Write a checkpoint's torch programs, and return their manifest entries.

    If this machine has a GPU, also compile each torch program for this GPU.
    """
    hashes: dict[Path, str] = {}
    compilations = []
    dtype = _INPUT_DTYPES[settings.input_dtype]
    for precision in dict.fromkeys(settings.precisions):
        if precision in MISSING_PRECISIONS["torch"]:
            continue
        types = _TYPES.get(precision, precision)
        model = model_for_export(checkpoint, types)
        optimize_for_gpu(model)
        for bucket in dict.fromkeys(settings.buckets):
            path = folder / f"model-{types}-{bucket}{ARTIFACT_SUFFIXES['torch']}"
            if path not in hashes:
                settings.report(f"exporting a torch program in {types} for inputs of {bucket}")
                write_program(program_from_model(model, bucket, dtype), path)
                hashes[path] = sha256_of(path)
            compilations.append(Compilation(path, precision, bucket, dtype))
    if torch.cuda.is_available():
        settings.report("compiling the torch programs for this machine's GPU")
    return [
        Artifact(
            path=c.path.name,
            sha256=hashes[c.path],
            kind="torch",
            precision=c.precision,
            input_dtype=settings.input_dtype,
            bucket=c.bucket,
            compiled=compiled,
        )
        for c, compiled in zip(compilations, compile_programs(compilations), strict=True)
    ]


def _engine_sources(
    checkpoint: Checkpoint, graphs: Sequence[Artifact], partial: Path, settings: ExportSettings
) -> list[tuple[Artifact, Path]]:
    """Return the manifest entry and path of each ONNX file from which an engine will be built.

    Engines are built from the bundle's ONNX files, with two exceptions:

    - For bf16 and fp8, ONNX files are written to a separate folder, because a bundle has no ONNX
      files in these precisions.
    - If a top-k in the checkpoint's configuration exceeds TensorRT's limit, ONNX files in all
      precisions are written to the separate folder, with the top-k reduced to the limit. All
      engines are built from these files.

    Args:
        checkpoint: checkpoint to export.
        graphs: manifest entries of the new bundle's ONNX files.
        partial: folder of the new bundle. The separate folder is `sources` beside it.
        settings: precisions and other settings of the export.
    """
    limited, changes = limited_checkpoint(checkpoint)
    if changes:
        settings.report(
            f"TensorRT's TopK selects at most {TOP_K_LIMIT} candidates; its engines use {changes}"
        )
        graphs = []
    else:
        others = [p for p in settings.precisions if p in MISSING_PRECISIONS["onnx"]]
        settings = settings._replace(precisions=others)
    folder = partial.with_name("sources")
    folder.mkdir()
    sources = _export_graphs(limited, folder, settings)
    return [(g, partial / g.path) for g in graphs] + [(g, folder / g.path) for g in sources]


def _build_engine(
    builder: EngineBuilder,
    graph: Artifact,
    source: Path,
    folder: Path,
    report: Callable[[str], None],
) -> Artifact:
    """Build an engine from an ONNX file, and return the engine's manifest entry.

    Args:
        builder: builder that determines the kind of engine.
        graph: manifest entry of the ONNX file.
        source: path of the ONNX file.
        folder: folder for the engine file.
        report: function that is called with a progress message before the build.
    """
    report(f"building a {builder.product} engine in {graph.precision} for inputs of {graph.bucket}")
    path = folder / f"model-{graph.precision}-{graph.bucket}{ARTIFACT_SUFFIXES[builder.kind]}"
    build = builder.build(source, path, graph.precision)
    return Artifact(
        path=path.name,
        sha256=sha256_of(path),
        kind=builder.kind,
        precision=graph.precision,
        input_dtype=graph.input_dtype,
        bucket=graph.bucket,
        engine=build,
    )


def model_for_export(checkpoint: Checkpoint, precision: Precision) -> MaskRCNN:
    """Build the checkpoint's model with folded batch norms, in the numeric type of a precision.

    For int8 and fp8 the model is in fp32, because quantization follows after the export to ONNX.
    """
    model = checkpoint.build_model()
    fold_batch_norms(model)
    if precision in ("fp16", "bf16"):
        halve(model, torch.float16 if precision == "fp16" else torch.bfloat16)
    return model


def _manifest_from(checkpoint: Checkpoint, path: Path, artifacts: Sequence[Artifact]) -> Manifest:
    backbone = checkpoint.model_config.backbone
    config = checkpoint.model_config.model_dump_json()
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
            config_sha256=hashlib.sha256(config.encode()).hexdigest(),
            iteration=checkpoint.iteration,
            # JSON has no NaN and no infinity.
            metrics={name: m for name, m in checkpoint.metrics.items() if math.isfinite(m)},
            exported_by=f"maskrcnn-trt {__version__}",
            exported_at=datetime.now(UTC).isoformat(timespec="seconds"),
        ),
    )
