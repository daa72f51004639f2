"""Server reflection: what services there are, and of what messages."""

from collections.abc import Iterable

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection


def add_reflection(services: Iterable[ServiceDescriptor], server: grpc.aio.Server) -> None:
    """Let clients ask a server for its services.

    Args:
        services: Those it has, in whatever pools; their files import no others.
        server: The server, which is not started yet.
    """
    pool = DescriptorPool()
    names = [reflection.SERVICE_NAME]
    for service in services:
        pool.AddSerializedFile(service.file.serialized_pb)
        names.append(service.full_name)
    reflection.enable_server_reflection(names, server, pool)
