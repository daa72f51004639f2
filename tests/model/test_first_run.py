"""The first run of a program on a GPU, which is bounded in its memory; torch.cuda is a stand-in."""

from types import SimpleNamespace

import pytest
import torch

from maskrcnn_trt.model.program import Program


class Gpu:
    """The part of torch.cuda that bounds memory, of a GPU of 80 GiB of which 8 are taken."""

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


class Model(Program):
    """Runs out of memory where it is allowed less than it needs, and notes what that is."""

    def __init__(self, gpu: Gpu, needs: float) -> None:
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
    [(1.0, 0.1, [0.2]), (0.9, 0.5, [0.2, 0.9]), (0.15, 0.1, [0.15])],
)
def test_memory_is_bounded_unless_the_model_needs_more(
    monkeypatch: pytest.MonkeyPatch, allowed: float, needs: float, runs: list[float]
) -> None:
    gpu = Gpu(allowed)
    model = Model(gpu, needs)
    monkeypatch.setattr(torch, "cuda", gpu)
    model.prepare(torch.zeros(1), torch.zeros(1))
    assert model.runs == runs
    assert gpu.allowed == allowed


def test_what_the_process_was_allowed_stays_so_when_nothing_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(0.9)
    monkeypatch.setattr(torch, "cuda", gpu)
    with pytest.raises(torch.OutOfMemoryError):
        Model(gpu, needs=2.0).prepare(torch.zeros(1), torch.zeros(1))
    assert gpu.allowed == 0.9
