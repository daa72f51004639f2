"""What would be served here, with what and why: everything is tried, and every fault is told."""

import asyncio
import contextlib
import logging
import platform
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..model.manifest import BundleError, Manifest, Precision, read_manifest, verified_path
from . import LOGGER
from .backends.loading import BACKENDS, check_backend, choose_backend, served_precision
from .config import ServeConfig, address_of
from .errors import ServingError
from .host import available_cores, available_memory, gpu_names, installed_versions
from .server import detection_server
from .transport.arrivals import MESSAGES_PER_PLACE

_DISTRIBUTIONS: Final = (
    "maskrcnn-trt",
    "grpcio",
    "protobuf",
    "numpy",
    "pillow",
    "onnxruntime",
    "onnxruntime-gpu",
    "torch",
    "tensorrt",
    "tensorrt-rtx",
    "pycuda",
)

_REQUESTS_PER_PLACE: Final = 2 + MESSAGES_PER_PLACE
"""In memory at most for each image in progress: its own, one of a stream that waits for its place,
and those on their way."""

State = Literal["ok", "note", "warning", "fault"]

_STYLES: Final[Mapping[State, str]] = {
    "ok": "green",
    "note": "dim",
    "warning": "yellow",
    "fault": "bold red",
}


class Finding(NamedTuple):
    """Something that was looked at."""

    subject: str
    text: str
    state: State = "ok"
    """With a fault the server would not start."""


class Section(NamedTuple):
    """What belongs together."""

    title: str
    findings: list[Finding]

    @property
    def is_healthy(self) -> bool:
        """Whether there is no fault."""
        return all(finding.state != "fault" for finding in self.findings)


def diagnose(bundle: Path, config: ServeConfig, sources: Mapping[str, str]) -> Iterator[Section]:
    """Find out whether `serve` would start, section by section.

    The last one starts a server on a free port and stops it at once, unless there was a fault
    before: another may be serving, and need the memory.

    Args:
        bundle: What is to be served.
        config: How.
        sources: Where each setting comes from, in words.
    """
    sections = [
        Section("Machine", _machine_findings()),
        Section("Settings", _setting_findings(config, sources)),
        Section("Limits", _limit_findings(config)),
        Section(f"Bundle {bundle}", _bundle_findings(bundle)),
    ]
    yield from sections
    with contextlib.suppress(BundleError):  # which the findings tell
        manifest = read_manifest(bundle)
        for precision in config.precision or (served_precision(manifest, config.backend),):
            findings = _backend_findings(bundle, manifest, precision, config)
            sections.append(Section(f"Backends in {precision}", findings))
            yield sections[-1]
    if all(section.is_healthy for section in sections):
        yield Section("Trial", _trial_findings(bundle, config))


def show(sections: Iterable[Section]) -> bool:
    """Print sections as they come, and return whether all are without a fault."""
    healthy = True
    for section in sections:
        table = Table(title=section.title, title_justify="left", box=SIMPLE_HEAD, show_header=False)
        for finding in section.findings:
            state = Text(finding.state, _STYLES[finding.state])
            table.add_row(state, Text(finding.subject), Text(finding.text))
        Console(markup=False, emoji=False).print(table)
        healthy = healthy and section.is_healthy
    return healthy


def most_request_bytes(config: ServeConfig) -> int:
    """Bytes of the requests that the settings let a server hold at once, as they are sent.

    Those that were read, half of them, take several times as much until they are decoded.
    """
    return _REQUESTS_PER_PLACE * config.queue_size * config.max_message_mb << 20


def _machine_findings() -> list[Finding]:
    versions = {"Python": platform.python_version(), **installed_versions(_DISTRIBUTIONS)}
    gpus = gpu_names() or ("none that nvidia-smi finds",)
    return [
        *(Finding(name, version) for name, version in versions.items()),
        *(Finding("GPU", gpu) for gpu in gpus),
    ]


def _setting_findings(config: ServeConfig, sources: Mapping[str, str]) -> list[Finding]:
    return [Finding(name, f"{_said(value)}, {sources[name]}") for name, value in config]


def _limit_findings(config: ServeConfig) -> list[Finding]:
    ports = {"port": config.port, "metrics_port": config.metrics_port}
    findings = [_port_finding(name, config.host, p) for name, p in ports.items() if p is not None]
    cores = available_cores()
    memory, requests = available_memory(), most_request_bytes(config)
    return [
        *findings,
        Finding(
            "threads",
            f"{config.threads} decode and encode, on {cores:g} cores",
            "warning" if config.threads > cores else "ok",
        ),
        Finding(
            "memory",
            f"{_gib(memory)} to be had; the largest requests that the settings allow would take "
            f"{_gib(requests)} as they are sent, {_REQUESTS_PER_PLACE} times queue_size times "
            "max_message_mb, and more once they are read",
            "warning" if requests > memory else "ok",
        ),
    ]


def _port_finding(name: str, host: str, port: int) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        both = host == "::" and socket.has_dualstack_ipv6()  # as gRPC listens then
        socket.create_server((host, port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        remedy = "choose an address of this machine and a free port"
        return Finding(
            name, f"{address_of(host, port)} cannot be had ({error.strerror}); {remedy}", "fault"
        )
    return Finding(name, f"{port} is free at {host}" if port else "any that is free")


def _bundle_findings(bundle: Path) -> list[Finding]:
    try:
        manifest = read_manifest(bundle)
    except BundleError as error:
        return [Finding("manifest", str(error), "fault")]
    made = manifest.provenance
    findings = [
        Finding("model", f"{manifest.model_name}, {len(manifest.categories)} classes"),
        Finding("exported", f"{made.exported_at} by {made.exported_by} from {made.checkpoint}"),
    ]
    for artifact in manifest.artifacts:
        what = f"{artifact.kind} in {artifact.precision} for {artifact.bucket}"
        try:
            verified_path(bundle, artifact)
            if artifact.compiled:
                verified_path(bundle, artifact.compiled)
        except BundleError as error:
            findings.append(Finding(artifact.path, str(error), "fault"))
        else:
            findings.append(Finding(artifact.path, f"{what}, as it was exported"))
    return findings


def _backend_findings(
    bundle: Path, manifest: Manifest, precision: Precision, config: ServeConfig
) -> list[Finding]:
    """What becomes of each backend: only that none can be used is a fault."""
    findings, chosen = [], None
    try:
        chosen = choose_backend(bundle, manifest, precision, config.backend).backend
    except Exception as error:  # an installation may be broken in any way
        findings.append(Finding(f"{config.backend}, as asked", _told(error), "fault"))
    reason = "a faster one is" if config.backend == "auto" else f"{config.backend} is asked for"
    for name in BACKENDS:
        try:
            check_backend(bundle, manifest, precision, name)
        except Exception as error:
            fault = _told(error)
            used, unused = f"would be used, although {fault}", f"not used, since {fault}"
        else:
            used, unused = "would be used", f"not used, since {reason}"
        findings.append(Finding(name, used) if name == chosen else Finding(name, unused, "note"))
    return findings


def _trial_findings(bundle: Path, config: ServeConfig) -> list[Finding]:
    metrics_port = None if config.metrics_port is None else 0
    changes = {"port": 0, "metrics_port": metrics_port, "drain_delay_s": 0.0}
    begin = time.monotonic()
    with _warnings() as warnings:
        try:
            asyncio.run(_start(bundle, config.model_copy(update=changes)))
        except Exception as error:
            outcome = Finding("start", _told(error), "fault")
        else:
            seconds = time.monotonic() - begin
            outcome = Finding("start", f"a server was ready, warm and stopped in {seconds:.1f} s")
    return [*(Finding("log", warning, "warning") for warning in warnings), outcome]


async def _start(bundle: Path, config: ServeConfig) -> None:
    async with detection_server(bundle, config):
        pass


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """What serving logs as a warning or worse within the context, in place of its handlers."""
    warnings: list[str] = []

    class _Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    log, collector = logging.getLogger(LOGGER), _Collector(logging.WARNING)
    propagate, log.propagate = log.propagate, False
    log.addHandler(collector)
    try:
        yield warnings
    finally:
        log.removeHandler(collector)
        log.propagate = propagate


def _told(error: Exception) -> str:
    """A fault in words; of what is not ours, its kind too."""
    ours = isinstance(error, (BundleError, ServingError))
    return str(error) if ours else f"{type(error).__name__}: {error}"


def _said(value: object) -> str:
    """A setting's value in words."""
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
