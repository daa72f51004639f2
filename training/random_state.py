"""The process-wide random generators, seeded, saved and restored.

Nothing of this package draws from them while it trains: images, flips and samples are functions of
seed and iteration. A user's own layers may, and a resumed run should give them the same numbers.
"""

import random
from typing import Any

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, numpy and torch, on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def generator_states(device: torch.device) -> dict[str, Any]:
    """States of the generators of this process, of types that `torch.load` reads as weights."""
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
    """Set the generators as they were; that of a GPU, if there was and is one."""
    random.setstate(states["python"])
    twister = states["numpy"]["state"]
    key = twister["key"].numpy().astype(np.uint32)
    np.random.set_state({**states["numpy"], "state": {**twister, "key": key}})
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
