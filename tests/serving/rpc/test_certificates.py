"""TLS with and without client certificates, over real connections."""

import datetime
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from in_process_server import served_in_thread
from scraped_metrics import Metrics
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from maskrcnn_trt.serving.client import Credentials, DetectorClient
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.errors import AccessError, ServingError, UnreachableError
from maskrcnn_trt.serving.rpc.certificates import server_certificate

TOKEN = "s3cret"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def write_identity(authority: trustme.CA, name: str, folder: Path) -> tuple[Path, Path]:
    """Write a certificate and its key to files."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    issued = authority.issue_cert(name, "127.0.0.1")
    certificate.write_bytes(issued.cert_chain_pems[0].bytes())
    key.write_bytes(issued.private_key_pem.bytes())
    return certificate, key


def settings_of(identity: tuple[Path, Path]) -> dict[str, Any]:
    return {"tls_certificate": identity[0], "tls_key": identity[1]}


@pytest.fixture
def identity(authority: trustme.CA, tmp_path: Path) -> dict[str, Any]:
    """Settings of the server's certificate and key."""
    return settings_of(write_identity(authority, "localhost", tmp_path))


class Server(NamedTuple):
    """Running server with TLS and the token TOKEN, the files of its certificate and key."""

    address: str
    identity: dict[str, Path]
    metrics: Metrics


@pytest.fixture(scope="module")
def running(
    wide_bundle: Path, authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("identity")
    identity = settings_of(write_identity(authority, "localhost", folder))
    (folder / "tokens").write_text(TOKEN)
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    settings = {"host": "localhost", "token_file": folder / "tokens", **identity}
    with served_in_thread(wide_bundle, metrics_port=port, **settings) as address:
        yield Server(address, identity, Metrics(f"http://localhost:{port}/metrics"))


@pytest.fixture
def server(running: Server, authority: trustme.CA) -> Server:
    """Return the shared server with a certificate of the authority."""
    write_identity(authority, "localhost", running.identity["tls_key"].parent)
    return running


def triton_connects(address: str, **credentials: Any) -> bool:
    """Return whether Triton's client gets a response over TLS."""
    files = {name: str(path) for name, path in credentials.items()}
    with InferenceServerClient(address, ssl=True, **files) as client:
        try:
            return bool(client.is_server_ready(client_timeout=20))
        except InferenceServerException:
            return False


def client_connects(address: str, **credentials: Any) -> bool:
    """Return whether our client gets a response over TLS."""
    both = Credentials(token=TOKEN, **credentials)
    with DetectorClient(address, retries=0, credentials=both) as client:
        try:
            client.model()
        except UnreachableError:
            return False
        return True


def test_clients_connect_with_tls_and_token(
    server: Server, authority: trustme.CA, tmp_path: Path, picture: Callable[..., bytes]
) -> None:
    root = tmp_path / "root.pem"
    root.write_bytes(authority.cert_pem.bytes())
    known, unknown = (
        Credentials(root_certificate=root.read_bytes(), token=token) for token in (TOKEN, "wrong")
    )
    with DetectorClient(server.address, credentials=known) as client:
        assert len(client.detect(picture()))
    with (
        DetectorClient(server.address, credentials=unknown) as client,
        pytest.raises(AccessError, match="no valid token"),
    ):
        client.detect(picture())
    assert triton_connects(server.address, root_certificates=root)
    with (
        DetectorClient(server.address, retries=0) as client,
        pytest.raises(UnreachableError, match="requires TLS"),
    ):
        client.model()


def test_clients_need_a_certificate_of_the_authority(
    wide_bundle: Path, authority: trustme.CA, identity: dict[str, Path], tmp_path: Path
) -> None:
    root = tmp_path / "root.pem"
    root.write_bytes(authority.cert_pem.bytes())
    known = write_identity(authority, "known", tmp_path)
    unknown = write_identity(trustme.CA(), "unknown", tmp_path)
    with served_in_thread(wide_bundle, host="localhost", tls_client_ca=root, **identity) as address:
        for identity_files, expected in ((known, True), (unknown, False), (None, False)):
            ours: dict[str, Any] = {"root_certificate": root.read_bytes()}
            tritons: dict[str, Any] = {"root_certificates": root}
            if identity_files:
                certificate, key = identity_files
                ours |= {"certificate": certificate.read_bytes(), "key": key.read_bytes()}
                tritons |= {"certificate_chain": certificate, "private_key": key}
            assert client_connects(address, **ours) is expected
            assert triton_connects(address, **tritons) is expected


def test_new_certificate_applies_to_new_connections(
    server: Server, authority: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    successor = trustme.CA()
    old, new = authority.cert_pem.bytes(), successor.cert_pem.bytes()
    credentials = Credentials(root_certificate=old, token=TOKEN)
    with DetectorClient(server.address, credentials=credentials) as client:
        client.model()
        server.identity["tls_key"].write_bytes(b"half a key")
        assert client_connects(server.address, root_certificate=old)
        assert "stays in use" in caplog.text
        write_identity(successor, "localhost", server.identity["tls_key"].parent)
        assert not client_connects(server.address, root_certificate=old)
        assert client_connects(server.address, root_certificate=new)
        client.model()  # over the existing connection


def encrypted(key: bytes) -> bytes:
    return serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"password"),
    )


Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey


def write_self_signed(
    key: Key, identity: dict[str, Path], days: tuple[float, float] = (-1, 1)
) -> bytes:
    """Give the server a key and a self-signed certificate. Return the certificate as PEM.

    Args:
        key: The key.
        identity: Settings of the files.
        days: Start and end of the certificate's validity, in days from now.
    """
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    start, end = (now + datetime.timedelta(days=count) for count in days)
    builder = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, start, end)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    )
    digest = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    certificate = builder.sign(key, digest).public_bytes(serialization.Encoding.PEM)
    identity["tls_certificate"].write_bytes(certificate)
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    identity["tls_key"].write_bytes(key.private_bytes(*pem, serialization.NoEncryption()))
    return certificate


def test_key_algorithms(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    for key in (
        ec.generate_private_key(ec.SECP256R1()),
        ec.generate_private_key(ec.SECP384R1()),
        rsa.generate_private_key(65537, 2048),
    ):
        root = write_self_signed(key, server.identity)
        assert client_connects(server.address, root_certificate=root)
    for unsupported in (
        ec.generate_private_key(ec.SECP256K1()),
        ec.generate_private_key(ec.SECP521R1()),
        ed25519.Ed25519PrivateKey.generate(),
    ):
        write_self_signed(unsupported, server.identity)
        assert client_connects(server.address, root_certificate=root)
        with pytest.raises(ServingError, match=r"RSA, P-256 or P-384") as caught:
            server_certificate(ServeConfig(**server.identity))
        assert str(server.identity["tls_certificate"]) in str(caught.value)
        assert f"stays in use: {caught.value}" in caplog.text
        caplog.clear()


async def test_expired_certificates_replace_no_valid_one(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    # Over 40 years, so that the end is a GeneralizedTime.
    for end in (90, 20_000):
        valid = write_self_signed(key, server.identity, (-1, end))
        assert client_connects(server.address, root_certificate=valid)
        days_left = await server.metrics.value("maskrcnn_certificate_days_left")
        assert days_left == pytest.approx(end, abs=0.1)
    for days, reason in (((-2, -1), "expired"), ((1, 2), "is not valid before")):
        write_self_signed(key, server.identity, days)
        assert client_connects(server.address, root_certificate=valid)
        assert f"{server.identity['tls_certificate']} {reason}" in caplog.text
        assert await server.metrics.value("maskrcnn_certificate_days_left") == pytest.approx(
            20_000, abs=0.1
        )


def test_an_expired_certificate_is_used_only_with_a_warning(
    identity: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    write_self_signed(key, identity, (-3, -2))
    certificate = server_certificate(ServeConfig(**identity))
    assert certificate is not None
    assert "expired" in caplog.text
    # Another expired one is as good.
    write_self_signed(key, identity, (-3, -1))
    assert certificate.days_left == pytest.approx(-1, abs=0.1)
    assert certificate.problem is not None
    write_self_signed(key, identity)
    assert certificate.days_left == pytest.approx(1, abs=0.1)
    assert certificate.problem is None


@pytest.mark.parametrize(
    ("setting", "content", "message"),
    [
        ("tls_certificate", None, "tls_certificate .*faulty: No such file"),
        ("tls_key", None, "tls_key .*faulty: No such file"),
        ("tls_client_ca", None, "tls_client_ca .*faulty: No such file"),
        ("tls_certificate", "no PEM", "faulty .*PEM"),
        ("tls_key", "no PEM", "faulty .*PEM"),
        ("tls_certificate", "other label", "TRUSTED CERTIFICATE in .*faulty; .*openssl x509"),
        ("tls_key", "of another", "KEY_VALUES_MISMATCH"),
        ("tls_key", "encrypted", "tls_key is encrypted; .*openssl pkey"),
        ("tls_client_ca", "no PEM", "faulty contains no certificate"),
        ("tls_client_ca", "", "faulty contains no certificate"),
    ],
)
def test_invalid_files_raise(
    authority: trustme.CA,
    identity: dict[str, Path],
    tmp_path: Path,
    setting: str,
    content: str | None,
    message: str,
) -> None:
    path = tmp_path / "faulty"
    if content == "of another":
        path = write_identity(authority, "other", tmp_path)[1]
    elif content == "other label":
        pem = identity["tls_certificate"].read_text()
        path.write_text(pem.replace("CERTIFICATE", "TRUSTED CERTIFICATE"))
    elif content == "encrypted":
        path.write_bytes(encrypted(identity["tls_key"].read_bytes()))
    elif content is not None:
        path.write_text(content)
    config = ServeConfig(**(identity | {setting: path}))
    with pytest.raises(ServingError, match=message) as caught:
        server_certificate(config)
    assert "\n" not in str(caught.value)


def test_dependent_settings(tmp_path: Path) -> None:
    assert server_certificate(ServeConfig()) is None
    for names in (["tls_certificate"], ["tls_key"], ["tls_key", "tls_client_ca"]):
        with pytest.raises(ValueError, match="tls_certificate and tls_key"):
            ServeConfig(**dict.fromkeys(names, tmp_path))
    with pytest.raises(ValueError, match="tls_client_ca needs"):
        ServeConfig(tls_client_ca=tmp_path)
