from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.model.image_decoding import ImageHeader
from maskrcnn_trt.serving.detections import DetectionOptions
from maskrcnn_trt.serving.engines import device_batches
from maskrcnn_trt.serving.engines.base import ImageRequest, PlannedImage
from maskrcnn_trt.serving.engines.device_batches import (
    BatchWaiter,
    InferredBatch,
    PastedBatch,
    PreparedBatch,
    StreamEvent,
    boxes_in_sources,
    scales_and_limits,
    selections_of,
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_boxes_are_scaled_and_clipped(device: str) -> None:
    sizes, source_sizes = np.array([[[96, 128], [90, 120]], [[480, 640], [333, 500]]])
    corners = torch.rand(2, 5, 2, 2, generator=torch.Generator().manual_seed(0)) * 140 - 10
    boxes = torch.cat([corners.amin(2), corners.amax(2)], dim=-1)
    scales, limits = torch.from_numpy(scales_and_limits(sizes, source_sizes)[:, :, None]).to(device)
    found = boxes_in_sources(boxes.to(device), scales, limits).cpu().numpy()
    for own, source, (height, width), (source_height, source_width) in zip(
        boxes.numpy(), found, sizes, source_sizes, strict=True
    ):
        edges = np.array([source_width, source_height] * 2, np.float32)
        ratios = edges / np.array([width, height] * 2, np.float32)
        np.testing.assert_array_equal(source, np.clip(own * ratios, 0, edges))


def test_selections_are_floats() -> None:
    """The GPU reads them as float64."""
    image = PlannedImage(b"", ImageHeader((8, 8), 1, False), ShapeBucket(8, 8), (8, 8))
    options = [
        DetectionOptions(score_threshold=0, max_detections=5),
        DetectionOptions(score_threshold=1, max_detections=2**64),
        DetectionOptions(),
    ]
    for count in (1, 2, 3):
        selections = selections_of([ImageRequest(image, own) for own in options[:count]])
        assert selections.dtype == np.float64
    assert selections.tolist() == [[5, 0], [2**64, 1], [np.inf, 0]]


class SimulatedGpu:
    """GPU that computes one batch after the other, with a clock that only `sleep` moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.sleeps = 100.0, 0
        # Time at which the work queued so far is complete.
        self.idle_s = 0.0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: object) -> None:
                self.done_s = max(gpu.now_s, gpu.idle_s)

            def query(self) -> bool:
                return gpu.now_s >= self.done_s

            def elapsed_time(self, end: Any) -> float:
                return 1000 * float(end.done_s - self.done_s)

        monkeypatch.setattr(torch.cuda, "Stream", SimulatedGpu)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        clock = SimpleNamespace(perf_counter=lambda: self.now_s, sleep=self.sleep)
        monkeypatch.setattr(device_batches, "time", clock)

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.sleeps += 1

    def queue(self, duration_s: float, images: int = 8) -> PastedBatch:
        """Queue a batch for which the model takes `duration_s`, and pasting 0.3 ms."""
        empty: Any = None
        prepared = PreparedBatch(ShapeBucket(8, 8), [empty] * images, *[empty] * 8)
        begin = StreamEvent(self)  # type: ignore[arg-type]
        self.idle_s = max(self.now_s, self.idle_s) + duration_s
        inferred = InferredBatch(prepared, empty, begin, StreamEvent(self))  # type: ignore[arg-type]
        idle_s, self.idle_s = self.idle_s, self.idle_s + 3e-4
        pasted = PastedBatch(inferred, *[empty] * 5, StreamEvent(self))  # type: ignore[arg-type]
        self.idle_s = idle_s  # the next batch does not wait for the pasting
        return pasted


def test_few_polls_while_the_model_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimulatedGpu(monkeypatch)
    waiter = BatchWaiter(longest_pause_s=5e-4)

    def wait(batch: PastedBatch) -> tuple[int, float]:
        """Return the number of pauses, and by how many ms the end was found too late."""
        before = gpu.sleeps
        waiter.wait(batch)
        return gpu.sleeps - before, 1000 * (gpu.now_s - batch.ready._event.done_s)

    batches = [gpu.queue(9e-3) for _ in range(3)]
    pauses = []
    for duration_s in [9e-3] * 6 + [5e-3] * 3:  # three batches are always queued
        count, late_ms = wait(batches.pop(0))
        assert 0 <= late_ms <= 0.5
        pauses.append(count)
        batches.append(gpu.queue(duration_s))
    assert pauses[0] >= 18
    assert max(pauses[1:]) <= 8
    late = [wait(batch)[1] for batch in batches]
    assert late[0] < 4, "the first shorter batch ends before it is polled"
    assert max(late[1:]) <= 0.5

    # After this thread woke up late, it finds the ends of later batches in time.
    batches = [gpu.queue(5e-3) for _ in range(6)]
    gpu.sleep(12e-3)
    late = [wait(batch)[1] for batch in batches]
    assert late[0] > 5
    assert max(late[3:]) <= 0.5

    # Threads may wait for batches in another order than that of the model.
    first, second, *others = [gpu.queue(5e-3) for _ in range(4)]
    late = [wait(batch)[1] for batch in (second, first, *others)]
    assert max(late[2:]) <= 0.5

    # A batch on an idle GPU, and one of another size.
    gpu.sleep(1.0)
    count, late_ms = wait(gpu.queue(5e-3))
    assert count <= 8
    assert late_ms <= 0.5
    assert wait(gpu.queue(1e-3, images=1))[1] <= 0.5
