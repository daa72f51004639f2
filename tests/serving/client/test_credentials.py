"""Client credentials: TLS, client certificates and tokens."""

import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import trustme
from click.testing import CliRunner
from stub_server import IMAGE, StubDetector, both_clients, stub_server

from maskrcnn_trt.serving.client import Credentials
from maskrcnn_trt.serving.commands.client import client
from maskrcnn_trt.serving.detections import Detections
from maskrcnn_trt.serving.errors import AccessError, UnreachableError


class Identity(NamedTuple):
    """A certificate and its key, PEM."""

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


@both_clients
def test_token_is_sent_over_tls(authority: trustme.CA, detect: Callable[..., Detections]) -> None:
    root = authority.cert_pem.bytes()
    with stub_server(StubDetector(token="s3cret"), server_credentials(authority)) as address:
        credentials = Credentials(root_certificate=root, token="s3cret")
        assert detect(address, credentials=credentials).height == len(IMAGE)
        for token in (None, "wrong"):
            with pytest.raises(AccessError, match=r"the token is wrong.*--token-file"):
                detect(address, credentials=Credentials(root_certificate=root, token=token))


@both_clients
def test_client_certificate_is_presented(
    authority: trustme.CA, detect: Callable[..., Detections]
) -> None:
    root = authority.cert_pem.bytes()
    mutual = server_credentials(authority, root_certificates=root, require_client_auth=True)
    with stub_server(StubDetector(), mutual) as address:
        certificate, key = identity(authority, "client")
        credentials = Credentials(root_certificate=root, certificate=certificate, key=key)
        assert detect(address, credentials=credentials).height == len(IMAGE)
        with pytest.raises(UnreachableError, match="--certificate"):
            detect(address, credentials=Credentials(root_certificate=root), retries=0)
    with pytest.raises(ValueError, match="go together"):
        Credentials(key=key)


@both_clients
def test_token_without_tls_must_be_requested(
    authority: trustme.CA, detect: Callable[..., Detections]
) -> None:
    with stub_server(StubDetector(token="s3cret")) as address:
        credentials = Credentials(token="s3cret", tls=False)
        assert "s3cret" not in repr(credentials)
        assert detect(address, credentials=credentials).height == len(IMAGE)
        with pytest.raises(UnreachableError, match="--no-tls"):
            detect(address, credentials=Credentials(token="s3cret"), retries=0)
    with pytest.raises(ValueError, match="require TLS"):
        Credentials(root_certificate=authority.cert_pem.bytes(), tls=False)


def test_command_sends_its_credentials(authority: trustme.CA, tmp_path: Path) -> None:
    image, token, root = tmp_path / "a.jpg", tmp_path / "token", tmp_path / "root.pem"
    image.write_bytes(IMAGE)
    token.write_text("# of this machine\n\ns3cret  # until May\n")
    root.write_bytes(authority.cert_pem.bytes())
    output = tmp_path / "detections"
    trust = ["--root-certificate", str(root)]

    def run(address: str, *words: str | Path) -> Any:
        options = address, image, "-o", output, "--format", "coco", *words
        return CliRunner().invoke(client, [*map(str, options)])

    with stub_server(StubDetector(token="s3cret"), server_credentials(authority)) as address:
        accepted = run(address, *trust, "--token-file", token)
        refused = run(address, *trust)
    assert accepted.exit_code == 0, accepted.output
    assert [path.name for path in output.iterdir()] == ["detections.json"]
    assert isinstance(refused.exception, AccessError)
    with stub_server(StubDetector(token="s3cret")) as address:
        without_tls = run(address, "--token-file", token, "--no-tls")
    assert without_tls.exit_code == 0, without_tls.output
    (binary := tmp_path / "root.der").write_bytes(ssl.PEM_cert_to_DER_cert(root.read_text()))
    for options in (["--root-certificate", binary], ["--certificate", root, "--key", root]):
        assert f"{options[-1]} contains no" in run(address, *options).stderr
    assert "--certificate and --key go together" in run(address, "--certificate", root).stderr
    assert "--no-tls" in run(address, *trust, "--no-tls").stderr
    for content, message in (
        (b"\xff\xfe\x00", "cannot read"),
        (b"# mine\n", "no token"),
        (b"one\ntwo\n", "holds 2 tokens"),
        (b"Bearer one\n", "line 1 of"),
    ):
        token.write_bytes(content)
        result = run("localhost:1", "--token-file", token)
        assert result.exit_code == 2
        assert str(token) in result.stderr
        assert message in result.stderr


@pytest.mark.parametrize("token", ["s3cret\n", " s3cret", "s3 cret", "s3crét", "", b"s3cret"])
def test_invalid_token_is_not_quoted(token: Any) -> None:
    with pytest.raises(ValueError, match=r"token is invalid; .* letters, digits") as caught:
        Credentials(token=token)
    assert "cr" not in str(caught.value)


@pytest.mark.parametrize("pem", [b"", b"-----BEGIN JUNK-----", "ca.pem", Path("ca.pem")])
@pytest.mark.parametrize("name", ["root_certificate", "certificate", "key"])
def test_invalid_certificate_is_named(name: str, pem: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} is not a .* in PEM format; .*read_bytes\(\)"):
        Credentials(**{name: pem})


@both_clients
def test_credentials_of_another_type_are_rejected(detect: Callable[..., Detections]) -> None:
    with pytest.raises(TypeError, match=r"credentials is of type str; .*token=TOKEN"):
        detect("localhost:1", credentials="s3cret")


@both_clients
def test_tls_errors_name_the_remedy(
    authority: trustme.CA, detect: Callable[..., Detections]
) -> None:
    untrusting = Credentials(root_certificate=trustme.CA().cert_pem.bytes())
    trusting = Credentials(root_certificate=authority.cert_pem.bytes())
    with stub_server(StubDetector(), server_credentials(authority)) as address:
        with pytest.raises(UnreachableError, match="--root-certificate"):
            detect(address, credentials=untrusting, retries=0)
        by_number = address.replace("localhost", "127.0.0.1")
        with pytest.raises(UnreachableError, match="host name"):
            detect(by_number, credentials=trusting, retries=0)
        with pytest.raises(UnreachableError, match="--tls"):
            detect(address, retries=0)
        damaged = Credentials(root_certificate=b"-----BEGIN CERTIFICATE-----\nno certificate")
        with pytest.raises(UnreachableError, match=r"invalid.*--root-certificate"):
            detect(address, retries=0, credentials=damaged)
    past, future = (datetime.now(UTC) + timedelta(days=days) for days in (-1, 1))
    for dates in ({"not_after": past}, {"not_before": future}):
        expired = authority.issue_cert("localhost", **dates)
        chain = expired.private_key_pem.bytes(), expired.cert_chain_pems[0].bytes()
        with (
            stub_server(StubDetector(), grpc.ssl_server_credentials([chain])) as address,
            pytest.raises(UnreachableError, match=r"not valid today.*clock"),
        ):
            detect(address, credentials=trusting, retries=0)
    with (
        stub_server(StubDetector()) as address,
        pytest.raises(UnreachableError, match="TLS"),
    ):
        detect(address, credentials=trusting, retries=0)
