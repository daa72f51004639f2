"""Triton's client."""

from collections.abc import Iterator

import pytest
from tritonclient.grpc import InferenceServerClient


@pytest.fixture
def triton(address: str) -> Iterator[InferenceServerClient]:
    with InferenceServerClient(address) as client:
        yield client
