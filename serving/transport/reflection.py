"""Server reflection: what services there are, and of what messages."""

from collections.abc import Iterable

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection, reflection_pb2


def add_reflection(services: Iterable[ServiceDescriptor], server: grpc.aio.Server) -> None:
    """Let clients ask a server for its services.

    Args:
        services: Those it has, in whatever pools; their files import no others.
        server: The server, which is not started yet.
    """
    own = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
    everything = (*services, own)
    pool = DescriptorPool()
    for service in everything:
        pool.AddSerializedFile(service.file.serialized_pb)
    names = [service.full_name for service in everything]
    reflection.enable_server_reflection(names, server, pool)
