"""Our copy of the protocol beside Triton's, in one process."""

from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto
from tritonclient.grpc import model_config_pb2, service_pb2

from maskrcnn_trt.protos.inference import open_inference_pb2

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


def test_fields_are_those_of_triton() -> None:
    for message in messages_of(open_inference_pb2.DESCRIPTOR):
        if not message.full_name.endswith(".PropertiesEntry"):
            theirs = fields_of(THEIRS[message.full_name])
            for name, field in fields_of(message).items():
                assert name in KSERVE_ALONE or field == theirs[name], message.full_name


def enums_of(file: FileDescriptor) -> dict[str, dict[str, int]]:
    enums = [*file.enum_types_by_name.values()]
    enums += [enum for message in messages_of(file) for enum in message.enum_types]
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
