import io
import random

import numpy as np
import pytest
import torch

from maskrcnn_trt.training.random_state import generator_states, restore_generators, seed_generators

CPU = torch.device("cpu")


def _draw(device: torch.device = CPU) -> list[float]:
    numbers = [random.gauss(0, 1), np.random.standard_normal(), float(torch.randn(1))]
    return [*numbers, float(torch.randn(1, device=device))]


def _saved_and_loaded(states: dict[str, object]) -> dict[str, object]:
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    loaded: dict[str, object] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize(
    "device", [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)]
)
def test_restored_generators_continue(device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    seed_generators(1)
    first = _draw(device)
    states = _saved_and_loaded(generator_states(device))
    second = _draw(device)
    seed_generators(1)
    assert _draw(device) == first
    _draw(device)
    restore_generators(states, device)
    assert _draw(device) == second != first
