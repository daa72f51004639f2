"""The engine of a server behind a gate, through which batches come only while it is open.

The two sit in different processes, and speak by files in a folder.
"""

import asyncio
import contextlib
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maskrcnn_trt.serving.engines.base import EngineItem, EngineResult
from maskrcnn_trt.serving.engines.bundle_engine import BundleEngine


class Gate:
    """An open gate."""

    def __init__(self, folder: Path) -> None:
        self._closed = folder / "closed"
        self._fault = folder / "fault"
        self._count = folder / "count"

    def open(self) -> None:
        self._closed.unlink(missing_ok=True)

    def close(self) -> None:
        self._closed.touch()

    def break_with(self, fault: BaseException | None) -> None:
        """Let batches fail from here on."""
        self._fault.write_bytes(pickle.dumps(fault))

    @property
    def count(self) -> int:
        """Batches that have come, warming up being one."""
        return self._count.stat().st_size if self._count.exists() else 0

    async def comes_to(self, number: int) -> None:
        """Return when so many have come."""
        async with asyncio.timeout(60):
            while self.count < number:
                await asyncio.sleep(0.01)

    def pass_through(self) -> None:
        with self._count.open("ab") as file:
            file.write(b".")
        while self._closed.exists():
            time.sleep(0.01)
        with contextlib.suppress(FileNotFoundError):
            fault = pickle.loads(self._fault.read_bytes())
            if fault is not None:
                raise fault


class GatedEngine(BundleEngine):
    def __init__(self, gate: Gate, *description: Any) -> None:
        super().__init__(*description)
        self._gate = gate

    def warm_up(self, max_batch: int) -> None:
        self._gate.pass_through()
        super().warm_up(max_batch)

    def compute(self, items: Sequence[EngineItem]) -> Sequence[EngineResult]:
        self._gate.pass_through()
        return super().compute(items)
