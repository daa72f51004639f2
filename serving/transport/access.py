"""Who may call what: bearer tokens, and calls that change what is served."""

import hashlib
import hmac
import ipaddress
import logging
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

from ..config import ServeConfig
from ..errors import ForbiddenError, UnauthenticatedError
from ..tokens import tokens_in
from .renewal import Renewed

_log = logging.getLogger(__name__)

_INFERENCE = "/inference.GRPCInferenceService/"

ADMIN_METHODS = frozenset(
    {f"{_INFERENCE}RepositoryModelLoad", f"{_INFERENCE}RepositoryModelUnload"}
)
"""Calls that change what is served."""

_HEALTH_METHODS = tuple(
    f"{_INFERENCE}{name}" for name in ("ServerLive", "ServerReady", "ModelReady")
)
_OPEN_PREFIXES = ("/grpc.health.v1.Health/", "/grpc.reflection.", *_HEALTH_METHODS)

Metadata = Iterable[tuple[str, str | bytes]]


def is_open(method: str) -> bool:
    """Whether anyone may call a method, as `/package.Service/Method`: for health or reflection."""
    return method.startswith(_OPEN_PREFIXES)


class AccessPolicy:
    """What `token_file` and `admin_token_file` allow.

    Without the first, anyone may detect; with it, who has a token of either file. Admin calls take
    a token of the second; if there is neither file, they are for clients on this machine, or with
    `local_admin` off for nobody.
    """

    def __init__(self, config: ServeConfig) -> None:
        """Read the tokens.

        Raises:
            ServingError: a file cannot be read, or holds something else.
        """
        self._tokens = _tokens_of(config.token_file)
        self._admin_tokens = _tokens_of(config.admin_token_file)
        self._local_admin = config.local_admin
        if (self._tokens or self._admin_tokens) and not config.tls_certificate:
            _warn_unless_loopback(config.host)

    def check(self, method: str, metadata: Metadata, peer: str) -> None:
        """Let a call pass.

        Args:
            method: What is called, as `/package.Service/Method`.
            metadata: What the client sent with the call.
            peer: Its address, as gRPC writes it.

        Raises:
            UnauthenticatedError: the call needs a token, and has none that is known.
            ForbiddenError: the call needs another token, or may not come from elsewhere.
        """
        if is_open(method):
            return
        if self._tokens is None and method not in ADMIN_METHODS:
            return
        digest = _digest(_bearer_token(metadata))
        is_admin = _holds(self._admin_tokens, digest)
        is_user = is_admin or _holds(self._tokens, digest)
        if method in ADMIN_METHODS:
            self._check_admin(peer, is_admin=is_admin, is_user=is_user)
        elif not is_user:
            raise _unauthenticated()

    def _check_admin(self, peer: str, *, is_admin: bool, is_user: bool) -> None:
        if is_admin:
            return
        if self._tokens is None and self._admin_tokens is None:
            if not self._local_admin:
                raise ForbiddenError(
                    "nobody may change what is served; the server's setting admin_token_file lets "
                    "those do so who have a token"
                )
            if not _is_loopback(peer):
                raise ForbiddenError(
                    "only clients on the server's own machine may change what it serves; its "
                    "setting admin_token_file lets others do so"
                )
        elif is_user or self._admin_tokens is None:
            raise ForbiddenError(
                "to change what is served takes a token of the file that the server's setting "
                "admin_token_file names"
            )
        else:
            raise _unauthenticated()


_Tokens = Renewed[tuple[bytes, ...]]


def _tokens_of(path: Path | None) -> _Tokens | None:
    return None if path is None else Renewed([path], lambda: tuple(map(_digest, tokens_in(path))))


def _holds(tokens: _Tokens | None, digest: bytes) -> bool:
    known = tokens.latest() if tokens else ()
    # All are compared, so that the time that it takes tells nothing.
    return sum(hmac.compare_digest(digest, other) for other in known) > 0


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _bearer_token(metadata: Metadata) -> str:
    """The token of a call; empty if it has none."""
    for name, value in metadata:
        if name == "authorization" and isinstance(value, str):
            scheme, _, token = value.partition(" ")
            if scheme.lower() == "bearer":
                return token.strip()
    return ""


def _unauthenticated() -> UnauthenticatedError:
    return UnauthenticatedError(
        "the call has no token that this server knows; send one as `authorization: Bearer TOKEN`"
    )


def _is_loopback(peer: str) -> bool:
    """Whether a peer, such as `ipv4:127.0.0.1:50000` or `ipv6:[::1]:50000`, is on this machine."""
    host = unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
    return _is_loopback_host(host)


def _is_loopback_host(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _warn_unless_loopback(host: str) -> None:
    if not _is_loopback_host(host):
        _log.warning(
            "tokens travel unencrypted to %s, where others can read them; set tls_certificate and "
            "tls_key",
            host,
        )
