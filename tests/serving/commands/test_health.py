"""Command `health` for a served and an unloaded model, with and without TLS."""

from pathlib import Path

import trustme
from click.testing import CliRunner
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
        assert "resnet" in output
        with InferenceServerClient(address) as triton:
            triton.unload_model(MODEL)
        code, output = result_of(address)
        assert code == 1
        assert "NOT_SERVING" in output
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
