"""Stand-in for grpcurl, built on server reflection and protobuf's JSON format."""

import sys

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)


def run(arguments: list[str]) -> None:
    assert arguments.pop(0) == "-plaintext"
    body = "{}"
    if arguments[0] == "-d":
        body = sys.stdin.read() if arguments[1] == "@" else arguments[1]
        del arguments[:2]
    address, *arguments = arguments
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        match arguments:
            case ["list"]:
                print("\n".join(database.get_services()))
            case ["describe", message]:
                print("\n".join(field.name for field in pool.FindMessageTypeByName(message).fields))
            case [call]:
                service, method = call.split("/")
                kinds = pool.FindServiceByName(service).methods_by_name[method]
                request = json_format.Parse(body, GetMessageClass(kinds.input_type)())
                answer = channel.unary_unary(
                    f"/{call}",
                    request_serializer=lambda message: message.SerializeToString(),
                    response_deserializer=GetMessageClass(kinds.output_type).FromString,
                )(request, timeout=60)
                print(json_format.MessageToJson(answer))


if __name__ == "__main__":
    run(sys.argv[1:])
