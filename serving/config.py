"""Configuration of the server, and choices of the command line. Loads neither gRPC nor Pillow."""

import os
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from ..model.config import FrozenConfig
from ..model.manifest import Precision
from ..model.spec import MAX_PIXELS

BackendName = Literal["auto", "onnxruntime", "torch", "tensorrt", "tensorrt-rtx"]
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
ReportFormat = Literal["pictures", "coco", "numpy"]

MAX_RETRIES = 4
"""Of a client: gRPC tries no request more than five times."""

DAY_S = 86_400
"""The longest of all times that can be set; gRPC and the kernel count none much longer."""


class ServeFields(FrozenConfig):
    """Settings of the server, each checked by itself."""

    model_config = ConfigDict(allow_inf_nan=False)

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 listens on all of IPv4, and :: on all there are."""
    port: int = Field(8500, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""
    precision: tuple[Precision, ...] = ()
    """Precisions to serve side by side, of which requests may choose and the first is the default;
    none, the backend's first in the bundle."""
    backend: BackendName = "auto"
    """What computes; auto takes the fastest that the bundle has artefacts for and runs here."""
    workers: int | None = Field(None, ge=1)
    """Processes that compute, for each precision, spread over the GPUs; none, one a GPU, or one
    where there is none."""
    hang_timeout_s: float = Field(60.0, gt=0, le=DAY_S)
    """Time after which a batch counts as hung, and the process that computes it is replaced."""
    max_batch: int = Field(8, ge=1)
    """Images that the model computes at once."""
    max_delay_ms: float = Field(2.0, ge=0, le=1000 * DAY_S)
    """Longest wait for a batch to fill while the model is free."""
    preferred_batch: tuple[int, ...] = ()
    """Images that make a batch which need not wait for more, beside `max_batch`."""
    queue_size: int = Field(256, ge=1, le=1_000_000)
    """Images in progress; more are refused, and so are those of a connection that leaves others
    less than one place for eight of its own."""
    max_wait_s: float = Field(1.0, gt=0, le=DAY_S)
    """Seconds in which, at the pace of late, all images in progress are to be computed: what would
    wait longer is refused at once, unless there are only a few."""
    timeout_s: float | None = Field(None, gt=0, le=DAY_S)
    """Seconds that a request may take, of which it may ask for less; none, any time."""
    max_pixels: int = Field(MAX_PIXELS, ge=64)
    """Pixels of an image."""
    max_message_mb: int = Field(64, ge=1, le=1024)
    """Mebibytes of a request. Four times `queue_size` of them may be in memory at once, those on
    their way among them, and one that was read takes several times its size until it is decoded."""
    max_connections: int = Field(4096, ge=1)
    """Connections at once; more are closed."""
    max_connection_age_s: float | None = Field(None, gt=0, le=DAY_S)
    """Seconds after which a client is asked to connect anew, for load balancers to spread them;
    none, it may stay."""
    keepalive_s: float = Field(60.0, ge=1, le=DAY_S)
    """Seconds of silence after which a client has 20 to show that it is still there."""
    receive_timeout_s: float = Field(60.0, gt=0, le=DAY_S)
    """Seconds that a request may take to arrive."""
    tls_certificate: Path | None = None
    """PEM of the server's certificate and those it rests on; connections are encrypted then. What
    replaces it later holds for the connections that come then, and so do the files below."""
    tls_key: Path | None = None
    """PEM of the key of `tls_certificate`, not encrypted."""
    tls_client_ca: Path | None = None
    """PEM of the authorities of which clients must show a certificate."""
    token_file: Path | None = None
    """Tokens that clients must send as `authorization: Bearer TOKEN`, one a line, # begins a
    comment; health and reflection need none. Read anew when it changes."""
    admin_token_file: Path | None = None
    """Tokens of those who may load and unload models as well; without this and `token_file`,
    clients on the server's own machine may."""
    local_admin: bool = True
    """Whether they may: not where a proxy on that machine makes all clients seem to be there."""
    threads: int = Field(default_factory=lambda: len(os.sched_getaffinity(0)), ge=1)
    """Threads that decode images and encode masks."""
    drain_delay_s: float = Field(0.25, ge=0, le=DAY_S)
    """Time that a server which stops goes on taking requests, for clients to notice, and for calls
    that wait in gRPC, which would cancel them, to be taken up."""
    stop_grace_s: float = Field(30.0, ge=0, le=DAY_S)
    """Time that requests in progress have to finish when the server stops."""
    metrics_port: int | None = Field(None, ge=0, le=65535)
    """Port at which Prometheus finds /metrics; 0 picks a free one, none publishes nothing."""
    log_format: LogFormat = "text"
    """Form of the log: lines of text, or a JSON object a line."""
    log_level: LogLevel = "info"
    """Least level of what is logged; on debug each request is, with where its time went."""
    tracing: bool = False
    """Send spans to where OpenTelemetry's own variables in the environment say."""

    @field_validator("host")
    @classmethod
    def _strip_brackets(cls, host: str) -> str:
        return host.removeprefix("[").removesuffix("]")


class ServeConfig(ServeFields):
    """How a bundle is served: settings that go together."""

    @property
    def images_per_request(self) -> int:
        """Images that a request may hold, each of which takes a place."""
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
            raise ValueError("tls_certificate and tls_key go together; give both or none")
        if self.tls_client_ca and not self.tls_certificate:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")
        return self

    @model_validator(mode="after")
    def _check_ports(self) -> "ServeConfig":
        if self.port == self.metrics_port != 0:
            raise ValueError(
                f"port and metrics_port are both {self.port}; give each its own, or 0, which picks "
                "a free one"
            )
        return self


def address_of(host: str, port: int) -> str:
    """`host:port`, with the brackets that an address of IPv6 has then."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
