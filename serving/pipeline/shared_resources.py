"""Resources that all models of a server share."""

from ..config import ServeConfig
from ..monitoring.telemetry import Telemetry
from .decode_memory import DecodeMemory, decode_memory_limit
from .open_calls import OpenCalls
from .rate_limits import RateLimits
from .threads import FairThreadPool

# Maximum number of open gRPC calls per admission slot. This limits the responses that are held in
# memory for slow clients.
_CALLS_PER_SLOT = 8


class SharedResources:
    """Threads, decode memory, rate limits, limit on open calls, and telemetry of a server."""

    def __init__(self, config: ServeConfig, telemetry: Telemetry, models: int) -> None:
        self.telemetry = telemetry
        self.rate_limits = RateLimits(config.max_requests_per_s, config.max_images_per_s)
        # A call is open until its responses have been sent.
        self.open_calls = OpenCalls(_CALLS_PER_SLOT * config.queue_size * models)
        # Threads that decode images and encode responses.
        self.threads = FairThreadPool(config.threads)
        # Memory of the images in decoding.
        self.decode_memory = DecodeMemory(decode_memory_limit(config), config.threads)
