"""Manifests hold to Kubernetes' schemas, to each other, and to the server they start."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click import Option

import maskrcnn_trt.serving
from maskrcnn_trt.serving.commands import serve
from maskrcnn_trt.serving.config import ServeConfig

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


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, manifest in MANIFESTS.items()
        if manifest["kind"] not in ("Kustomization", "Component", "ServiceMonitor")
        and name not in PATCHES
    ],
)
def test_manifest_holds_to_the_schema(name: str) -> None:
    kubernetes_validate.validate(MANIFESTS[name], "1.30", strict=True)


@pytest.mark.parametrize("folder", ["", "metrics/"])
def test_kustomizations_name_every_file(folder: str) -> None:
    own = MANIFESTS[f"{folder}kustomization.yaml"]
    named = {*own["resources"], *(patch["path"] for patch in own.get("patches", ()))}
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
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert CONTAINER[probe]["grpc"]["port"] == container["grpc"]["containerPort"]
    (endpoint,) = MANIFESTS["metrics/service-monitor.yaml"]["spec"]["endpoints"]
    assert endpoint["port"] in service
    (patched,) = MANIFESTS[PATCHES[0]]["spec"]["template"]["spec"]["containers"]
    (variable,) = patched["env"]
    assert variable["name"] == f"MASKRCNN_{METRICS_SETTING.upper()}"
    assert int(variable["value"]) == container["metrics"]["containerPort"]


def test_names_meet() -> None:
    for patch, target in zip(PATCHES, ("deployment.yaml", "service.yaml"), strict=True):
        for key in ("apiVersion", "kind"):
            assert MANIFESTS[patch][key] == MANIFESTS[target][key]
        assert MANIFESTS[patch]["metadata"]["name"] == MANIFESTS[target]["metadata"]["name"]
    patched = MANIFESTS[PATCHES[0]]["spec"]["template"]["spec"]["containers"]
    assert [container["name"] for container in patched] == [CONTAINER["name"]]
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
    known = {name for option in serve.params if isinstance(option, Option) for name in option.opts}
    assert {*options[::2], f"--{METRICS_SETTING.replace('_', '-')}"} <= known
    assert POD["enableServiceLinks"] is False  # MASKRCNN_PORT would be taken for a setting
    config = ServeConfig()
    waiting = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"] + config.drain_delay_s
    assert POD["terminationGracePeriodSeconds"] > waiting + config.stop_grace_s
