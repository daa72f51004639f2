"""What the failures of a client's calls mean."""

from typing import Any

import grpc

from ..errors import AccessError, ClientError, DeadlineError, RefusedError, UnreachableError
from ..messages import REQUEST_ID_KEY

SMALLER = "send a smaller image, or give the server a higher --max-message-mb"
"""What helps where a request is too large."""

_OWN_DEADLINE = "Deadline Exceeded"
"""What gRPC says where the client has waited long enough, be there a server or not."""
_TOO_LARGE = "message larger than max"
"""With the status of a server that is too busy, though to send it again is of no use."""
_CLOSED = "Socket closed", "Connection reset", "Broken pipe"


def error_from_rpc(error: grpc.RpcError, address: str, timeout_s: float) -> ClientError:
    """What a call to an address with so much time means by its failure, in a sentence.

    It is a RefusedError where the server itself spoke, UNAVAILABLE included: then a server is there
    that says why it does not detect.
    """
    status, details = error.code(), error.details() or ""
    if status is grpc.StatusCode.CANCELLED:
        return UnreachableError(
            f"the server at {address} dropped the request; it stopped, or more came at once than "
            "it gets to look at: try again later"
        )
    if status is grpc.StatusCode.UNAVAILABLE and not _is_answer(error):
        return UnreachableError(_unreachable(address, details))
    if status is grpc.StatusCode.DEADLINE_EXCEEDED and details == _OWN_DEADLINE:
        return DeadlineError(
            f"no result came from {address} within {timeout_s:g} s; the server is too busy, or not "
            "there: give it more time by --timeout or timeout_s, or start one with `maskrcnn serve "
            "BUNDLE`"
        )
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return UnreachableError(f"what answers at {address} is no server of this kind ({details})")
    if status in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return AccessError(
            f"the server at {address} gives no access ({details}); name the file that holds your "
            "token with --token-file"
        )
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in details:
        return RefusedError(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the request is larger than the server at {address} takes ({details}); {SMALLER}",
        )
    return RefusedError(status, details)


def _is_answer(error: grpc.RpcError) -> bool:
    """Whether the server spoke; a status that gRPC makes up for nobody's answer has no such id."""
    metadata: Any = error.trailing_metadata() or ()
    return any(key == REQUEST_ID_KEY for key, _ in metadata)


def _unreachable(address: str, details: str) -> str:
    if "CERTIFICATE_VERIFY_FAILED" in details or "Hostname Verification Check failed" in details:
        return (
            f"the certificate of the server at {address} is not to be trusted ({details}); name "
            "the authority that signed it with --root-certificate, and the host as it does"
        )
    if "WRONG_VERSION_NUMBER" in details:
        return f"the server at {address} does not speak TLS; give --no-tls, and no certificates"
    if "Failed to create security handshaker" in details:
        return "a certificate or a key is not usable; give --root-certificate and the others as PEM"
    if any(text in details for text in _CLOSED):
        return (
            f"the server at {address} closed the connection; it stopped, or asks for TLS (--tls) "
            "or for a certificate of yours (--certificate)"
        )
    if "ping timeout" in details:
        return (
            f"the server at {address} fell silent ({details}); its machine or the way there "
            "failed: try again later"
        )
    if "max connection age" in details:
        return (
            f"the server at {address} ended the connection, as it does with old ones, before all "
            "was answered; send again what was not, or give it a greater --max-connection-age-s"
        )
    return f"no server answers at {address} ({details}); start one with `maskrcnn serve BUNDLE`"
