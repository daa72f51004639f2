"""Seed, save and restore the global random generators of Python, numpy and torch.

In this package, only the initialisation of the model changes the states of these generators.
Batches, flips and sampling depend only on the seed and the iteration. However, layers that users
add, such as dropout, may use the generators. Their states are saved so that a resumed run with such
layers equals an uninterrupted run.
"""

import random
from typing import Any

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, numpy and torch on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators of Python, numpy and torch on the CPU.

    If `device` is a GPU, the state of torch's generator on this GPU is included.

    All values are of types that `torch.load(weights_only=True)` accepts.
    """
    numpy_state: Any = np.random.get_state(legacy=False)
    twister = numpy_state["state"]
    key = torch.from_numpy(twister["key"].astype(np.int64))
    states = {
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": {**twister, "key": key}},
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states: dict[str, Any], device: torch.device) -> None:
    """Restore the states of random generators from `states`, a result of `generator_states`.

    If `device` is the CPU, a GPU state in `states` is ignored. If `device` is a GPU, but `states`
    has no GPU state, the generator of this GPU is not changed.
    """
    random.setstate(states["python"])
    twister = states["numpy"]["state"]
    key = twister["key"].numpy().astype(np.uint32)
    np.random.set_state({**states["numpy"], "state": {**twister, "key": key}})
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
