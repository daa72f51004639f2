"""TLS, with and without certificates of the clients, over real connections."""

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from maskrcnn_trt.serving.client import AsyncDetectorClient, Credentials
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.errors import AccessError, ServingError, UnreachableError
from maskrcnn_trt.serving.server import detection_server
from maskrcnn_trt.serving.transport.certificates import server_credentials


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def write_identity(authority: trustme.CA, name: str, folder: Path) -> tuple[Path, Path]:
    """The files of a certificate and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    issued = authority.issue_cert(name, "127.0.0.1")
    certificate.write_bytes(issued.cert_chain_pems[0].bytes())
    key.write_bytes(issued.private_key_pem.bytes())
    return certificate, key


@pytest.fixture
def identity(authority: trustme.CA, tmp_path: Path) -> dict[str, Any]:
    """Settings of who the server is."""
    certificate, key = write_identity(authority, "localhost", tmp_path)
    return {"tls_certificate": certificate, "tls_key": key}


@contextlib.asynccontextmanager
async def served(bundle: Path, **settings: Any) -> AsyncIterator[str]:
    config = ServeConfig(host="localhost", port=0, drain_delay_s=0, **settings)
    async with detection_server(bundle, config) as address:
        yield address


def is_reached_by_triton(address: str, **credentials: Any) -> bool:
    """Whether Triton's client gets an answer over TLS."""
    files = {name: str(path) for name, path in credentials.items()}
    with InferenceServerClient(address, ssl=True, **files) as client:
        try:
            return bool(client.is_server_ready(client_timeout=20))
        except InferenceServerException:
            return False


async def is_reached_with(address: str, **credentials: Any) -> bool:
    """Whether our client gets an answer over TLS."""
    shown = Credentials(**credentials)
    async with AsyncDetectorClient(address, retries=0, credentials=shown) as client:
        try:
            await client.model()
        except UnreachableError:
            return False
        return True


def test_clients_reach_a_server_that_proves_who_it_is(
    bundle: Path,
    authority: trustme.CA,
    identity: dict[str, Path],
    tmp_path: Path,
    picture: Callable[..., bytes],
) -> None:
    root, tokens = tmp_path / "root.pem", tmp_path / "tokens"
    root.write_bytes(authority.cert_pem.bytes())
    tokens.write_text("s3cret\n")

    async def ask() -> None:
        async with served(bundle, token_file=tokens, **identity) as address:
            for token in ("s3cret", "wrong"):
                shown = Credentials(root_certificate=root.read_bytes(), token=token)
                async with AsyncDetectorClient(address, credentials=shown) as client:
                    if token == "wrong":
                        with pytest.raises(AccessError, match="no token that this server knows"):
                            await client.detect(picture())
                    else:
                        assert len(await client.detect(picture()))
            assert await asyncio.to_thread(is_reached_by_triton, address, root_certificates=root)
            async with AsyncDetectorClient(address, retries=0) as client:
                with pytest.raises(UnreachableError, match="asks for TLS"):
                    await client.model()

    asyncio.run(ask())


def test_server_asks_clients_who_they_are(
    bundle: Path, authority: trustme.CA, identity: dict[str, Path], tmp_path: Path
) -> None:
    root = tmp_path / "root.pem"
    root.write_bytes(authority.cert_pem.bytes())
    friend = write_identity(authority, "friend", tmp_path)
    stranger = write_identity(trustme.CA(), "stranger", tmp_path)

    async def ask() -> None:
        async with served(bundle, tls_client_ca=root, **identity) as address:
            for who, welcome in ((friend, True), (stranger, False), (None, False)):
                ours: dict[str, Any] = {"root_certificate": root.read_bytes()}
                tritons: dict[str, Any] = {"root_certificates": root}
                if who:
                    certificate, key = who
                    ours |= {"certificate": certificate.read_bytes(), "key": key.read_bytes()}
                    tritons |= {"certificate_chain": certificate, "private_key": key}
                assert await is_reached_with(address, **ours) is welcome
                reached = await asyncio.to_thread(is_reached_by_triton, address, **tritons)
                assert reached is welcome

    asyncio.run(ask())


def test_new_certificate_holds_for_new_connections(
    bundle: Path,
    authority: trustme.CA,
    identity: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    successor = trustme.CA()
    old, new = authority.cert_pem.bytes(), successor.cert_pem.bytes()

    async def ask() -> None:
        shown = Credentials(root_certificate=old)
        async with (
            served(bundle, **identity) as address,
            AsyncDetectorClient(address, credentials=shown) as client,
        ):
            await client.model()
            identity["tls_key"].write_bytes(b"half a key")
            assert await is_reached_with(address, root_certificate=old)
            assert "stays in force" in caplog.text
            write_identity(successor, "localhost", tmp_path)
            assert not await is_reached_with(address, root_certificate=old)
            assert await is_reached_with(address, root_certificate=new)
            await client.model()  # over the connection that there is

    asyncio.run(ask())


def encrypted(key: bytes) -> bytes:
    return serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"password"),
    )


Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey


def write_self_signed(key: Key, identity: dict[str, Path]) -> bytes:
    """Make a key that of the server, and return its certificate, which is signed by itself."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    builder = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now - day, now + day)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    )
    digest = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    certificate = builder.sign(key, digest).public_bytes(serialization.Encoding.PEM)
    identity["tls_certificate"].write_bytes(certificate)
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    identity["tls_key"].write_bytes(key.private_bytes(*pem, serialization.NoEncryption()))
    return certificate


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), None])
def test_keys_that_are_taken_are_reached(
    bundle: Path, identity: dict[str, Path], curve: ec.EllipticCurve | None
) -> None:
    key = ec.generate_private_key(curve) if curve else rsa.generate_private_key(65537, 2048)
    root = write_self_signed(key, identity)

    async def ask() -> None:
        async with served(bundle, **identity) as address:
            assert await is_reached_with(address, root_certificate=root)

    asyncio.run(ask())


@pytest.mark.parametrize("curve", [ec.SECP256K1(), ec.SECP521R1(), None])
def test_keys_with_which_clients_reach_nobody_are_refused(
    bundle: Path,
    authority: trustme.CA,
    identity: dict[str, Path],
    caplog: pytest.LogCaptureFixture,
    curve: ec.EllipticCurve | None,
) -> None:
    key = ec.generate_private_key(curve) if curve else ed25519.Ed25519PrivateKey.generate()

    async def ask() -> None:
        async with served(bundle, **identity) as address:
            write_self_signed(key, identity)
            assert await is_reached_with(address, root_certificate=authority.cert_pem.bytes())

    asyncio.run(ask())
    sentence = f"{identity['tls_certificate']} was made for a kind of key with which"
    assert f"stays in force: {sentence}" in caplog.text
    with pytest.raises(ServingError, match=r"give one for an RSA key, or .* P-256") as caught:
        server_credentials(ServeConfig(**identity))
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("setting", "content", "message"),
    [
        ("tls_certificate", None, "tls_certificate cannot be read: .*: No such file"),
        ("tls_key", None, "tls_key cannot be read: .*: No such file"),
        ("tls_client_ca", None, "tls_client_ca cannot be read: .*: No such file"),
        ("tls_certificate", "no PEM", "cannot be used together"),
        ("tls_key", "no PEM", "cannot be used together"),
        ("tls_key", "of another", r"cannot be used together \(KEY_VALUES_MISMATCH\)"),
        ("tls_key", "encrypted", "the key of tls_key is encrypted; decrypt it"),
        ("tls_client_ca", "no PEM", "holds no certificate as PEM"),
        ("tls_client_ca", "", "holds no certificate as PEM"),
    ],
)
def test_faults_of_files_are_one_sentence(
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
    elif content == "encrypted":
        path.write_bytes(encrypted(identity["tls_key"].read_bytes()))
    elif content is not None:
        path.write_text(content)
    config = ServeConfig(**(identity | {setting: path}))
    with pytest.raises(ServingError, match=message) as caught:
        server_credentials(config)
    assert "\n" not in str(caught.value)


def test_settings_that_go_together(tmp_path: Path) -> None:
    assert server_credentials(ServeConfig()) is None
    for names in (["tls_certificate"], ["tls_key"], ["tls_key", "tls_client_ca"]):
        with pytest.raises(ValueError, match="tls_certificate and tls_key go together"):
            ServeConfig(**dict.fromkeys(names, tmp_path))
    with pytest.raises(ValueError, match="tls_client_ca needs"):
        ServeConfig(tls_client_ca=tmp_path)
