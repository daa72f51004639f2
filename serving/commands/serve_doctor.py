"""Checks of `serve --doctor`: settings, limits, bundle, backends, and a trial start."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from ...model.bundle.manifest import (
    BundleError,
    Manifest,
    Precision,
    read_manifest,
    verify_artifact,
)
from ...model.host_resources import available_cores, available_memory
from ...model.plurals import counted
from .. import LOGGER
from ..backends.loading import BACKENDS, check_backend, choose_backend, served_precision
from ..config import ServeConfig
from ..credential_files import read_tokens
from ..errors import ServingError
from ..pipeline.served_model import ModelSource
from ..pipeline.shared_resources import decode_memory_limit
from ..rpc.certificates import server_certificate
from ..rpc.front_end_server import front_end_count
from ..rpc.listener import listening_socket
from ..rpc.message_reader import MESSAGES_PER_SLOT
from ..server import detection_server
from .doctor import CheckResult, CheckSection, State, machine_section

# Remaining days of validity below which a certificate gets a warning.
_MIN_CERTIFICATE_DAYS: Final = 14


def diagnose(
    models: Sequence[ModelSource], config: ServeConfig, sources: Mapping[str, str]
) -> Iterator[CheckSection]:
    """Check whether `serve` would start. Yield the results in groups of related checks (sections).

    If no check finds a fault, the last section is the result of a trial, in which a server is
    started on free ports and stopped again.

    Args:
        models: Bundles and names of the models.
        config: Settings of the server.
        sources: Text on where each setting comes from, by name; see `setting_sources`.
    """
    sections = [
        machine_section(),
        CheckSection("Settings", _setting_results(config, sources)),
        CheckSection("Limits", _limit_results(config, len(models))),
    ]
    yield from sections
    for model in models:
        for section in _model_sections(model, config):
            sections.append(section)
            yield section
    # After a fault, the trial would fail. It would also take memory from other servers.
    if all(section.is_healthy for section in sections):
        yield CheckSection("Trial", _trial_results(models, config))


def most_request_bytes(config: ServeConfig, models: int = 1) -> int:
    """Return the maximum total size in bytes of the request messages that a server holds at once.

    `models` is the number of served models. Each message counts with its serialised size. Once
    parsed, it takes several times as much memory until its image is decoded. Messages that are
    still being received are included. With one model, they make up half of the total.
    """
    return _messages_per_slot(models) * config.queue_size * config.max_message_mb << 20


def _messages_per_slot(models: int) -> int:
    """Return the maximum number of request messages in memory, in multiples of `queue_size`.

    `queue_size` is the maximum number of admission slots per model. `models` is the number of
    served models. The result covers the messages of all models.
    """
    # Per model: an in-flight request, and one that waits for a slot. In addition: messages that are
    # being received, whose model is not known yet.
    return 2 * models + MESSAGES_PER_SLOT


def _model_sections(model: ModelSource, config: ServeConfig) -> Iterator[CheckSection]:
    model = model.resolved()
    bundle = model.bundle
    yield CheckSection(f"Bundle {bundle}", _bundle_results(model))
    with contextlib.suppress(BundleError):  # already reported in the section of the bundle
        manifest = read_manifest(bundle)
        for precision in config.precision or (served_precision(manifest, config.backend),):
            results = _backend_results(bundle, manifest, precision, config)
            yield CheckSection(f"Backends in {precision}", results)


def _setting_results(config: ServeConfig, sources: Mapping[str, str]) -> list[CheckResult]:
    return [CheckResult(name, f"{_format_value(value)}, {sources[name]}") for name, value in config]


def _limit_results(config: ServeConfig, models: int) -> list[CheckResult]:
    results = [_port_result(name, config.host, port) for name, port in config.ports.items()]
    results += _certificate_results(config)
    files = {"token_file": config.token_file, "admin_token_file": config.admin_token_file}
    results += [_token_result(name, path) for name, path in files.items() if path]
    results.append(_front_end_result(config))
    cores = available_cores()
    memory, requests = available_memory(), most_request_bytes(config, models)
    messages = f"{_messages_per_slot(models)} x queue_size x max_message_mb"
    decoding = decode_memory_limit(config)
    return [
        *results,
        CheckResult(
            "threads",
            f"{config.threads} for decoding and encoding, on {cores:g} cores",
            "warning" if config.threads > cores else "ok",
        ),
        CheckResult(
            "memory",
            f"{_gib(memory)} available; the settings allow {_gib(requests)} ({messages}) for "
            "request messages, which need more memory once parsed, and "
            f"{_gib(decoding)} (decode_memory_mb) for decoding images",
            "warning" if requests + decoding > memory else "ok",
        ),
    ]


def _port_result(name: str, host: str, port: int) -> CheckResult:
    try:
        listening_socket(host, port, name).close()
    except ServingError as error:
        return CheckResult(name, str(error), "fault")
    return CheckResult(name, f"{port} is free at {host}" if port else "any free port")


def _certificate_results(config: ServeConfig) -> list[CheckResult]:
    name = "tls_certificate"
    try:
        with _warnings():  # not reported, because `certificate.problem` has the same text
            certificate = server_certificate(config)
    except ServingError as error:
        return [CheckResult(name, str(error), "fault")]
    if certificate is None:
        return []
    if certificate.problem:
        return [CheckResult(name, certificate.problem, "fault")]
    days = certificate.days_left
    state: State = "warning" if days < _MIN_CERTIFICATE_DAYS else "ok"
    return [CheckResult(name, f"valid for another {days:.1f} days", state)]


def _token_result(name: str, path: Path) -> CheckResult:
    try:
        tokens = read_tokens(path)
    except ServingError as error:
        return CheckResult(name, str(error), "fault")
    return CheckResult(name, counted(len(tokens), "valid token"))


def _front_end_result(config: ServeConfig) -> CheckResult:
    try:
        count = front_end_count(config)
    except ServingError as error:
        return CheckResult("front_ends", str(error), "fault")
    if not count:
        return CheckResult("front_ends", "0: the server's process accepts the gRPC connections")
    share = math.ceil(config.max_connections / count)
    processes = counted(count, "process accepts", "processes accept")
    text = f"{processes} the gRPC connections, each at most {share}"
    return CheckResult("front_ends", text)


def _bundle_results(model: ModelSource) -> list[CheckResult]:
    bundle = model.bundle
    try:
        manifest = model.manifest()
    except BundleError as error:
        return [CheckResult("manifest", str(error), "fault")]
    provenance = manifest.provenance
    classes = counted(len(manifest.categories), "class", "classes")
    results = [
        CheckResult("model", f"{manifest.model_name}, {classes}"),
        CheckResult(
            "exported",
            f"{provenance.exported_at} by {provenance.exported_by} from {provenance.checkpoint}",
        ),
    ]
    for artifact in manifest.artifacts:
        kind = f"{artifact.kind} in {artifact.precision} for {artifact.bucket}"
        try:
            verify_artifact(bundle, artifact)
        except BundleError as error:
            results.append(CheckResult(artifact.path, str(error), "fault"))
        else:
            results.append(CheckResult(artifact.path, f"{kind}, checksum matches"))
    return results


def _backend_results(
    bundle: Path, manifest: Manifest, precision: Precision, config: ServeConfig
) -> list[CheckResult]:
    """Check for each backend whether it can run the bundle in a precision on this machine.

    Only a failure of `config.backend` counts as a fault.
    """
    results, chosen = [], None
    try:
        chosen = choose_backend(bundle, manifest, precision, config.backend).backend
    except Exception as error:  # a broken installation can raise anything
        results.append(CheckResult(f"{config.backend}, as set", _error_text(error), "fault"))
    reason = f"{chosen} is preferred" if config.backend == "auto" else f"{config.backend} is set"
    for name in BACKENDS:
        try:
            check_backend(bundle, manifest, precision, name)
        except Exception as error:
            fault = _error_text(error)
            used, unused = f"would be used, although {fault}", f"not used: {fault}"
        else:
            used, unused = "would be used", f"not used: {reason}"
        results.append(
            CheckResult(name, used) if name == chosen else CheckResult(name, unused, "note")
        )
    return results


def _trial_results(models: Sequence[ModelSource], config: ServeConfig) -> list[CheckResult]:
    # Port 0 means any free port. The configured ports may be in use by another server.
    changes = {"drain_delay_s": 0.0, **dict.fromkeys(config.ports, 0)}
    begin = time.monotonic()
    with _warnings() as warnings:
        try:
            asyncio.run(_start(models, config.model_copy(update=changes)))
        except Exception as error:
            outcome = CheckResult("start", _error_text(error), "fault")
        else:
            seconds = time.monotonic() - begin
            outcome = CheckResult(
                "start", f"a server started, warmed up and stopped in {seconds:.1f} s"
            )
    return [*(CheckResult("log", warning, "warning") for warning in warnings), outcome]


async def _start(models: Sequence[ModelSource], config: ServeConfig) -> None:
    async with detection_server(models, config):
        pass


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Context manager: collect the texts of logged warnings and errors instead of printing them."""
    warnings: list[str] = []

    class _Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    # If the logger propagated the records, the command line's handlers would print them.
    log, collector = logging.getLogger(LOGGER), _Collector(logging.WARNING)
    propagate, log.propagate = log.propagate, False
    log.addHandler(collector)
    try:
        yield warnings
    finally:
        log.removeHandler(collector)
        log.propagate = propagate


def _error_text(error: Exception) -> str:
    """Return an error as `TYPE: MESSAGE`. For BundleError and ServingError: only the message."""
    own = isinstance(error, (BundleError, ServingError))
    return str(error) if own else f"{type(error).__name__}: {error}"


def _format_value(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
