"""Methods of Triton's protocol that this server does not support."""

from functools import partial
from typing import Any, Final, NoReturn

import grpc

from ...protos.inference import open_inference_pb2 as pb
from ..grpc_calls import CallContext

_SERVICE: Final = f"/{pb.DESCRIPTOR.services_by_name['GRPCInferenceService'].full_name}/"

SHARED_MEMORY: Final = "shared memory is not supported; send the tensors within the request"
# Error message by prefix of the method's name.
_ANSWERS: Final = {
    "SystemSharedMemory": SHARED_MEMORY,
    "CudaSharedMemory": SHARED_MEMORY,
    "TraceSetting": "trace settings cannot be changed; start the server with --tracing true",
    "LogSettings": "log settings cannot be changed; start the server with --log-level",
}
# Error message by HTTP path below `/v2`.
HTTP_ANSWERS: Final = {
    "/systemsharedmemory/{rest:path}": SHARED_MEMORY,
    "/cudasharedmemory/{rest:path}": SHARED_MEMORY,
    "/trace/setting": _ANSWERS["TraceSetting"],
    "/models/{model}/trace/setting": _ANSWERS["TraceSetting"],
    "/logging": _ANSWERS["LogSettings"],
}


class UnsupportedMethods(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in stubs only
    """Handler that rejects methods of Triton's protocol that this server does not support.

    The status is UNIMPLEMENTED, and the message explains the reason. Without this handler, gRPC
    would respond with the message "Method not found!".
    """

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return a handler that rejects an unsupported method. Return None for other methods."""
        method = handler_call_details.method
        for name, answer in _ANSWERS.items():
            if method.startswith(f"{_SERVICE}{name}"):
                # ServerLiveRequest has no fields, so any message parses as one.
                parse = pb.ServerLiveRequest.FromString
                return grpc.unary_unary_rpc_method_handler(partial(_abort, answer), parse)
        return None


async def _abort(answer: str, _: object, context: CallContext) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, answer)
