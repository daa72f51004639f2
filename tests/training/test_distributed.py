import time
from pathlib import Path

import pytest
import torch
from tiny_run import LoadTiny, two_processes
from torch import Tensor, distributed

from maskrcnn_trt.training.config import ConfigError, TrainConfig
from maskrcnn_trt.training.devices import number_of_processes
from maskrcnn_trt.training.distributed import GradientSum, local_device, worker
from maskrcnn_trt.training.run import run_training


@pytest.mark.parametrize("devices", [1, 2])
def test_more_processes_than_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch, devices: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "0")
    pattern = f"3 training processes .* is {devices}; use processes={devices} "
    with pytest.raises(ConfigError, match=pattern), worker("auto"):
        pass


def test_a_missing_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="use device=cpu"), worker("cuda"):
        pass


def test_each_process_has_the_gpu_at_its_rank(
    tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    for device, index in (("0,3", 3), ("[2, 0]", 0), ("cuda", 1), ("auto", 1)):
        assert local_device(tiny(f"device={device}").device) == torch.device("cuda", index)
    with pytest.raises(ConfigError, match=r"device=2,4, .* is 4; .*numbers below 4"):
        local_device((2, 4))
    assert local_device("cpu").type == "cpu"


def test_gradients_are_summed_in_one_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also if another rank reports its gradients only after the backward pass."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    summed: list[Tensor] = []
    all_reduce = distributed.all_reduce
    monkeypatch.setattr(distributed, "all_reduce", lambda x: [summed.append(x), all_reduce(x)])
    parameters = [torch.zeros(n + 1, requires_grad=True) for n in range(5)]
    *trained, frozen = parameters
    frozen.requires_grad_(False)
    gradients = GradientSum([trained[2:], [trained[0], frozen], [trained[1]]])
    orders = []
    try:
        for reports in range(3):
            for parameter in trained:
                parameter.grad = torch.ones_like(parameter)
            for _ in range(reports):
                gradients.start()
            assert len(summed) == (0, 2, 3)[reports]
            gradients.finish()
            orders.append([x.shape for x in summed])
            summed.clear()
    finally:
        distributed.destroy_process_group()
    assert orders == [[torch.Size([n]) for n in (3, 4, 1, 2)]] * 3


def test_the_number_of_processes_is_that_of_the_gpus(tiny: LoadTiny) -> None:
    for override, count in (("device=0,1", 2), ("device=3", 1), ("processes=2", 2), ("seed=0", 1)):
        config = tiny(override)
        assert number_of_processes(config.device, config.processes) == count
        assert TrainConfig.model_validate(config.model_dump(mode="json")) == config
    with pytest.raises(ConfigError, match=r"processes=3 .*GPUs in device \(2\)"):
        tiny("device=0,1", "processes=3")
    with pytest.raises(ConfigError, match="maskrcnn train"):
        run_training(tiny("processes=2"))


@pytest.mark.slow
def test_a_rank_ends_if_another_one_dies(tiny_config: Path, tmp_path: Path) -> None:
    settings = ("solver.max_iterations=10000", "evaluation.skip_test=true", "checkpoint_period=1")
    run = ("train", str(tiny_config), f"output_dir={tmp_path / 'run'}", *settings)
    with two_processes(tmp_path, *run) as (survivor, killed):
        while survivor.is_alive() and not (tmp_path / "run" / "last_checkpoint").exists():
            time.sleep(0.01)
        killed.kill()
    assert survivor.exitcode == 1
    errors = (tmp_path / "0.stderr").read_text()
    assert "Traceback" not in errors
    assert "rank 0 lost" in errors
    assert "--resume" in errors
