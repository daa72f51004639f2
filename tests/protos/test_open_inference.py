"""Our copy of the protocol beside Triton's, in one process."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto
from tritonclient.grpc import model_config_pb2, service_pb2

from maskrcnn_trt.protos.inference import open_inference_pb2

FOLDER = Path(open_inference_pb2.__file__).parent
# Fields that KServe has and Triton has not.
KSERVE_ALONE = {"properties"}


def messages_of(file: FileDescriptor) -> Iterator[Descriptor]:
    waiting = list(file.message_types_by_name.values())
    while waiting:
        message = waiting.pop()
        yield message
        waiting.extend(message.nested_types)


def fields_of(message: Descriptor) -> dict[str, FieldDescriptorProto]:
    proto = DescriptorProto()
    message.CopyToProto(proto)
    for field in proto.field:
        for name in ("oneof_index", "json_name"):  # which the wire does not see
            field.ClearField(name)
    return {field.name: field for field in proto.field}


THEIRS = {
    m.full_name: m for f in (service_pb2, model_config_pb2) for m in messages_of(f.DESCRIPTOR)
}


@pytest.mark.parametrize(
    "message", [*messages_of(open_inference_pb2.DESCRIPTOR)], ids=lambda message: message.full_name
)
def test_fields_are_those_of_triton(message: Descriptor) -> None:
    if message.full_name.endswith(".PropertiesEntry"):
        return
    theirs = fields_of(THEIRS[message.full_name])
    for name, field in fields_of(message).items():
        assert name in KSERVE_ALONE or field == theirs[name]


def enums_of(file: FileDescriptor) -> dict[str, dict[str, int]]:
    enums = [*file.enum_types_by_name.values()]
    for message in messages_of(file):
        enums.extend(message.enum_types)
    return {e.full_name: {n: v.number for n, v in e.values_by_name.items()} for e in enums}


def test_enums_are_those_of_triton() -> None:
    ours = enums_of(open_inference_pb2.DESCRIPTOR)
    assert "inference.DataType" in ours
    assert ours.items() <= enums_of(model_config_pb2.DESCRIPTOR).items()


def test_calls_are_those_of_triton() -> None:
    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    ours = open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert ours.full_name == theirs.full_name
    for call in ours.methods:
        same = theirs.methods_by_name[call.name]
        assert call.input_type.full_name == same.input_type.full_name
        assert call.output_type.full_name == same.output_type.full_name
        assert call.client_streaming == same.client_streaming
        assert call.server_streaming == same.server_streaming


def test_generated_files_are_up_to_date(tmp_path: Path) -> None:
    (tmp_path / "maskrcnn_trt").symlink_to(FOLDER.parent.parent)
    (tmp_path / "out").mkdir()
    name = "maskrcnn_trt/protos/inference/open_inference.proto"
    options = [f"--{kind}={tmp_path / 'out'}" for kind in ("pyi_out", "grpc_python_out")]
    options.append(f"--descriptor_set_out={tmp_path / 'out' / 'open_inference.binpb'}")
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={tmp_path}"]
    subprocess.run([*command, *options, name], check=True)
    made = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(made) == 3
    for path in made:
        assert path.read_bytes() == (FOLDER / path.name).read_bytes(), "run `make protos`"
