import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as triton
from tritonclient.utils import triton_to_np_dtype

from maskrcnn_trt.export.engines.builder import profiles_from_batches
from maskrcnn_trt.export.triton_repository import triton_repository_from_bundle
from maskrcnn_trt.model.bundle.manifest import (
    Artifact,
    BatchProfile,
    BundleError,
    EngineBuild,
    read_manifest,
    write_manifest,
)

ORT_TYPES = {"tensor(uint8)": "UINT8", "tensor(int64)": "INT64", "tensor(float)": "FP32"}


def config_of(model: Path) -> triton.ModelConfig:
    return text_format.Parse((model / "config.pbtxt").read_text(), triton.ModelConfig())


def type_name(number: int) -> str:
    return triton.DataType.Name(number).removeprefix("TYPE_")


def shape_in_model(tensor: triton.ModelInput | triton.ModelOutput) -> list[int]:
    return list(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)


def test_configuration_matches_the_onnx_file(bundle: Path, tmp_path: Path) -> None:
    names = triton_repository_from_bundle(bundle, tmp_path / "new" / "models")
    model_name = read_manifest(bundle).model_name
    assert names == (f"{model_name}-fp32-96x160-onnx", f"{model_name}-fp32-160x96-onnx")
    assert {path.name for path in (tmp_path / "new" / "models").iterdir()} == set(names)
    for name in names:
        model = tmp_path / "new" / "models" / name
        config = config_of(model)
        assert (config.name, config.platform) == (name, "onnxruntime_onnx")
        assert config.max_batch_size == 8
        assert config.HasField("dynamic_batching")
        session = onnxruntime.InferenceSession(model / "1" / "model.onnx")
        for tensors, expected in (
            (config.input, session.get_inputs()),
            (config.output, session.get_outputs()),
        ):
            assert [tensor.name for tensor in tensors] == [tensor.name for tensor in expected]
            for tensor, own in zip(tensors, expected, strict=True):
                assert type_name(tensor.data_type) == ORT_TYPES[own.type]
                assert shape_in_model(tensor) == own.shape[1:]
        assert json.loads(config.parameters["class_names"].string_value) == ["disc", "box", "ring"]
        (cuda,) = config.optimization.execution_accelerators.gpu_execution_accelerator
        assert cuda.name == "cuda"
        options = ("use_tf32", "cudnn_conv_algo_search")
        assert [cuda.parameters[name] for name in options] == ["0", "DEFAULT"]


def test_warm_up_runs(bundle: Path, tmp_path: Path) -> None:
    name = triton_repository_from_bundle(bundle, tmp_path)[0]
    session = onnxruntime.InferenceSession(tmp_path / name / "1" / "model.onnx")
    config = config_of(tmp_path / name)
    assert [warmup.batch_size for warmup in config.model_warmup] == [1, 8]
    for warmup in config.model_warmup:
        zeros = {
            key: np.zeros(
                (warmup.batch_size, *value.dims), triton_to_np_dtype(type_name(value.data_type))
            )
            for key, value in warmup.inputs.items()
            if value.zero_data
        }
        outputs = session.run(None, zeros)
        assert all(len(output) == warmup.batch_size for output in outputs)


def test_second_export_adds_a_version(bundle: Path, tmp_path: Path) -> None:
    names = triton_repository_from_bundle(bundle, tmp_path)
    assert triton_repository_from_bundle(bundle, tmp_path) == names
    for name in names:
        assert {p.name for p in (tmp_path / name).iterdir()} == {"1", "2", "config.pbtxt"}
        assert (tmp_path / name / "2" / "model.onnx").is_file()


def test_bundles_of_programs_and_damaged_ones_raise(bundle: Path, tmp_path: Path) -> None:
    damaged, models = with_plan(bundle, tmp_path / "b"), tmp_path / "models"
    (damaged / "model.plan").write_bytes(b"plam")
    with pytest.raises(BundleError, match=r"model.plan"):
        triton_repository_from_bundle(damaged, models)
    assert not list(models.glob("*-tensorrt"))
    manifest = read_manifest(bundle)
    (program,) = (a.model_copy(update={"kind": "torch"}) for a in manifest.artifacts[:1])
    write_manifest(damaged, manifest.model_copy(update={"artifacts": (program,)}))
    with pytest.raises(BundleError, match=r"ONNX files.*--precision fp32"):
        triton_repository_from_bundle(damaged, models)


def with_plan(
    bundle: Path,
    folder: Path,
    plugins: dict[str, str] | None = None,
    profiles: tuple[tuple[int, int], ...] = ((1, 1), (1, 16)),
) -> Path:
    """Copy the bundle and add a fake plan with profiles from minimum to maximum batch size."""
    shutil.copytree(bundle, folder)
    manifest = read_manifest(folder)
    (folder / "model.plan").write_bytes(b"plan")
    plan = Artifact(
        path="model.plan",
        sha256=hashlib.sha256(b"plan").hexdigest(),
        kind="tensorrt",
        precision="fp32",
        input_dtype="uint8",
        bucket=manifest.artifacts[0].bucket,
        engine=EngineBuild(
            runtime_version="11.4.0",
            compute_capabilities=("9.0",),
            cuda_version="13",
            platform="linux-x86_64",
            plugins=plugins or {},
            profiles=tuple(BatchProfile(min=low, opt=high, max=high) for low, high in profiles),
        ),
    )
    write_manifest(folder, manifest.model_copy(update={"artifacts": (*manifest.artifacts, plan)}))
    return folder


def test_plan_sets_profiles_and_batch_limit(bundle: Path, tmp_path: Path) -> None:
    names = triton_repository_from_bundle(with_plan(bundle, tmp_path / "b"), tmp_path / "models")
    assert len(names) == 3
    model = tmp_path / "models" / names[2]
    assert names[2].endswith("-fp32-96x160-tensorrt")
    assert (model / "1" / "model.plan").read_bytes() == b"plan"
    config, of_graph = config_of(model), config_of(tmp_path / "models" / names[0])
    assert (config.platform, config.max_batch_size) == ("tensorrt_plan", 16)
    assert list(config.instance_group[0].profile) == ["0", "1"]
    assert config.instance_group[0].kind == triton.ModelInstanceGroup.KIND_GPU
    assert list(config.dynamic_batching.preferred_batch_size) == [1, 16]
    assert not config.HasField("optimization")
    assert list(config.input) == list(of_graph.input)
    assert list(config.output) == list(of_graph.output)


def test_plan_with_plugins_has_one_batch_size_per_profile(bundle: Path, tmp_path: Path) -> None:
    """In Triton each profile has a context, whose shape then never changes."""
    plugins = {"maskrcnn::NmsKeep": "1"}
    with pytest.raises(BundleError, match="several batch sizes"):
        triton_repository_from_bundle(with_plan(bundle, tmp_path / "a", plugins), tmp_path / "m")
    assert not (tmp_path / "m").exists()
    sizes = [profile.max for profile in profiles_from_batches((1, 4), one_per_size=True)]
    assert sizes == [1, 2, 3, 4]
    exact = with_plan(bundle, tmp_path / "b", plugins, tuple((n, n) for n in sizes))
    config = config_of(tmp_path / "m" / triton_repository_from_bundle(exact, tmp_path / "m")[2])
    assert list(config.instance_group[0].profile) == ["0", "1", "2", "3"]
    assert [warmup.batch_size for warmup in config.model_warmup] == sizes
    assert not config.dynamic_batching.preferred_batch_size
    strategy = config.parameters["execution_context_allocation_strategy"].string_value
    assert strategy == "ON_PROFILE_CHANGE"
