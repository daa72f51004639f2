"""Batches on the device, each prepared while the model is at the one before."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from .batches import Batch, EncodedBatch


def batches_on(device: torch.device, batches: Iterable[Batch | EncodedBatch]) -> Iterator[Batch]:
    """Bring batches to a device, in order.

    On a GPU a thread waits for the next batch, and a stream of its own copies and decodes it, while
    the model computes; what is yielded is ready for the current stream.

    Raises:
        DataError: as the batches do, or a file is damaged within.
    """
    if device.type != "cuda":
        for batch in batches:
            yield batch.to(device)
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    source = iter(batches)

    def prepare() -> tuple[Batch, torch.cuda.Event] | None:
        batch = next(source, None)
        if batch is None:
            return None
        with torch.cuda.device(device), torch.cuda.stream(stream):
            moved = batch.to(device, non_blocking=True)
            return moved, stream.record_event()

    with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
        pending = thread.submit(prepare)
        while (prepared := pending.result()) is not None:
            pending = thread.submit(prepare)
            batch, ready = prepared
            current = torch.cuda.current_stream(device)
            current.wait_event(ready)
            # Or the memory would be given away while the model still reads it.
            batch.record_stream(current)
            yield batch
