"""Clients before a server that asks who they are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import trustme
from click.testing import CliRunner
from stub_server import IMAGE, Detector, both_ways, serving

from maskrcnn_trt.serving.client import Credentials
from maskrcnn_trt.serving.client_command import client
from maskrcnn_trt.serving.detections import Detections
from maskrcnn_trt.serving.errors import AccessError, UnreachableError


class Identity(NamedTuple):
    """Someone's certificate and key, PEM."""

    certificate: bytes
    key: bytes


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def identity(authority: trustme.CA, name: str) -> Identity:
    issued = authority.issue_cert(name)
    return Identity(issued.cert_chain_pems[0].bytes(), issued.private_key_pem.bytes())


def server_credentials(authority: trustme.CA, **options: Any) -> grpc.ServerCredentials:
    certificate, key = identity(authority, "localhost")
    return grpc.ssl_server_credentials([(key, certificate)], **options)


@both_ways
def test_tls_carries_the_token(authority: trustme.CA, ask: Callable[..., Detections]) -> None:
    root = authority.cert_pem.bytes()
    with serving(Detector(token="s3cret"), server_credentials(authority)) as address:
        shown = Credentials(root_certificate=root, token="s3cret")
        assert ask(address, credentials=shown).height == len(IMAGE)
        for token in (None, "wrong"):
            with pytest.raises(AccessError, match=r"the token is wrong.*--token-file"):
                ask(address, credentials=Credentials(root_certificate=root, token=token))


@both_ways
def test_server_that_knows_its_clients(
    authority: trustme.CA, ask: Callable[..., Detections]
) -> None:
    root = authority.cert_pem.bytes()
    mutual = server_credentials(authority, root_certificates=root, require_client_auth=True)
    with serving(Detector(), mutual) as address:
        certificate, key = identity(authority, "client")
        shown = Credentials(root_certificate=root, certificate=certificate, key=key)
        assert ask(address, credentials=shown).height == len(IMAGE)
        with pytest.raises(UnreachableError, match=r"a certificate of yours \(--certificate\)"):
            ask(address, credentials=Credentials(root_certificate=root), retries=0)
    with pytest.raises(ValueError, match="go together"):
        Credentials(key=key)


@both_ways
def test_token_without_tls_is_for_who_asks_for_it(ask: Callable[..., Detections]) -> None:
    with serving(Detector(token="s3cret")) as address:
        shown = Credentials(token="s3cret", tls=False)
        assert ask(address, credentials=shown).height == len(IMAGE)
        with pytest.raises(UnreachableError, match="does not speak TLS; give --no-tls"):
            ask(address, credentials=Credentials(token="s3cret"), retries=0)
    with pytest.raises(ValueError, match="certificates are for TLS"):
        Credentials(root_certificate=b"PEM", tls=False)


def test_command_shows_its_credentials(authority: trustme.CA, tmp_path: Path) -> None:
    image, token, root = tmp_path / "a.jpg", tmp_path / "token", tmp_path / "root.pem"
    image.write_bytes(IMAGE)
    token.write_text("# of this machine\n\ns3cret  # until May\n")
    root.write_bytes(authority.cert_pem.bytes())
    output = tmp_path / "found"
    with serving(Detector(token="s3cret"), server_credentials(authority)) as address:
        words = [address, str(image), "-o", str(output), "--format", "coco"]
        trust = ["--root-certificate", str(root)]
        accepted = CliRunner().invoke(client, [*words, *trust, "--token-file", str(token)])
        refused = CliRunner().invoke(client, [*words, *trust])
    assert accepted.exit_code == 0, accepted.output
    assert [path.name for path in output.iterdir()] == ["detections.json"]
    assert isinstance(refused.exception, AccessError)
    half = CliRunner().invoke(client, [*words, "--certificate", str(root)])
    assert "--certificate and --key go together" in half.stderr
    both = CliRunner().invoke(client, [*words, *trust, "--no-tls"])
    assert "certificates are for TLS; leave them or --no-tls out" in both.stderr


def test_command_shows_a_token_where_something_else_encrypts(tmp_path: Path) -> None:
    image, token = tmp_path / "a.jpg", tmp_path / "token"
    image.write_bytes(IMAGE)
    token.write_text("s3cret\n")
    with serving(Detector(token="s3cret")) as address:
        words = [address, str(image), "-o", str(tmp_path / "found"), "--format", "coco"]
        result = CliRunner().invoke(client, [*words, "--token-file", str(token), "--no-tls"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe\x00", "cannot be read"),
        (b"# mine\n", "holds no token; write one a line"),
        (b"one\ntwo\n", "holds 2 tokens; leave only your own in it"),
        (b"Bearer one\n", "line 1 of"),
    ],
)
def test_command_takes_one_token_from_its_file(tmp_path: Path, content: bytes, words: str) -> None:
    image, token = tmp_path / "a.jpg", tmp_path / "token"
    image.write_bytes(IMAGE)
    token.write_bytes(content)
    result = CliRunner().invoke(client, ["localhost:1", str(image), "--token-file", str(token)])
    assert result.exit_code == 2
    assert str(token) in result.stderr
    assert words in result.stderr


@both_ways
def test_faults_of_tls_are_named(authority: trustme.CA, ask: Callable[..., Detections]) -> None:
    stranger = Credentials(root_certificate=trustme.CA().cert_pem.bytes())
    friend = Credentials(root_certificate=authority.cert_pem.bytes())
    with serving(Detector(), server_credentials(authority)) as address:
        with pytest.raises(UnreachableError, match=r"not to be trusted.*--root-certificate"):
            ask(address, credentials=stranger, retries=0)
        by_number = address.replace("localhost", "127.0.0.1")
        with pytest.raises(UnreachableError, match="not to be trusted"):
            ask(by_number, credentials=friend, retries=0)
        with pytest.raises(UnreachableError, match=r"asks for TLS \(--tls\)"):
            ask(address, retries=0)
        with pytest.raises(UnreachableError, match="not usable; give --root-certificate"):
            ask(address, retries=0, credentials=Credentials(root_certificate=b"no certificate"))
    with (
        serving(Detector()) as address,
        pytest.raises(UnreachableError, match="does not speak TLS"),
    ):
        ask(address, credentials=friend, retries=0)
