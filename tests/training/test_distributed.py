import pytest
import torch

from maskrcnn_trt.training.config import ConfigError
from maskrcnn_trt.training.distributed import worker


@pytest.mark.parametrize("devices", [1, 2])
def test_more_processes_than_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch, devices: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "0")
    pattern = f"3 processes .* is {devices}; .*--nproc-per-node {devices} "
    with pytest.raises(ConfigError, match=pattern), worker("auto"):
        pass


def test_a_missing_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="use device=cpu"), worker("cuda"):
        pass
