"""Compose file with Prometheus and Grafana: references, settings, and metrics of a real server."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import promql_parser
import pytest
import yaml
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from scraped_metrics import read
from unloadable_server import serving

import maskrcnn_trt.serving
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.serving.commands.serve import config_from_options, config_options, serve
from maskrcnn_trt.serving.commands.serve_doctor import most_request_bytes
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.monitoring.machine_metrics import GPU_METRICS

FOLDER = Path(maskrcnn_trt.serving.__file__).parent / "deploy" / "compose"
DOCKERFILE = (FOLDER.parents[2] / "Dockerfile").read_text()
TEXT = (FOLDER / "compose.yaml").read_text()
SERVICES = yaml.safe_load(TEXT)["services"]
SERVER = SERVICES["server"]
DASHBOARD = json.loads((FOLDER / "grafana/dashboards/maskrcnn.json").read_text())
SCRAPES = yaml.safe_load((FOLDER / "prometheus/prometheus.yml").read_text())
RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "prometheus/alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
# Parsing also checks types, functions and regular expressions.
EXPRESSIONS = [
    promql_parser.parse(text.replace("$__rate_interval", "1m"))
    for text in (
        *(target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]),
        *(rule["expr"] for rule in RULES),
    )
]

# Prometheus itself adds this metric and these labels.
UP, TARGET_LABELS = "up", {"instance", "job"}


@click.command()
@config_options
def show(**values: Any) -> None:
    """Print the configuration."""
    click.echo(config_from_options(values).model_dump_json())


def server_config() -> ServeConfig:
    """Parse the service's arguments and variables with the server's CLI."""
    verb, _, *options = SERVER["command"]
    assert verb == serve.name
    result = CliRunner().invoke(show, options, env=SERVER["environment"])
    assert result.exit_code == 0, result.output
    return ServeConfig.model_validate_json(result.stdout)


def parts_of(expression: Any) -> Iterator[Any]:
    """Yield a PromQL expression and all expressions in it."""
    yield expression
    fields = [getattr(expression, name, None) for name in ("expr", "lhs", "rhs", "vector_selector")]
    for part in (*fields, *getattr(expression, "args", ())):
        if part is not None:
            yield from parts_of(part)


def grouping_labels(modifier: Any) -> list[str]:
    """Return the labels after `by`, `on` and `group_left` in a modifier of an expression."""
    matching = getattr(modifier, "matching", modifier)
    return [*getattr(matching, "labels", ()), *(getattr(modifier, "group_labels", None) or ())]


async def test_dashboard_and_alerts_use_exported_metrics_and_labels(
    bundle: Path, caplog: pytest.LogCaptureFixture, picture: Callable[..., bytes]
) -> None:
    async with serving(bundle, caplog) as server:
        assert (await server.detector.Detect(pb.DetectRequest(image=picture()))).detections
        stream = server.detector.DetectStream(iter([pb.DetectRequest(image=b"no image")]))
        assert len([response async for response in stream]) == 1
        text = await asyncio.to_thread(read, server.metrics.url)
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    exported = {sample.name for sample in samples} | {*GPU_METRICS, UP}
    labels = {name for s in samples for name in s.labels} | TARGET_LABELS | {"gpu_uuid"}
    values = {(s.name, *pair) for s in samples for pair in s.labels.items()}
    for part in (part for expression in EXPRESSIONS for part in parts_of(expression)):
        assert set(grouping_labels(getattr(part, "modifier", None))) <= labels, part
        if isinstance(part, promql_parser.VectorSelector):
            assert part.name in exported
            for matcher in part.matchers.matchers:
                for value in matcher.value.split("|"):
                    pair = (matcher.name, value)
                    assert matcher.name in TARGET_LABELS or (part.name, *pair) in values, pair


def test_dashboard_panels() -> None:
    panels = DASHBOARD["panels"]
    assert len(panels) == 10
    assert len({panel["id"] for panel in panels}) == len({p["title"] for p in panels}) == 10
    cells = [
        (x, y)
        for box in (panel["gridPos"] for panel in panels)
        for x in range(box["x"], box["x"] + box["w"])
        for y in range(box["y"], box["y"] + box["h"])
    ]
    assert len(cells) == len(set(cells))  # no panel covers another
    assert max(x for x, _ in cells) < 24  # columns of Grafana's grid
    (source,) = yaml.safe_load(
        (FOLDER / "grafana/provisioning/datasources/prometheus.yml").read_text()
    )["datasources"]
    used = [DASHBOARD["templating"]["list"][0], *panels, *(t for p in panels for t in p["targets"])]
    for user in used:
        assert user["datasource"] == {"type": source["type"], "uid": source["uid"]}
    host, port = source["url"].removeprefix("http://").split(":")
    assert any(published.endswith(f":{port}") for published in SERVICES[host]["ports"])


def test_mounted_files_are_where_grafana_reads_them() -> None:
    mounts = dict(volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"])
    folders = {target: FOLDER / source for source, target in mounts.items()}
    (provider,) = yaml.safe_load(
        (FOLDER / "grafana/provisioning/dashboards/maskrcnn.yml").read_text()
    )["providers"]
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (folders[str(home.parent)] / home.name).is_file()
    provisioning = folders["/etc/grafana/provisioning"]
    assert {path.name for path in provisioning.iterdir()} == {"dashboards", "datasources"}
    ((source, target),) = (
        volume.split(":")[:2] for volume in SERVICES["prometheus"]["volumes"] if "etc" in volume
    )
    assert target == "/etc/prometheus"
    assert (FOLDER / source / "prometheus.yml").is_file()
    assert all((FOLDER / source / name).is_file() for name in SCRAPES["rule_files"])


def test_server_settings_and_ports() -> None:
    config = server_config()
    published = {int(port.rpartition(":")[2]) for port in SERVER["ports"]}
    assert published == {config.port, config.http_port}
    (job,) = SCRAPES["scrape_configs"]
    (targets,) = job["static_configs"]
    assert targets["targets"] == [f"server:{config.metrics_port}"]
    assert SERVER["build"]["args"]["EXTRAS"] == "cpu,http"
    assert (FOLDER / SERVER["build"]["context"] / "Dockerfile").is_file()
    assert f"{most_request_bytes(config) / 2**30:g} GiB" in TEXT
    assert int(SERVER["stop_grace_period"].removesuffix("s")) > (
        config.stop_grace_s + config.drain_delay_s
    )
    (bundle,) = SERVER["volumes"]
    assert bundle["target"] == SERVER["command"][1]
    assert bundle["read_only"]


def test_services_are_restricted() -> None:
    for service in SERVICES.values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert not service["user"].startswith("0")
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_health_check_of_compose_is_that_of_the_image() -> None:
    check = SERVER["healthcheck"]
    options, command = re.findall(r"^HEALTHCHECK (.*) CMD (\[.*\])$", DOCKERFILE, re.M)[0]
    assert check["test"] == ["CMD", *json.loads(command)]
    assert options == " ".join(
        f"--{name.replace('_', '-')}={check[name]}"
        for name in ("interval", "timeout", "start_period", "retries")
    )


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_promtool_accepts_configuration_and_alerts() -> None:
    command = ["promtool", "check", "config", str(FOLDER / "prometheus/prometheus.yml")]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
