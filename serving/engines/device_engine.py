"""The engine whose device does all the work on an image, from its file to its encoded masks."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Sequence
from io import BytesIO
from typing import Any, ClassVar, Final

from PIL import Image

from ...model.images import ImageError, read_header
from ...model.manifest import Manifest
from ...model.spec import ShapeBucket
from ..backends.torch import TorchBackend
from ..detections import DEFAULT_OPTIONS, Answer, Detections
from ..messages import encoded_detections
from ..steps.base import Job, Order, Outcome
from ..steps.device_steps import DeviceSteps
from ..steps.preprocessing import PlannedImage


class OrderBatches:
    """Batches of orders, each of which goes through all steps in the thread that brings it."""

    takes_orders: ClassVar = True
    busy_from: Final = 3
    """One batch before the model, one at it and one behind it: were more begun before they are
    full, they would wait for the model instead."""
    concurrency: Final = 5
    """Full batches are there before the model is free, though the server takes its time over
    answers and requests."""

    def __init__(self, backend: TorchBackend, manifest: Manifest) -> None:
        """Prepare the steps of a backend.

        Args:
            backend: Computes the model.
            manifest: Of the bundle that the backend was loaded from.
        """
        self._backend = backend
        self._steps = [
            (step.run, threading.Lock() if step.threads == 1 else contextlib.nullcontext())
            for step in DeviceSteps(backend, manifest, threads=self.concurrency).steps
        ]

    def warm_up(self, max_batch: int) -> None:
        """Warm the backend up, each step, and the form that our own protocol asks for."""
        self._backend.warm_up(max_batch)
        batch = 1 if self._backend.device == "cpu" else max_batch
        for bucket in self._backend.buckets:
            order = Order(Job(_black_image(bucket), DEFAULT_OPTIONS), encoded_detections)
            self.compute([order] * batch)

    def compute(self, orders: Sequence[Order]) -> list[Answer[Any] | ImageError]:
        """What each image is answered with, or why it is not."""
        outcomes = self._outcomes([order.job for order in orders])
        return [
            _answer_to(order, found) if isinstance(found, Detections) else found
            for order, found in zip(orders, outcomes, strict=True)
        ]

    def _outcomes(self, jobs: Sequence[Job]) -> list[Outcome]:
        batch: Any = jobs
        for run, lock in self._steps:
            with lock:
                batch = run(batch)
        outcomes: list[Outcome] = batch
        return outcomes


def _answer_to(order: Order, found: Detections) -> Answer[Any]:
    start = time.perf_counter()
    value = order.form(found)
    encode_us = found.timing.encode_us + round(1e6 * (time.perf_counter() - start))
    return Answer(value, dataclasses.replace(found.timing, encode_us=encode_us))


def _black_image(bucket: ShapeBucket) -> PlannedImage:
    """A JPEG that fills a bucket."""
    file = BytesIO()
    Image.new("RGB", (bucket.width, bucket.height)).save(file, "JPEG")
    data = file.getvalue()
    return PlannedImage(data, read_header(data), bucket, bucket)
