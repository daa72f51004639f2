import pytest
import torch

from maskrcnn_trt.training.config import ConfigError
from maskrcnn_trt.training.distributed import worker


@pytest.mark.parametrize(("devices", "seen"), [(1, "1 CUDA device"), (2, "2 CUDA devices")])
def test_more_processes_than_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch, devices: int, seen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError) as caught, worker("auto"):
        pass
    assert str(caught.value) == (
        f"torchrun started 3 processes here, but torch sees only {seen}; give it --nproc-per-node "
        f"{devices}, or use device=cpu"
    )


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sentence = "device=cuda, but torch sees no CUDA device; use device=cpu"
    with pytest.raises(ConfigError, match=sentence), worker("cuda"):
        pass
