"""Model repository for Triton Inference Server, made from a bundle (exported model)."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..model.bundle.manifest import (
    Artifact,
    BundleError,
    Manifest,
    read_manifest,
    verified_path,
)
from ..model.bundle.spec import INPUT_NAMES, OUTPUT_NAMES

# Triton's names of the platform and of the model file, by kind of artifact.
_PLATFORMS = {"onnx": "onnxruntime_onnx", "tensorrt": "tensorrt_plan"}
_FILES = {"onnx": "model.onnx", "tensorrt": "model.plan"}
# Maximum batch size of ONNX models in Triton. A TensorRT plan has its own limit, an ONNX file none.
_MAX_BATCH = 8
# Time that Triton waits for a batch to fill, in microseconds.
_MAX_DELAY_US = 2000


def triton_repository_from_bundle(bundle: Path, repository: Path) -> tuple[str, ...]:
    """Add a bundle's ONNX files and TensorRT plans to a Triton model repository.

    Each file becomes a model, whose name includes the file's precision, input size and kind. If the
    repository already has a model of this name, the file becomes the model's next version.

    Triton's clients must resize images and pad them to the model's input size. Inputs and outputs
    are those of the module `model/bundle/spec.py`, except that `num_detections` is [B, 1], because
    Triton has no scalars.

    Args:
        bundle: Bundle folder (folder with an exported model).
        repository: Model repository folder, created if missing.

    Returns:
        Names of the models, such as `maskrcnn_resnet50_fpn-fp16-800x1344-onnx`.

    Raises:
        BundleError: the bundle cannot be read, or holds neither ONNX files nor TensorRT plans. Or a
            plan has plugins and a profile of several batch sizes. Such a plan leaks GPU memory in
            Triton.
    """
    manifest = read_manifest(bundle)
    served = [artifact for artifact in manifest.artifacts if artifact.kind in _PLATFORMS]
    if not served:
        raise BundleError(
            f"Triton needs ONNX files or TensorRT plans, but the bundle {bundle} holds neither; "
            "export the model again with --precision fp32 or fp16, which writes ONNX files"
        )
    for artifact in served:
        _check_profiles(bundle, artifact)
    repository.mkdir(parents=True, exist_ok=True)
    names = []
    for artifact in served:
        name = f"{manifest.model_name}-{artifact.precision}-{artifact.bucket}-{artifact.kind}"
        config = "".join(f"{line}\n" for line in _lines(_config(name, manifest, artifact)))
        _add_version(repository, name, verified_path(bundle, artifact), artifact, config)
        names.append(name)
    return tuple(names)


def _check_profiles(bundle: Path, artifact: Artifact) -> None:
    build = artifact.engine
    if build and build.plugins and any(profile.min < profile.max for profile in build.profiles):
        raise BundleError(
            f"{bundle / artifact.path} has plugins and an optimization profile with several batch "
            "sizes; such an engine leaks GPU memory in Triton "
            "(https://github.com/NVIDIA/TensorRT/issues/4849). Export the bundle again with "
            "--triton-repository, which builds one profile per batch size, or with --no-plugins"
        )


def _add_version(
    repository: Path, name: str, source: Path, artifact: Artifact, config: str
) -> None:
    """Add a model to a Triton model repository, or the next version if the model exists.

    A new model's folder is created atomically. In the folder of an existing model, the new version
    is added first, then `config.pbtxt` is replaced.
    """
    model = repository / name
    with tempfile.TemporaryDirectory(dir=repository, prefix=".") as scratch:
        fresh = Path(scratch, name)
        (fresh / "1").mkdir(parents=True)
        shutil.copyfile(source, fresh / "1" / _FILES[artifact.kind])
        (fresh / "config.pbtxt").write_text(config)
        if not model.exists():
            fresh.rename(model)
            return
        versions = [int(path.name) for path in model.iterdir() if path.name.isdecimal()]
        (fresh / "1").rename(model / str(max(versions, default=0) + 1))
        (fresh / "config.pbtxt").replace(model / "config.pbtxt")


def _config(name: str, manifest: Manifest, artifact: Artifact) -> dict[str, Any]:
    """Return the fields of Triton's `config.pbtxt` for a model."""
    profiles = () if artifact.engine is None else artifact.engine.profiles
    max_batch = max((profile.max for profile in profiles), default=_MAX_BATCH)
    inputs, outputs = _tensors_of(manifest, artifact)
    has_ranges = any(profile.min < profile.max for profile in profiles)
    warm = (1, max_batch) if has_ranges or not profiles else (profile.max for profile in profiles)
    text = {
        "class_names": json.dumps(manifest.class_names, ensure_ascii=False),
        "preprocessing": manifest.preprocessing.model_dump_json(),
    }
    if profiles:
        # Triton selects one of these profiles for each batch.
        indices = [str(index) for index in range(len(profiles))]
        settings = {"instance_group": [{"kind": BareWord("KIND_GPU"), "profile": indices}]}
        # Allocate the memory that the current profile needs. By default, each profile's execution
        # context reserves the memory that the largest batch needs.
        text["execution_context_allocation_strategy"] = "ON_PROFILE_CHANGE"
    else:
        settings = _onnx_settings(artifact)
    return {
        "name": name,
        "platform": _PLATFORMS[artifact.kind],
        "max_batch_size": max_batch,
        "input": inputs,
        "output": outputs,
        "dynamic_batching": {
            # Empty if each batch size has its own profile. A batch then waits until it is full or
            # the maximum delay has passed.
            "preferred_batch_size": sorted({p.opt for p in profiles if has_ranges}),
            "max_queue_delay_microseconds": _MAX_DELAY_US,
        },
        "model_warmup": [_warmup(inputs, batch) for batch in dict.fromkeys(warm)],
        "parameters": [
            {"key": key, "value": {"string_value": value}} for key, value in text.items()
        ],
        **settings,
    }


def _onnx_settings(artifact: Artifact) -> dict[str, Any]:
    """Return Triton's settings for an ONNX model: ONNX Runtime's CUDA options for its precision."""
    options = {"prefer_nhwc": "1", "use_tf32": "1"}
    if artifact.precision == "fp32":
        # ONNX Runtime's default, the exhaustive search, picks an fp32 algorithm that takes 72 GB
        # for a batch of eight. `DEFAULT` picks algorithms that need little memory.
        options |= {"use_tf32": "0", "cudnn_conv_algo_search": "DEFAULT"}
    parameters = [{"key": key, "value": value} for key, value in options.items()]
    cuda = {"name": "cuda", "parameters": parameters}
    return {"optimization": {"execution_accelerators": {"gpu_execution_accelerator": [cuda]}}}


def _tensors_of(
    manifest: Manifest, artifact: Artifact
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the fields `input` and `output` of Triton's `config.pbtxt` for an exported model.

    The fields do not depend on the model's precision.
    """
    detections, side = manifest.max_detections, manifest.mask_side
    pixels = {"uint8": "UINT8", "float32": "FP32"}[artifact.input_dtype]
    inputs = (pixels, [3, *artifact.bucket]), ("INT64", [2])
    outputs: Sequence[tuple[str, list[int]]] = (
        ("INT64", []),
        ("FP32", [detections, 4]),
        ("FP32", [detections]),
        ("INT64", [detections]),
        ("FP32", [detections, side, side]),
    )
    return _tensors(INPUT_NAMES, inputs), _tensors(OUTPUT_NAMES, outputs)


def _tensors(
    names: Sequence[str], types_and_sizes: Sequence[tuple[str, list[int]]]
) -> list[dict[str, Any]]:
    tensors: list[dict[str, Any]] = []
    for name, (kind, dims) in zip(names, types_and_sizes, strict=True):
        scalar: dict[str, Any] = {} if dims else {"reshape": {"shape": []}}
        data_type = BareWord(f"TYPE_{kind}")
        tensors.append({"name": name, "data_type": data_type, "dims": dims or [1], **scalar})
    return tensors


def _warmup(inputs: Sequence[dict[str, Any]], batch: int) -> dict[str, Any]:
    """Return a warm-up request of `config.pbtxt` with batch size `batch` and inputs of zeros."""
    zeros = [
        {
            "key": tensor["name"],
            "value": {
                "data_type": tensor["data_type"],
                "dims": tensor["dims"],
                "zero_data": BareWord("true"),
            },
        }
        for tensor in inputs
    ]
    return {"name": f"batch of {batch}", "batch_size": batch, "inputs": zeros}


class BareWord(str):
    """Enum value or boolean, which Protocol Buffers text format writes without quotes."""


def _lines(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a message in Protocol Buffers text format. No schema is needed.

    Args:
        message: Values by field name. A value is a string, a number, a `BareWord`, a mapping (a
            nested message), or a list of such values (a repeated field).
    """
    for name, field in message.items():
        for value in field if isinstance(field, list) else [field]:
            if isinstance(value, Mapping):
                yield f"{name} {{"
                yield from (f"  {line}" for line in _lines(value))
                yield "}"
            else:
                yield f"{name}: {_scalar(value)}"


def _scalar(value: str | int) -> str:
    if isinstance(value, str) and not isinstance(value, BareWord):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
