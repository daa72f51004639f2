"""Memory limit of a program's first run on a GPU; torch.cuda is replaced by a stub."""

from types import SimpleNamespace

import pytest
import torch

from maskrcnn_trt.model.bundle.program import Program


class StubCuda:
    """Stub of torch.cuda for a GPU of 80 GiB with 8 GiB in use."""

    OutOfMemoryError = torch.OutOfMemoryError

    def __init__(self, allowed: float) -> None:
        self.allowed = allowed

    def get_per_process_memory_fraction(self, device: object) -> float:
        return self.allowed

    def set_per_process_memory_fraction(self, fraction: float, device: object) -> None:
        self.allowed = fraction

    def get_device_properties(self, device: object) -> SimpleNamespace:
        return SimpleNamespace(total_memory=80 << 30)

    def memory_reserved(self, device: object) -> int:
        return 8 << 30


class MemoryHungryProgram(Program):
    """Program that runs out of memory below its need and records the limit of each run."""

    def __init__(self, gpu: StubCuda, needs: float) -> None:
        self.device = torch.device("cuda", 0)
        self.gpu, self.needs = gpu, needs
        self.runs: list[float] = []

    def __call__(self, images: torch.Tensor, image_sizes: torch.Tensor) -> tuple[()]:
        self.runs.append(self.gpu.allowed)
        if self.gpu.allowed < self.needs:
            raise torch.OutOfMemoryError
        return ()


@pytest.mark.parametrize(
    ("allowed", "needs", "runs"),
    [(1.0, 0.1, [0.2]), (0.9, 0.5, [0.2, 0.9]), (0.15, 0.1, [0.15]), (0.9, 2.0, [0.2, 0.9])],
)
def test_memory_is_bounded_unless_the_model_needs_more(
    monkeypatch: pytest.MonkeyPatch, allowed: float, needs: float, runs: list[float]
) -> None:
    gpu = StubCuda(allowed)
    model = MemoryHungryProgram(gpu, needs)
    monkeypatch.setattr(torch, "cuda", gpu)
    if needs > allowed:
        with pytest.raises(torch.OutOfMemoryError):
            model.prepare(torch.zeros(1), torch.zeros(1))
    else:
        model.prepare(torch.zeros(1), torch.zeros(1))
    assert model.runs == runs
    assert gpu.allowed == allowed
