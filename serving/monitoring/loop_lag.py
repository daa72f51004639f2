"""How late the event loop is: what blocks it, delays every request."""

import asyncio
import logging

_log = logging.getLogger(__name__)

_PERIOD_S = 0.1
_WINDOW_S = 10.0
_NOTABLE_S = 0.1


class LoopLag:
    """Measures by how much the event loop wakes a sleeper too late."""

    def __init__(self) -> None:
        self.last_s = 0.0
        """What was measured last."""
        self.worst_s = 0.0
        """The worst since the last whole window of ten seconds began."""

    async def run(self) -> None:
        """Measure until cancelled, and log what is notable once a window."""
        while True:
            worst_s = await self._worst_of_window()
            self.worst_s = worst_s
            if worst_s > _NOTABLE_S:
                _log.warning(
                    "the event loop was up to %.0f ms late in the last %.0f s; too little CPU?",
                    1000 * worst_s,
                    _WINDOW_S,
                )

    async def _worst_of_window(self) -> float:
        loop = asyncio.get_running_loop()
        end = loop.time() + _WINDOW_S
        worst_s = 0.0
        while (start := loop.time()) < end:
            await asyncio.sleep(_PERIOD_S)
            self.last_s = max(0.0, loop.time() - start - _PERIOD_S)
            worst_s = max(worst_s, self.last_s)
            self.worst_s = max(self.worst_s, worst_s)
        return worst_s
