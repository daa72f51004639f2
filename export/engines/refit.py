"""Refit: insertion of weights into engines that were built without weights."""

from pathlib import Path
from typing import Any

from ...model.atomic_files import atomic_write
from ...model.bundle.manifest import (
    Artifact,
    BundleError,
    EngineBuild,
    Manifest,
    read_manifest,
    sha256_of,
    verified_path,
    write_manifest,
)
from ...plugins.tensorrt.log import errors_of, shared_logger
from ..errors import EngineError
from .engine_graph import load_model, plugin_graph_from_model
from .inspection import load_engine


def refit_bundle(bundle: Path) -> list[str]:
    """Insert weights into those engines of a bundle (exported model) that were built without them.

    The weights come from the bundle's ONNX files. The engine files and the manifest are replaced.
    Engines with weights do not change.

    Returns:
        Paths of the engines that received weights, relative to the bundle folder.

    Raises:
        BundleError: the bundle is damaged, or lacks the ONNX file with an engine's weights.
        ModuleNotFoundError: TensorRT is not installed.
        EngineError: TensorRT cannot load an engine on this machine, or cannot insert the weights.
    """
    manifest = read_manifest(bundle)
    refitted = []
    for index, artifact in enumerate(manifest.artifacts):
        build = artifact.engine
        if build is None or not build.stripped:
            continue
        plan = verified_path(bundle, artifact)
        assert artifact.kind in ("tensorrt", "tensorrt-rtx")
        model = _model_for(bundle, manifest, artifact)
        trt, engine = load_engine(plan, artifact.kind)
        refit_engine(trt, engine, model)
        with atomic_write(plan) as file:
            file.write(bytes(engine.serialize()))
        build = build.model_copy(update={"stripped": False})
        facts = {"engine": build, "sha256": sha256_of(plan)}
        artifacts = list(manifest.artifacts)
        artifacts[index] = artifact.model_copy(update=facts)
        manifest = manifest.model_copy(update={"artifacts": tuple(artifacts)})
        write_manifest(bundle, manifest)
        refitted.append(artifact.path)
    return refitted


def refit_engine(trt: Any, engine: Any, model: bytes) -> None:
    """Insert the weights of an ONNX model into a loaded engine that was built from this model.

    Raises:
        EngineError: a weight is missing, or TensorRT cannot insert the weights.
    """
    with errors_of(trt) as errors:
        refitter = trt.Refitter(engine, shared_logger(trt))
        onnx_refitter = trt.OnnxParserRefitter(refitter, shared_logger(trt))
        if onnx_refitter.refit_from_bytes(model) and refitter.refit_cuda_engine():
            return
        missing = refitter.get_missing_weights()
    reason = errors[0] if errors else f"no weights for {', '.join(missing[:3]) or 'the engine'}"
    raise EngineError(
        f"cannot insert the weights into the engine: {reason}; build the engine again without "
        "--strip-weights"
    )


def _model_for(bundle: Path, manifest: Manifest, artifact: Artifact) -> bytes:
    """Return the serialized ONNX model from which an engine was built.

    Raises:
        BundleError: the bundle lacks this model's ONNX file, or the file is damaged.
    """
    graphs = manifest.artifacts_for(artifact.precision, "onnx")
    graph = next((graph for graph in graphs if graph.bucket == artifact.bucket), None)
    if graph is None:
        raise BundleError(
            f"{artifact.path} needs the weights of an ONNX file in {artifact.precision} for inputs "
            f"of {artifact.bucket}, but the bundle has none; export the checkpoint again"
        )
    model = load_model(verified_path(bundle, graph))
    assert isinstance(artifact.engine, EngineBuild)
    if artifact.engine.plugins:
        plugin_graph_from_model(model)
    return model.SerializeToString()
