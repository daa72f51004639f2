"""Prefetch batches to the device."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from .batches import Batch, EncodedBatch


def prefetch_batches(
    device: torch.device, batches: Iterable[Batch | EncodedBatch]
) -> Iterator[Batch]:
    """Copy batches to a device and yield them in order.

    On a GPU, the next batch is copied and decoded on a separate CUDA stream while the model
    computes. Yielded batches can be used on the current stream without further synchronization.

    Raises:
        DataError: Iterating over `batches` raised this error, or a JPEG file is damaged.
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
            # The allocator must not reuse the memory while the model still reads it.
            batch.record_stream(current)
            yield batch
