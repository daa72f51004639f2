"""Settings of the server, and allowed values of CLI options. Imports neither gRPC nor Pillow."""

import os
import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from ..model.bundle.manifest import Precision
from ..model.bundle.spec import MAX_PIXELS
from ..model.config.schema import FrozenConfig

BackendName = Literal["auto", "onnxruntime", "torch", "tensorrt", "tensorrt-rtx"]
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
ReportFormat = Literal["pictures", "coco", "numpy"]

# Maximum number of retries of a client. gRPC makes at most five attempts per request.
MAX_RETRIES = 4

# Upper limit of all time settings, in seconds. gRPC and the kernel do not support much longer ones.
DAY_S = 86_400

_HOST_AND_PORT = re.compile(r"(?:[^\s:/\[\]]+|\[[0-9A-Fa-f:.]+(?:%\w+)?\]):([0-9]{1,5})")
# gRPC targets with a scheme that gRPC knows. gRPC takes any other text for a host name.
_TARGET = re.compile(r"(?:dns|ipv4|ipv6|unix|unix-abstract|vsock|xds|google-c2p):\S+")
_HTTP = re.compile(r"https?://", re.IGNORECASE)


class ServeFields(FrozenConfig):
    """Settings of the server, each validated separately. `ServeConfig` validates combinations."""

    host: str = "127.0.0.1"
    """Address to listen on. `::`: all addresses. 0.0.0.0: all IPv4 addresses, and for gRPC all
    IPv6 addresses too."""
    port: int = Field(8500, ge=0, le=65535)
    """Port to listen on. 0: a free port."""
    http_port: int | None = Field(None, ge=0, le=65535)
    """Port of the HTTP API and of the page for browsers. 0: a free port. None: no HTTP."""
    precision: tuple[Precision, ...] = ()
    """Precisions to serve. Requests choose one of them; the first is the default. If no precision
    is given, the first one that the bundle has for the backend is served."""
    backend: BackendName = "auto"
    """Inference backend. auto: the first of torch, tensorrt, tensorrt-rtx and onnxruntime that runs
    on this machine and has artifacts in the bundle."""
    workers: int | None = Field(None, ge=1)
    """Worker processes per precision, distributed over the GPUs. None: one per GPU, or one if the
    machine has no GPU."""
    front_ends: int | None = Field(None, ge=0, le=64)
    """Number of front-end processes. They accept the gRPC connections and pass the calls to the
    server's process, so that it has more CPU time for requests. 0: the server's process accepts the
    connections itself. None: one per GPU if there are several GPUs, else 0."""
    hang_timeout_s: float = Field(60.0, gt=0, le=DAY_S)
    """Seconds until a batch counts as hung and its worker process is restarted."""
    max_batch: int = Field(8, ge=1)
    """Maximum number of images per batch."""
    max_delay_ms: float = Field(2.0, ge=0, le=1000 * DAY_S)
    """Maximum time in milliseconds that an image waits for its batch to fill while the model is not
    busy."""
    preferred_batch: tuple[int, ...] = ()
    """Batch sizes, besides `max_batch`, at which a batch starts without waiting for more images."""
    queue_size: int = Field(256, ge=1, le=1_000_000)
    """Maximum number of in-flight images per model. Each holds an admission slot. If all slots are
    in use, further requests of a connection that has its fair share are rejected."""
    max_wait_s: float = Field(10.0, gt=0, le=DAY_S)
    """Maximum estimated queue time in seconds. If the recent service rate is too low for
    `queue_size` images in this time, there are fewer admission slots, but at least 32, and at
    least 2 x `max_batch`."""
    max_requests_per_s: float | None = Field(None, gt=0)
    """Maximum number of requests per second of a client. A client is identified by its token or,
    without `token_file`, by its host. None: no limit."""
    max_images_per_s: float | None = Field(None, gt=0)
    """Maximum number of images per second of a client. None: no limit."""
    timeout_s: float | None = Field(None, gt=0, le=DAY_S)
    """Time limit of a request in seconds. Requests may set a lower one. None: no limit."""
    max_pixels: int = Field(MAX_PIXELS, ge=64)
    """Maximum number of pixels per image."""
    decode_memory_mb: int | None = Field(None, ge=64, le=1 << 24)
    """Host memory in MiB for decoding images. If too little of it is free, images wait. Images that
    need more than three quarters of it are rejected. None: a quarter of the machine's or the
    container's memory."""
    max_message_mb: int = Field(64, ge=1, le=1024)
    """Maximum size of a request in MiB. With one model, up to four times `queue_size` requests can
    be in memory at a time, including those being received. Until its image is decoded, a request
    takes several times its size in memory."""
    max_connections: int = Field(4096, ge=1)
    """Maximum number of connections per port. Further ones are closed."""
    max_connection_age_s: float | None = Field(None, gt=0, le=DAY_S)
    """Age of a connection in seconds at which its client must reconnect, so that load balancers can
    redistribute clients. None: no limit."""
    keepalive_s: float = Field(60.0, ge=1, le=DAY_S)
    """Seconds without data from a client until the server pings it. A client that does not respond
    within 20 s is disconnected."""
    receive_timeout_s: float = Field(60.0, gt=0, le=DAY_S)
    """Time limit for receiving a request, in seconds."""
    tls_certificate: Path | None = None
    """PEM file with the server's certificate chain; enables TLS. If this file, `tls_key` or
    `tls_client_ca` changes, new connections use the new content."""
    tls_key: Path | None = None
    """PEM file with the unencrypted key of `tls_certificate`."""
    tls_client_ca: Path | None = None
    """PEM file with certificate authorities. If set, clients must present a certificate signed by
    one of them."""
    token_file: Path | None = None
    """File of tokens, one per line; # begins a comment. Clients must send one of them as
    `authorization: Bearer TOKEN`. Health checks and reflection need no token. The file is reloaded
    when it changes."""
    admin_token_file: Path | None = None
    """File of tokens for clients that may also load and unload models. If neither this file nor
    `token_file` is given, `local_admin` applies instead."""
    local_admin: bool = True
    """Without token files, allow clients on the server's machine to load and unload models. Disable
    this if a proxy on that machine forwards requests, because all its clients seem local."""
    threads: int = Field(default_factory=lambda: len(os.sched_getaffinity(0)), ge=1)
    """Number of threads that decode images and encode masks."""
    drain_delay_s: float = Field(0.25, ge=0, le=DAY_S)
    """Seconds for which a stopping server still accepts requests, so that clients see NOT_SERVING
    and calls queued in gRPC are not cancelled."""
    stop_grace_s: float = Field(30.0, ge=0, le=DAY_S)
    """Time limit in seconds for in-flight requests when the server stops."""
    metrics_port: int | None = Field(None, ge=0, le=65535)
    """Port of the Prometheus endpoint /metrics. 0: a free port. None: no endpoint."""
    log_format: LogFormat = "text"
    """Log format: lines of text, or one JSON object per line."""
    log_level: LogLevel = "info"
    """Minimum level to log. At info, up to ten successful and ten failed requests per second are
    logged; at debug, all."""
    tracing: bool = False
    """Export OpenTelemetry spans. Configure the export with OpenTelemetry's environment variables
    `OTEL_...`."""

    @field_validator("host")
    @classmethod
    def _strip_brackets(cls, host: str) -> str:
        return host.removeprefix("[").removesuffix("]")


class ServeConfig(ServeFields):
    """Settings of the server. Also validates combinations, such as a certificate and its key."""

    @property
    def ports(self) -> dict[str, int]:
        """Port number by setting name, such as `http_port`. 0: any free port.

        Settings that are None are left out.
        """
        ports = {name: getattr(self, name) for name in ("port", "http_port", "metrics_port")}
        return {name: port for name, port in ports.items() if port is not None}

    @property
    def images_per_request(self) -> int:
        """Maximum number of images per request: the smaller of `max_batch` and `queue_size`."""
        # Each image needs an admission slot, and `queue_size` is the maximum number of slots.
        return min(self.max_batch, self.queue_size)

    @model_validator(mode="after")
    def _check_preferred_batch(self) -> "ServeConfig":
        for size in self.preferred_batch:
            if not 1 <= size <= self.max_batch:
                raise ValueError(
                    f"preferred_batch is {size}; allowed: 1 to max_batch, which is {self.max_batch}"
                )
        return self

    @model_validator(mode="after")
    def _check_tls(self) -> "ServeConfig":
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key must be given together")
        if self.tls_client_ca and not self.tls_certificate:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")
        return self

    @model_validator(mode="after")
    def _check_ports(self) -> "ServeConfig":
        settings: dict[int, str] = {}
        for name, port in self.ports.items():
            other = settings.setdefault(port, name) if port else name
            if other != name:
                raise ValueError(
                    f"{other} and {name} are both {port}; use different ports, or 0 for a free one"
                )
        return self


def address_of(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_address(address: str) -> None:
    """Check the syntax of a server address.

    Args:
        address: `host:port` with brackets around an IPv6 host, or a gRPC target with a scheme.

    Raises:
        ValueError: the address is invalid.
    """
    if not isinstance(address, str):
        raise ValueError(f"the server address is {address!r}; give a string, as in localhost:8500")
    match = _HOST_AND_PORT.fullmatch(address)
    if _TARGET.fullmatch(address) or (match and 1 <= int(match[1]) <= 65535):
        return
    http = _HTTP.match(address)
    remedy = f"leave out {http[0]} and " if http else ""
    raise ValueError(
        f"{address!r} is not a server address; {remedy}give host:port, as in localhost:8500 or "
        "[::1]:8500, or a gRPC target with a scheme, as in dns:///host:8500 or unix:/path"
    )
