"""Engine that blocks its batches while a gate is closed.

The test and the engine run in different processes and communicate through files in a folder.
"""

import asyncio
import contextlib
import pickle
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from maskrcnn_trt.serving.engines.bundle_engine import BundleLoader


class Gate:
    """Gate in front of an engine. While it is closed, batches wait. At first, it is open."""

    def __init__(self, folder: Path) -> None:
        self._closed = folder / "closed"
        self._admitted = folder / "admitted"
        self._fault = folder / "fault"
        self._count = folder / "count"

    def open(self) -> None:
        self._closed.unlink(missing_ok=True)

    def close(self) -> None:
        self._closed.touch()

    def admit_one(self) -> None:
        """Let one batch through the closed gate."""
        self._admitted.touch()

    def break_with(self, fault: BaseException | None) -> None:
        """Make all further batches raise an error. None: let them succeed again."""
        self._fault.write_bytes(pickle.dumps(fault))

    @property
    def count(self) -> int:
        """Number of batches that reached the gate; the warm-up counts as one."""
        return self._count.stat().st_size if self._count.exists() else 0

    async def comes_to(self, number: int) -> None:
        """Wait until `count` is at least `number`."""
        async with asyncio.timeout(60):
            while self.count < number:
                await asyncio.sleep(0.01)

    def pass_through(self) -> None:
        with self._count.open("ab") as file:
            file.write(b".")
        while self._closed.exists() and not self._is_admitted():
            time.sleep(0.01)
        with contextlib.suppress(FileNotFoundError):
            fault = pickle.loads(self._fault.read_bytes())
            if fault is not None:
                raise fault

    def _is_admitted(self) -> bool:
        try:
            self._admitted.unlink()
        except FileNotFoundError:
            return False
        return True


@contextlib.contextmanager
def gated_engines(folder: Path) -> Iterator[Gate]:
    """Put a gate in front of the engine of every server that starts within the context."""
    # Lazy imports: the worker processes import this module too.
    import pytest

    from maskrcnn_trt.serving.pipeline import served_model

    gate = Gate(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served_model, "BundleLoader", partial(_GatedLoader, gate))
        try:
            yield gate
        finally:
            gate.open()


class _GatedLoader:
    """Loader of a bundle's engine behind a gate."""

    def __init__(self, gate: Gate, *arguments: Any) -> None:
        self._gate = gate
        self._loader = BundleLoader(*arguments)

    def load(self) -> "_GatedEngine":
        return _GatedEngine(self._gate, self._loader.load())


class _GatedEngine:
    def __init__(self, gate: Gate, engine: Any) -> None:
        self._gate = gate
        self._engine = engine
        self.info = engine.info
        self.close = engine.close

    def warm_up(self, max_batch: int) -> None:
        self._gate.pass_through()
        self._engine.warm_up(max_batch)

    def compute(self, items: Sequence[Any]) -> Sequence[Any]:
        self._gate.pass_through()
        results: Sequence[Any] = self._engine.compute(items)
        return results
