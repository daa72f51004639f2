"""Translation of gRPC errors to the clients' exceptions."""

import re
from typing import Any
from urllib.parse import unquote

import grpc

from ...protos.maskrcnn.v1 import detector_pb2 as pb
from ..errors import AccessError, ClientError, DeadlineError, RefusedError, UnreachableError
from ..messages import REQUEST_ID_KEY
from .image_requests import TOO_LARGE_REMEDY

# Full name of the gRPC service.
SERVICE = pb.DESCRIPTOR.services_by_name["Detector"].full_name

# Texts in errors that gRPC generates on the client; their status alone is ambiguous.
_CLIENT_DEADLINE = "Deadline Exceeded"
_MESSAGE_TOO_LARGE = "message larger than max"
_CERTIFICATE_ERRORS = "CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed"
_CONNECTION_CLOSED = "Socket closed", "Connection reset", "Broken pipe"
# Address in an error, as in `ipv6:%5B::1%5D:8500: Connection refused`.
_FAILED_ADDRESS = re.compile(r"ipv[46]:(\S+):\d+: ")


def error_from_rpc(error: grpc.RpcError, address: str, timeout_s: float) -> ClientError:
    """Return the `ClientError` for a failed call.

    - `UnreachableError`: CANCELLED (the server dropped the request), UNIMPLEMENTED (the server at
      the address is not a detector), or an UNAVAILABLE that gRPC generated on the client.
    - `DeadlineError`: a DEADLINE_EXCEEDED that gRPC generated on the client.
    - `AccessError`: UNAUTHENTICATED or PERMISSION_DENIED.
    - `RefusedError`: every other status, such as an UNAVAILABLE that the server sent.

    Args:
        error: The gRPC error.
        address: The server's address, for the message.
        timeout_s: The deadline of the call in seconds, for the message.
    """
    status, details = error.code(), error.details() or ""
    if status is grpc.StatusCode.CANCELLED:
        return UnreachableError(
            f"the server at {address} dropped the request because it is stopping or overloaded; "
            "try again later"
        )
    if status is grpc.StatusCode.UNAVAILABLE and not _is_from_server(error):
        return UnreachableError(_unreachable_message(address, details))
    if status is grpc.StatusCode.DEADLINE_EXCEEDED and details == _CLIENT_DEADLINE:
        return DeadlineError(
            f"no result came from {address} within {timeout_s:g} s; the server is overloaded or "
            "unreachable: allow more time with --timeout or timeout_s, or start a server with "
            "`maskrcnn serve BUNDLE`"
        )
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return UnreachableError(
            f"the server at {address} does not offer the service {SERVICE} ({details}); check the "
            "address"
        )
    if status in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return AccessError(
            f"the server at {address} denied access ({details}); name the file that holds your "
            "token with --token-file"
        )
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and _MESSAGE_TOO_LARGE in details:
        # Not RESOURCE_EXHAUSTED, because the same request would fail again.
        return RefusedError(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the request is larger than the server at {address} accepts ({details}); "
            f"{TOO_LARGE_REMEDY}",
        )
    return RefusedError(status, details)


def _is_from_server(error: grpc.RpcError) -> bool:
    # The server sends a request ID with each status. A status that gRPC generates has none.
    metadata: Any = error.trailing_metadata() or ()
    return any(key == REQUEST_ID_KEY for key, _ in metadata)


def _unreachable_message(address: str, details: str) -> str:
    if any(text in details for text in _CERTIFICATE_ERRORS):
        return (
            f"the certificate of the server at {address} cannot be verified ({details}); name the "
            "CA that signed it with --root-certificate, and use a host name from the certificate"
        )
    if "WRONG_VERSION_NUMBER" in details:
        return f"the server at {address} does not speak TLS; give --no-tls, and no certificates"
    if "Failed to create security handshaker" in details:
        return (
            "a certificate or key is invalid; give --root-certificate, --certificate and --key as "
            "PEM files"
        )
    if any(text in details for text in _CONNECTION_CLOSED):
        return (
            f"the server at {address} closed the connection; it stopped, or requires TLS (--tls) "
            "or a client certificate (--certificate)"
        )
    if "ping timeout" in details:
        return (
            f"the server at {address} stopped responding ({details}); its machine or the network "
            "failed: try again later"
        )
    if "max connection age" in details:
        return (
            f"the server at {address} ended the connection because of its age before it had "
            "answered everything; send the unanswered images again, or start the server with a "
            "greater --max-connection-age-s"
        )
    # gRPC reports the error of one of a host's addresses, not always of that with the server.
    failed = _FAILED_ADDRESS.search(details)
    is_named = failed is not None and unquote(failed[1]).strip("[]") not in address
    hint = "; if one runs already, connect to its IP address to see its error" if is_named else ""
    return (
        f"no server answers at {address} ({details}); start one with `maskrcnn serve BUNDLE`{hint}"
    )
