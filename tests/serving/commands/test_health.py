"""Command `health` for a served and an unloaded model, with and without TLS and tokens."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import trustme
from click.testing import CliRunner
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import HealthServicer, add_HealthServicer_to_server
from in_process_server import served_in_thread
from triton_requests import MODEL
from tritonclient.grpc import InferenceServerClient

from maskrcnn_trt.serving.commands.client import health


def result_of(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(health, [str(word) for word in words])
    return result.exit_code, f"{result.output}{result.exception or ''}"


def test_served_model_is_healthy_and_an_unloaded_one_is_not(bundle: Path) -> None:
    with served_in_thread(bundle) as address:
        assert result_of(address) == (0, "SERVING\n")
        assert result_of(address, "--service", "maskrcnn.v1.Detector") == (0, "SERVING\n")
        code, output = result_of(address, "--service", "resnet")
        assert code == 1
        assert "'resnet'; give the name of" in output
        with InferenceServerClient(address) as triton:
            triton.unload_model(MODEL)
        code, output = result_of(address)
        assert code == 1
        assert "NOT_SERVING" in output
        assert "unloaded, no worker process is up," in output
        assert result_of(address, "--service", "liveness") == (0, "SERVING\n")
    code, output = result_of(address)
    assert code == 1
    assert address in output


def test_certificate_is_verified(bundle: Path, tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    names = ("cert.pem", "key.pem", "ca.pem", "other.pem")
    certificate, key, trusted, untrusted = (tmp_path / name for name in names)
    certificate.write_bytes(issued.cert_chain_pems[0].bytes())
    key.write_bytes(issued.private_key_pem.bytes())
    authority.cert_pem.write_to_path(str(trusted))
    other.cert_pem.write_to_path(str(untrusted))
    with served_in_thread(bundle, tls_certificate=certificate, tls_key=key) as address:
        assert result_of(address, "--root-certificate", trusted) == (0, "SERVING\n")
        for options in (("--root-certificate", untrusted), ()):
            code, output = result_of(address, *options)
            assert code == 1
            assert address in output
        command = [sys.executable, "-m", "maskrcnn_trt", "health", address, "--tls"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stderr.startswith("Error: the certificate of the server")
    assert result.stderr.count("\n") == 1  # no lines of gRPC


class GuardedHealth(HealthServicer):  # type: ignore[misc]  # untyped package
    """Health service behind a proxy that requires the token `s3cret`."""

    def Check(self, _: object, context: Any) -> pb.HealthCheckResponse:  # noqa: N802
        if dict(context.invocation_metadata()).get("authorization") != "Bearer s3cret":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no valid token")
        return pb.HealthCheckResponse(status=pb.HealthCheckResponse.SERVING)


def test_token_is_sent(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    server = grpc.server(ThreadPoolExecutor(1))
    add_HealthServicer_to_server(GuardedHealth(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        code, output = result_of(address)
        assert code == 1
        assert "--token-file" in output
        assert result_of(address, "--token-file", token, "--no-tls") == (0, "SERVING\n")
    finally:
        server.stop(None).wait()
