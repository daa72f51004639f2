"""Kubernetes manifests: schemas, references between them, and settings that the server accepts."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

import maskrcnn_trt.serving
from maskrcnn_trt.serving.commands.serve import config_from_options, config_options, serve
from maskrcnn_trt.serving.commands.serve_doctor import most_request_bytes
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.pipeline.shared_resources import DecodeMemory, decode_memory_limit
from maskrcnn_trt.serving.rpc.services import LIVENESS

FOLDER = Path(maskrcnn_trt.serving.__file__).parent / "deploy" / "kubernetes"
MANIFESTS: dict[str, dict[str, Any]] = {
    str(path.relative_to(FOLDER)): yaml.safe_load(path.read_text())
    for path in sorted(FOLDER.rglob("*.yaml"))
}
PATCHES = [
    f"{name.removesuffix('kustomization.yaml')}{patch['path']}"
    for name, manifest in MANIFESTS.items()
    for patch in manifest.get("patches", ())
]
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
README = (FOLDER.parent / "README.md").read_text()
OVERLAYS = [
    example
    for block in re.findall(r"^```yaml\n(.*?)^```", README, re.M | re.S)
    for example in yaml.safe_load_all(block)
    if "resources" in example
]


def container_of(deployment: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return container


POD = MANIFESTS["deployment.yaml"]["spec"]["template"]["spec"]
CONTAINER = container_of(MANIFESTS["deployment.yaml"])
GPU_CONTAINER = container_of(MANIFESTS["gpu/deployment-gpu.yaml"])
TLS_CONTAINER = container_of(MANIFESTS["tls/deployment-tls.yaml"])


@click.command()
@config_options
def show(**values: Any) -> None:
    """Print the configuration."""
    click.echo(config_from_options(values).model_dump_json())


def config_of(*containers: dict[str, Any]) -> ServeConfig:
    """Parse the deployment's arguments and the containers' variables with the server's CLI."""
    _, _, *options = CONTAINER["args"]
    variables = {v["name"]: v["value"] for container in containers for v in container["env"]}
    result = CliRunner().invoke(show, options, env=variables)
    assert result.exit_code == 0, result.output
    return ServeConfig.model_validate_json(result.stdout)


def mebibytes(quantity: str) -> int:
    match = re.fullmatch(r"(\d+)(Mi|Gi)", quantity)
    assert match
    return int(match[1]) << (10 if match[2] == "Gi" else 0)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, manifest in MANIFESTS.items()
        if manifest["kind"] not in ("Kustomization", "Component", "ServiceMonitor")
        and name not in PATCHES
    ],
)
def test_manifest_matches_the_kubernetes_schema(name: str) -> None:
    kubernetes_validate.validate(MANIFESTS[name], "1.30", strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_documented_overlay_renders_to_valid_manifests(
    overlay: dict[str, Any], tmp_path: Path
) -> None:
    root = os.path.relpath(FOLDER.parents[2], tmp_path)
    text = yaml.safe_dump(overlay).replace("PATH/", f"{root}/")
    (tmp_path / "kustomization.yaml").write_text(text)
    command = ["kubectl", "kustomize", str(tmp_path)]
    rendered = subprocess.run(command, capture_output=True, check=True, text=True, timeout=60)
    manifests = list(yaml.safe_load_all(rendered.stdout))
    for manifest in manifests:
        kubernetes_validate.validate(manifest, "1.30", strict=True)
    (container,) = (container_of(m) for m in manifests if m["kind"] == "Deployment")
    assert CONTAINER["image"] in container["image"]
    components = {Path(path).name for path in overlay.get("components", ())}
    patches = [container_of(MANIFESTS[f"{name}/deployment-{name}.yaml"]) for name in components]
    assert config_of(container) == config_of(CONTAINER, *patches)
    # gRPC probes do not support TLS.
    assert all(("exec" if "tls" in components else "grpc") in container[name] for name in PROBES)
    assert ("nvidia.com/gpu" in container["resources"]["limits"]) == ("gpu" in components)


@pytest.mark.parametrize("folder", ["", "gpu/", "http/", "metrics/", "tls/"])
def test_kustomization_references_every_file(folder: str) -> None:
    kustomization = MANIFESTS[f"{folder}kustomization.yaml"]
    patches = (patch["path"] for patch in kustomization.get("patches", ()))
    files = {path.name for path in (FOLDER / folder).glob("*.yaml")}
    assert {*kustomization.get("resources", ()), *patches} == files - {"kustomization.yaml"}


def test_patches_name_their_targets() -> None:
    targets = {
        (target["apiVersion"], target["kind"], target["metadata"]["name"])
        for target in (MANIFESTS["deployment.yaml"], MANIFESTS["service.yaml"])
    }
    for patch in (MANIFESTS[name] for name in PATCHES):
        assert (patch["apiVersion"], patch["kind"], patch["metadata"]["name"]) in targets
        if patch["kind"] == "Deployment":
            assert container_of(patch)["name"] == CONTAINER["name"]
    scaled = MANIFESTS["metrics/autoscaler.yaml"]["spec"]["scaleTargetRef"]
    assert (scaled["apiVersion"], scaled["kind"], scaled["name"]) in targets


def test_selectors_match_the_labels() -> None:
    labels = MANIFESTS["deployment.yaml"]["spec"]["template"]["metadata"]["labels"]
    service = MANIFESTS["service.yaml"]
    for selector in (
        MANIFESTS["deployment.yaml"]["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
        MANIFESTS["http/service-http.yaml"]["spec"]["selector"],
        MANIFESTS["disruption-budget.yaml"]["spec"]["selector"]["matchLabels"],
        *(c["labelSelector"]["matchLabels"] for c in POD["topologySpreadConstraints"]),
    ):
        assert selector
        assert selector.items() <= labels.items()
    monitored = MANIFESTS["metrics/service-monitor.yaml"]["spec"]["selector"]["matchLabels"]
    assert monitored.items() <= service["metadata"]["labels"].items()


def test_ports_agree() -> None:
    metrics = container_of(MANIFESTS["metrics/deployment-port.yaml"])
    http = container_of(MANIFESTS["http/deployment-http.yaml"])
    ports = (port for part in (CONTAINER, metrics, http) for port in part["ports"])
    container = {port["name"]: port["containerPort"] for port in ports}
    config = config_of(metrics, http)
    assert container == {
        "grpc": ServeConfig().port,
        "metrics": config.metrics_port,
        "http": config.http_port,
    }
    services = ("service.yaml", "metrics/service-port.yaml", "http/service-http.yaml")
    service = {p["name"]: p for name in services for p in MANIFESTS[name]["spec"]["ports"]}
    assert {port["targetPort"] for port in service.values()} == set(container)
    (endpoint,) = MANIFESTS["metrics/service-monitor.yaml"]["spec"]["endpoints"]
    assert endpoint["port"] in service
    assert {CONTAINER[probe]["grpc"]["port"] for probe in PROBES} == {container["grpc"]}


def test_pod_starts_the_server_and_gives_it_time_to_stop() -> None:
    verb, bundle, *_ = CONTAINER["args"]
    assert verb == serve.name
    mounts = {mount["mountPath"]: mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert bundle in mounts
    assert set(mounts.values()) == {volume["name"] for volume in POD["volumes"]}
    assert POD["enableServiceLinks"] is False  # MASKRCNN_PORT would be read as a setting
    config = config_of(CONTAINER)
    drain_s = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"] + config.drain_delay_s
    assert POD["terminationGracePeriodSeconds"] > drain_s + config.stop_grace_s


def test_documented_connection_age() -> None:
    config = config_of(CONTAINER)
    assert config.max_connection_age_s
    for seconds in (config.max_connection_age_s, config.stop_grace_s):
        assert f"{seconds:g} s" in README


def test_unit_matches_the_server() -> None:
    unit = (FOLDER.parent / "systemd" / "maskrcnn.service").read_text()
    if program := shutil.which("systemd-analyze"):
        report = subprocess.run(
            [program, "verify", FOLDER.parent / "systemd" / "maskrcnn.service"],
            capture_output=True,
            text=True,
        )
        problems = [line for line in report.stderr.splitlines() if "maskrcnn" in line]
        assert all("/opt/maskrcnn" in line for line in problems)  # which is not installed here
    stop_s = float(unit.partition("TimeoutStopSec=")[2].splitlines()[0])
    assert stop_s > ServeConfig().drain_delay_s + ServeConfig().stop_grace_s + 10
    names = re.findall(r"MASKRCNN_(\w+)=", unit)
    assert names
    assert {name.lower() for name in names} <= set(ServeConfig.model_fields)


def test_requests_fit_into_memory() -> None:
    requested = mebibytes(CONTAINER["resources"]["requests"]["memory"])
    for limits, config in (
        (CONTAINER["resources"]["limits"], config_of(CONTAINER)),
        (GPU_CONTAINER["resources"]["limits"], config_of(CONTAINER, GPU_CONTAINER)),
    ):
        most = most_request_bytes(config) >> 20
        # Half of the requests may be parsed, which takes several times the size of the message.
        decoding = decode_memory_limit(config) >> 20
        assert 2 * most + decoding <= mebibytes(limits["memory"]) - requested
        # An image of any format fits into the budget.
        assert 18 * config.max_pixels <= DecodeMemory(decoding << 20, config.threads).largest
    for config in (ServeConfig(), config_of(CONTAINER)):
        assert f"{most_request_bytes(config) / 2**30:g} GiB" in README


def probe_services(container: dict[str, Any]) -> Iterator[str]:
    for name in PROBES:
        if "exec" not in container[name]:
            yield container[name]["grpc"].get("service", "")
            continue
        program, address, *options = container[name]["exec"]["command"]
        assert program == "grpc_health_probe"
        assert address == f"-addr=localhost:{ServeConfig().port}"
        assert "-tls" in options
        services = (option.partition("=")[2] for option in options if "-service" in option)
        yield next(services, "")


@pytest.mark.parametrize("container", [CONTAINER, TLS_CONTAINER], ids=["plain", "tls"])
def test_only_the_liveness_probe_ignores_the_model(container: dict[str, Any]) -> None:
    assert list(probe_services(container)) == ["", "", LIVENESS]


def test_tls_component_mounts_the_certificate() -> None:
    config = config_of(CONTAINER, TLS_CONTAINER)
    (mount,) = TLS_CONTAINER["volumeMounts"]
    (volume,) = MANIFESTS["tls/deployment-tls.yaml"]["spec"]["template"]["spec"]["volumes"]
    assert mount["name"] == volume["name"]
    assert volume["secret"]["secretName"] in README
    for path in (config.tls_certificate, config.tls_key):
        assert path
        # The files of a secret of type kubernetes.io/tls.
        assert path.name in ("tls.crt", "tls.key")
        assert str(path.parent) == mount["mountPath"]
    for name in PROBES:
        assert TLS_CONTAINER[name]["grpc"] is None
    (port,) = MANIFESTS["tls/service-tls.yaml"]["spec"]["ports"]
    assert port["appProtocol"] is None  # h2c means plain text


def test_gpu_component_uses_torch_and_a_writable_home() -> None:
    config = config_of(CONTAINER, GPU_CONTAINER)
    assert (config.backend, config.queue_size) == ("torch", 64)
    assert GPU_CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == 1
    (home,) = (variable["value"] for variable in GPU_CONTAINER["env"] if variable["name"] == "HOME")
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]
    (volume,) = (m["name"] for m in CONTAINER["volumeMounts"] if m["mountPath"] == home)
    assert {"name": volume, "emptyDir": {}} in POD["volumes"]
