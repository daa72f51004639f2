"""How a client reaches a server: transport security, retries, and what their failures mean."""

import json
from dataclasses import dataclass
from typing import Any

import grpc

from ..protos.maskrcnn.v1 import detector_pb2 as pb
from .config import MAX_RETRIES
from .errors import AccessError, ClientError, DeadlineError, RefusedError, UnreachableError

_LARGEST_MESSAGE = 2**31 - 1
_OWN_DEADLINE = "Deadline Exceeded"
"""What gRPC says where the client has waited long enough, be there a server or not."""
_SERVICE = pb.DESCRIPTOR.services_by_name["Detector"].full_name


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What a client and a server show each other over TLS; certificates and key are PEM."""

    root_certificate: bytes | None = None
    """Of the authority that signed the server's certificate; none, those that gRPC ships."""
    certificate: bytes | None = None
    """The client's own, where the server asks for one."""
    key: bytes | None = None
    """Of the client's certificate."""
    token: str | None = None
    """Sent with each request as `authorization: Bearer TOKEN`, over TLS only."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("a client's certificate and its key go together; give both or none")

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """The form in which gRPC takes them."""
        channel = grpc.ssl_channel_credentials(self.root_certificate, self.key, self.certificate)
        if self.token is None:
            return channel
        return grpc.composite_channel_credentials(
            channel, grpc.access_token_call_credentials(self.token)
        )


def channel_options(retries: int) -> list[tuple[str, Any]]:
    """Options of a channel of which gRPC itself retries what failed, and spreads the requests.

    A request that a server is too busy for, or that no server answers, is sent again after 0.1 s,
    then three times that and so on, a fifth more or less by chance. Requests go to the addresses
    behind a name in turn.

    Args:
        retries: Times that a request is sent again, 0..MAX_RETRIES.

    Raises:
        ValueError: it is out of range.
    """
    if not 0 <= retries <= MAX_RETRIES:
        raise ValueError(f"retries is {retries}; gRPC retries 0 to {MAX_RETRIES} times")
    config: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
    if retries:
        policy = {
            "maxAttempts": 1 + retries,
            "initialBackoff": "0.1s",
            "maxBackoff": "3s",
            "backoffMultiplier": 3,
            # The last where more come than the server gets to look at, which gRPC ends for it.
            "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED"],
        }
        config["methodConfig"] = [{"name": [{"service": _SERVICE}], "retryPolicy": policy}]
    return [
        ("grpc.service_config", json.dumps(config)),
        # It forgets what is larger, and then cannot send it again; the default is 256 KiB.
        ("grpc.per_rpc_retry_buffer_size", _LARGEST_MESSAGE),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
    ]


def error_from_rpc(error: grpc.RpcError, address: str) -> ClientError:
    """What a call's failure means, in a sentence."""
    status, details = error.code(), error.details() or ""
    if status is grpc.StatusCode.CANCELLED:
        return UnreachableError(
            f"the server at {address} dropped the request; it stopped, or more came at once than "
            "it gets to look at: try again later"
        )
    if status is grpc.StatusCode.UNAVAILABLE:
        return UnreachableError(_unreachable(address, details))
    if status is grpc.StatusCode.DEADLINE_EXCEEDED and details == _OWN_DEADLINE:
        return DeadlineError(
            f"no server answered at {address} in time; start one with `maskrcnn serve BUNDLE`, or "
            "give the one that is there more time with --timeout"
        )
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return UnreachableError(f"what answers at {address} is no server of this kind ({details})")
    if status in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return AccessError(
            f"the server at {address} gives no access ({details}); name the file that holds your "
            "token with --token-file"
        )
    return RefusedError(status, details)


def _unreachable(address: str, details: str) -> str:
    if "CERTIFICATE_VERIFY_FAILED" in details or "Hostname Verification Check failed" in details:
        return (
            f"the certificate of the server at {address} is not to be trusted ({details}); name "
            "the authority that signed it with --root-certificate, and the host as it does"
        )
    if "WRONG_VERSION_NUMBER" in details:
        return f"the server at {address} does not speak TLS; leave out --tls and its certificates"
    if "Failed to create security handshaker" in details:
        return "a certificate or a key is not usable; give --root-certificate and the others as PEM"
    if "Socket closed" in details:
        return (
            f"the server at {address} closed the connection; it stopped, or asks for TLS (--tls) "
            "or for a certificate of yours (--certificate)"
        )
    return f"no server answers at {address} ({details}); start one with `maskrcnn serve BUNDLE`"
