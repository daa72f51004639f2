"""Manifests hold to Kubernetes' schemas, to each other, and to the server they start."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

import maskrcnn_trt.serving
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.doctor import most_request_bytes
from maskrcnn_trt.serving.serve_command import serve
from maskrcnn_trt.serving.serve_options import config_from_options, config_options
from maskrcnn_trt.serving.transport.health import LIVENESS

FOLDER = Path(maskrcnn_trt.serving.__file__).parent / "deploy" / "kubernetes"
MANIFESTS = {
    str(path.relative_to(FOLDER)): yaml.safe_load(path.read_text())
    for path in sorted(FOLDER.rglob("*.yaml"))
}
DEPLOYMENT = MANIFESTS["deployment.yaml"]["spec"]
POD = DEPLOYMENT["template"]["spec"]
(CONTAINER,) = POD["containers"]
LABELS = DEPLOYMENT["template"]["metadata"]["labels"]
METRICS_SETTING = "metrics_port"
PATCHES = ("metrics/deployment-port.yaml", "metrics/service-port.yaml")
GPU_PATCH = "gpu/deployment-gpu.yaml"
TLS_PATCHES = ("tls/deployment-tls.yaml", "tls/service-tls.yaml")
PATCHED = ("deployment.yaml", "service.yaml")
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
README = (FOLDER.parent / "README.md").read_text()
OVERLAYS = [
    example
    for block in re.findall(r"^```yaml\n(.*?)^```", README, re.M | re.S)
    for example in yaml.safe_load_all(block)
    if "resources" in example
]


def patched(base: Any, patch: Any) -> Any:
    """What Kustomize makes of a manifest: what has a name is merged, and what is null left out."""
    if isinstance(patch, dict):
        known = base if isinstance(base, dict) else {}
        merged = known | {name: patched(known.get(name), value) for name, value in patch.items()}
        return {name: value for name, value in merged.items() if value is not None}
    if isinstance(patch, list) and all(isinstance(item, dict) and "name" in item for item in patch):
        items, patches = ({item["name"]: item for item in group} for group in (base or (), patch))
        return list(patched(items, patches).values())
    return patch


def container_of(deployment: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return container


@click.command()
@config_options
def show(**values: Any) -> None:
    """Print the configuration."""
    click.echo(config_from_options(values).model_dump_json())


def config_of(container: dict[str, Any]) -> ServeConfig:
    """How a container's server is configured, by the server's own reading of it."""
    _, _, *options = container["args"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
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
        and name not in (*PATCHES, *TLS_PATCHES, GPU_PATCH)
    ],
)
def test_manifest_holds_to_the_schema(name: str) -> None:
    kubernetes_validate.validate(MANIFESTS[name], "1.30", strict=True)


@pytest.mark.parametrize("patches", [PATCHES, TLS_PATCHES, (GPU_PATCH,)])
def test_patched_manifests_hold_to_the_schema(patches: tuple[str, ...]) -> None:
    for patch, target in zip(patches, PATCHED, strict=False):
        manifest = patched(MANIFESTS[target], MANIFESTS[patch])
        kubernetes_validate.validate(manifest, "1.30", strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_of_the_documentation_are_rendered(
    overlay: dict[str, Any], tmp_path: Path
) -> None:
    place = os.path.relpath(FOLDER.parents[2], tmp_path)
    text = yaml.safe_dump(overlay).replace("PATH/", f"{place}/")
    (tmp_path / "kustomization.yaml").write_text(text)
    command = ["kubectl", "kustomize", str(tmp_path)]
    rendered = subprocess.run(command, capture_output=True, check=True, text=True, timeout=60)
    manifests = {m["kind"]: m for m in yaml.safe_load_all(rendered.stdout)}
    for manifest in manifests.values():
        kubernetes_validate.validate(manifest, "1.30", strict=True)
    expected = MANIFESTS["deployment.yaml"]
    for component in overlay.get("components", ()):
        folder = Path(component).name
        expected = patched(expected, MANIFESTS[f"{folder}/deployment-{folder}.yaml"])
    container, own = container_of(manifests["Deployment"]), container_of(expected)
    assert own["image"] in container["image"]
    assert {v["name"]: v["value"] for v in container["env"]} == {
        v["name"]: v["value"] for v in own["env"]
    }
    for name in (*PROBES, "resources", "args"):
        assert container[name] == own[name]


@pytest.mark.parametrize("folder", ["", "gpu/", "metrics/", "tls/"])
def test_kustomizations_name_every_file(folder: str) -> None:
    own = MANIFESTS[f"{folder}kustomization.yaml"]
    patches = (patch["path"] for patch in own.get("patches", ()))
    named = {*own.get("resources", ()), *patches}
    files = {path.name for path in (FOLDER / folder).glob("*.yaml")}
    assert named == files - {"kustomization.yaml"}


def test_selectors_find_the_pods() -> None:
    selectors = [
        DEPLOYMENT["selector"]["matchLabels"],
        MANIFESTS["service.yaml"]["spec"]["selector"],
        MANIFESTS["disruption-budget.yaml"]["spec"]["selector"]["matchLabels"],
        *(c["labelSelector"]["matchLabels"] for c in POD["topologySpreadConstraints"]),
    ]
    for selector in selectors:
        assert selector
        assert selector.items() <= LABELS.items()
    monitored = MANIFESTS["metrics/service-monitor.yaml"]["spec"]["selector"]["matchLabels"]
    assert monitored.items() <= MANIFESTS["service.yaml"]["metadata"]["labels"].items()


def test_ports_meet() -> None:
    def ports(names: tuple[str, ...], where: Any) -> dict[str, dict[str, Any]]:
        return {port["name"]: port for name in names for port in where(MANIFESTS[name]["spec"])}

    container = ports(
        ("deployment.yaml", PATCHES[0]),
        lambda spec: spec["template"]["spec"]["containers"][0]["ports"],
    )
    service = ports(("service.yaml", PATCHES[1]), lambda spec: spec["ports"])
    assert {port["targetPort"] for port in service.values()} == set(container)
    assert container["grpc"]["containerPort"] == ServeConfig().port
    for probe in PROBES:
        assert CONTAINER[probe]["grpc"]["port"] == container["grpc"]["containerPort"]
    (endpoint,) = MANIFESTS["metrics/service-monitor.yaml"]["spec"]["endpoints"]
    assert endpoint["port"] in service
    (patched,) = MANIFESTS[PATCHES[0]]["spec"]["template"]["spec"]["containers"]
    (variable,) = patched["env"]
    assert variable["name"] == f"MASKRCNN_{METRICS_SETTING.upper()}"
    assert int(variable["value"]) == container["metrics"]["containerPort"]


def test_names_meet() -> None:
    for patch, target in zip((*PATCHES, *TLS_PATCHES, GPU_PATCH), 3 * PATCHED, strict=False):
        for key in ("apiVersion", "kind"):
            assert MANIFESTS[patch][key] == MANIFESTS[target][key]
        assert MANIFESTS[patch]["metadata"]["name"] == MANIFESTS[target]["metadata"]["name"]
    for deployment in (MANIFESTS[name] for name in (PATCHES[0], TLS_PATCHES[0], GPU_PATCH)):
        assert deployment["metadata"] == {"name": MANIFESTS["deployment.yaml"]["metadata"]["name"]}
        assert container_of(deployment)["name"] == CONTAINER["name"]
    scaled = MANIFESTS["metrics/autoscaler.yaml"]["spec"]["scaleTargetRef"]
    deployment = MANIFESTS["deployment.yaml"]
    assert scaled == {
        "apiVersion": deployment["apiVersion"],
        "kind": deployment["kind"],
        "name": deployment["metadata"]["name"],
    }
    assert {m["name"] for m in CONTAINER["volumeMounts"]} == {v["name"] for v in POD["volumes"]}


def test_server_understands_its_words_and_has_the_time_to_stop() -> None:
    verb, bundle, *options = CONTAINER["args"]
    assert verb == serve.name
    assert bundle in {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    options_known = {name for option in serve.params for name in option.opts}
    assert {*options[::2], f"--{METRICS_SETTING.replace('_', '-')}"} <= options_known
    assert POD["enableServiceLinks"] is False  # MASKRCNN_PORT would be taken for a setting
    config = config_of(CONTAINER)
    waiting = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"] + config.drain_delay_s
    assert POD["terminationGracePeriodSeconds"] > waiting + config.stop_grace_s


def test_connections_end_for_clients_to_find_new_pods() -> None:
    config = config_of(CONTAINER)
    assert config.max_connection_age_s
    for seconds in (config.max_connection_age_s, config.stop_grace_s):
        assert f"{seconds:g} s" in README


def test_requests_fit_into_the_memory_between_request_and_limit() -> None:
    deployment = MANIFESTS["deployment.yaml"]
    for container in (CONTAINER, container_of(patched(deployment, MANIFESTS[GPU_PATCH]))):
        resources = container["resources"]
        memory = [mebibytes(resources[kind]["memory"]) for kind in ("requests", "limits")]
        most = most_request_bytes(config_of(container)) >> 20
        # The half of them that was read takes a few times what was sent.
        assert 2 * most <= memory[1] - memory[0]
    for config in (ServeConfig(), config_of(CONTAINER)):
        assert f"{most_request_bytes(config) / 2**30:g} GiB" in README


def test_pod_lives_as_long_as_the_process_answers() -> None:
    tls = container_of(patched(MANIFESTS["deployment.yaml"], MANIFESTS[TLS_PATCHES[0]]))
    for name in PROBES:
        service = LIVENESS if name == "livenessProbe" else ""
        assert CONTAINER[name]["grpc"].get("service", "") == service
        options = [f"-service={service}"] if service else []
        assert tls[name]["exec"]["command"][4:] == options


def test_server_with_tls_is_asked_over_tls() -> None:
    deployment = patched(MANIFESTS["deployment.yaml"], MANIFESTS[TLS_PATCHES[0]])
    container = container_of(deployment)
    config = config_of(container)
    assert config.tls_certificate
    assert config.tls_key
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {v["name"]: v for v in deployment["spec"]["template"]["spec"]["volumes"]}
    for path in (config.tls_certificate, config.tls_key):
        # The files of a secret of type kubernetes.io/tls.
        assert path.name in ("tls.crt", "tls.key")
        assert volumes[mounts[str(path.parent)]]["secret"]["secretName"] in README
    for name in PROBES:
        probe = container[name]
        assert "grpc" not in probe
        assert probe["exec"]["command"][:3] == [
            "grpc_health_probe",
            f"-addr=localhost:{config.port}",
            "-tls",
        ]
        assert probe["failureThreshold"] == CONTAINER[name]["failureThreshold"]
    (port,) = patched(MANIFESTS["service.yaml"], MANIFESTS[TLS_PATCHES[1]])["spec"]["ports"]
    assert "appProtocol" not in port  # as h2c says that it is not encrypted


def test_server_on_a_gpu_computes_there_and_may_write_what_it_compiles() -> None:
    deployment = patched(MANIFESTS["deployment.yaml"], MANIFESTS[GPU_PATCH])
    container = container_of(deployment)
    config = config_of(container)
    assert config.backend == "torch"
    assert config.queue_size == 64
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    (home,) = (variable["value"] for variable in container["env"] if variable["name"] == "HOME")
    assert container["securityContext"]["readOnlyRootFilesystem"]
    (volume,) = (m["name"] for m in container["volumeMounts"] if m["mountPath"] == home)
    assert {"name": volume, "emptyDir": {}} in deployment["spec"]["template"]["spec"]["volumes"]
