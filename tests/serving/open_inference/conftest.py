"""Triton's client, and a predictor that computes the expected detections."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tritonclient.grpc import InferenceServerClient

from maskrcnn_trt.serving.offline import Detector


@pytest.fixture(scope="module")
def predictor(bundle: Path) -> Iterator[Detector]:
    with contextlib.closing(Detector(bundle)) as predictor:
        yield predictor


@pytest.fixture
def triton(address: str) -> Iterator[InferenceServerClient]:
    with InferenceServerClient(address) as client:
        yield client
