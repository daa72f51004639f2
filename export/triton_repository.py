"""A model repository that Triton Inference Server serves as it stands, made of a bundle."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from ..model.manifest import (
    Artifact,
    BatchProfile,
    BundleError,
    Manifest,
    read_manifest,
    verified_path,
)
from .text_format import BareWord, text_from_message

_PLATFORMS = {"onnx": "onnxruntime_onnx", "tensorrt": "tensorrt_plan"}
_FILES = {"onnx": "model.onnx", "tensorrt": "model.plan"}
_MAX_BATCH = 8
"""Of ONNX files, which take any number of images; a plan says what it takes."""
_MAX_DELAY_US = 2000
_TRITON_TYPES = {
    "UINT8": "TYPE_UINT8",
    "INT64": "TYPE_INT64",
    "FLOAT": "TYPE_FP32",
    "FLOAT16": "TYPE_FP16",
}


def triton_repository_from_bundle(bundle: Path, repository: Path) -> tuple[str, ...]:
    """Add a bundle's ONNX files and TensorRT plans to a model repository.

    Each becomes a model, or a further version of the model that has its name there already, and
    takes and gives the tensors of `model.spec`. Triton pads nothing: images come in the pixels of
    the model's input size. It has no scalars either: `num_detections` is [B, 1] there.

    Args:
        bundle: Folder that export wrote.
        repository: Folder of models; made if missing.

    Returns:
        Names of the models: the bundle's, precision, input size, and `onnx` or `tensorrt`.

    Raises:
        BundleError: there is no bundle, or nothing in it that Triton serves.
    """
    manifest = read_manifest(bundle)
    served = [artifact for artifact in manifest.artifacts if artifact.kind in _PLATFORMS]
    if not served:
        raise BundleError(
            f"{bundle} holds neither ONNX files nor TensorRT plans for Triton; export it with "
            "--precision fp32 or fp16"
        )
    repository.mkdir(parents=True, exist_ok=True)
    names = []
    for artifact in served:
        name = f"{manifest.model_name}-{artifact.precision}-{artifact.bucket}-{artifact.kind}"
        config = _config(name, bundle, manifest, artifact)
        _add_version(repository, name, verified_path(bundle, artifact), artifact, config)
        names.append(name)
    return tuple(names)


def _add_version(
    repository: Path, name: str, source: Path, artifact: Artifact, config: str
) -> None:
    """Put a model or its next version in its place when it is whole."""
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


def _config(name: str, bundle: Path, manifest: Manifest, artifact: Artifact) -> str:
    """What Triton is to know of a model, as `config.pbtxt`."""
    profiles = () if artifact.engine is None else artifact.engine.profiles
    max_batch = max((profile.max for profile in profiles), default=_MAX_BATCH)
    inputs, outputs = _tensors_of(bundle, manifest, artifact)
    text = {
        "class_names": json.dumps(manifest.class_names, ensure_ascii=False),
        "preprocessing": manifest.preprocessing.model_dump_json(),
    }
    return text_from_message(
        {
            "name": name,
            "platform": _PLATFORMS[artifact.kind],
            "max_batch_size": max_batch,
            "input": inputs,
            "output": outputs,
            "dynamic_batching": {
                "preferred_batch_size": sorted({profile.opt for profile in profiles}),
                "max_queue_delay_microseconds": _MAX_DELAY_US,
            },
            "model_warmup": [_warmup(inputs, batch) for batch in dict.fromkeys((1, max_batch))],
            "parameters": [
                {"key": key, "value": {"string_value": value}} for key, value in text.items()
            ],
            **(_plan_settings(profiles) if profiles else _onnx_settings(artifact)),
        }
    )


def _plan_settings(profiles: Sequence[BatchProfile]) -> dict[str, Any]:
    """Let Triton choose the optimisation profile that fits a batch best."""
    indices = [str(index) for index in range(len(profiles))]
    return {"instance_group": [{"kind": BareWord("KIND_GPU"), "profile": indices}]}


def _onnx_settings(artifact: Artifact) -> dict[str, Any]:
    """Hold ONNX Runtime's CUDA provider to the precision; on a CPU there is nothing to say."""
    options = {"prefer_nhwc": "1", "use_tf32": "1"}
    if artifact.precision == "fp32":
        # Without tensor cores, cuDNN's first choice took 72 GB for a batch of eight.
        options |= {"use_tf32": "0", "cudnn_conv_algo_search": "DEFAULT"}
    parameters = [{"key": key, "value": value} for key, value in options.items()]
    cuda = {"name": "cuda", "parameters": parameters}
    return {"optimization": {"execution_accelerators": {"gpu_execution_accelerator": [cuda]}}}


def _tensors_of(
    bundle: Path, manifest: Manifest, artifact: Artifact
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Inputs and outputs; those of a plan are those of the ONNX file that it was built from."""
    (source,) = (
        candidate
        for candidate in manifest.artifacts_for(artifact.precision)
        if candidate.bucket == artifact.bucket
    )
    graph = onnx.load(verified_path(bundle, source)).graph
    return [_tensor(info) for info in graph.input], [_tensor(info) for info in graph.output]


def _tensor(info: onnx.ValueInfoProto) -> dict[str, Any]:
    kind = onnx.TensorProto.DataType.Name(info.type.tensor_type.elem_type)
    batch, *dims = (axis.dim_value for axis in info.type.tensor_type.shape.dim)
    assert batch == 0, f"{info.name} has no dynamic batch"
    tensor = {"name": info.name, "data_type": BareWord(_TRITON_TYPES[kind]), "dims": dims or [1]}
    return tensor if dims else {**tensor, "reshape": {"shape": []}}


def _warmup(inputs: Sequence[dict[str, Any]], batch: int) -> dict[str, Any]:
    """A batch of zeros to run before the model counts as ready."""
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
