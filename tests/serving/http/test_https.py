"""HTTPS: client certificates, certificate files that change, connections before the handshake."""

import contextlib
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import trustme
from http_server import HttpAddress, connect, served_over_http
from server_load import wait_until


def write_identity(authority: trustme.CA, certificate: Path, key: Path) -> None:
    issued = authority.issue_cert("127.0.0.1")
    certificate.write_bytes(issued.cert_chain_pems[0].bytes())
    key.write_bytes(issued.private_key_pem.bytes())


def context_trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def test_client_certificates_and_reloaded_files(
    bundle: Path, tmp_path: Path, picture: Callable[..., bytes]
) -> None:
    first, second, clients = trustme.CA(), trustme.CA(), trustme.CA()
    certificate, key, client_ca = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem"))
    write_identity(first, certificate, key)
    clients.cert_pem.write_to_path(str(client_ca))
    identity = clients.issue_cert("client")

    def status(authority: trustme.CA, *, identified: bool = True) -> int:
        context = context_trusting(authority)
        if identified:
            identity.configure_cert(context)
        with httpx.Client(verify=context, timeout=60) as client:
            return client.post(f"{url}/v1/detect", content=picture()).status_code

    def is_served() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return status(first) == 200
        return False

    settings = {"tls_certificate": certificate, "tls_key": key, "tls_client_ca": client_ca}
    with served_over_http(bundle, max_connections=4, **settings) as server:
        url = server.url.replace("http://", "https://")
        with contextlib.ExitStack() as before_handshake:
            for _ in range(4):
                before_handshake.enter_context(connect(server))
            with pytest.raises(httpx.TransportError):
                status(first)
        wait_until(is_served)
        with pytest.raises(httpx.TransportError):
            status(first, identified=False)
        with pytest.raises(httpx.TransportError):
            status(second)
        write_identity(second, certificate, key)
        assert status(second) == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url)
        _send_invalid_server_name(server)
        assert status(second) == 200


def _send_invalid_server_name(server: HttpAddress) -> None:
    """Begin a handshake with a server name that is not ASCII. pytest reports ignored exceptions."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    handshake = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        handshake.do_handshake()
    with connect(server) as client:
        client.sendall(outgoing.read().replace(b"localhost", b"localhos\x8b"))
        assert client.recv(1)
