import math
from pathlib import Path

import pytest
import torch
from tiny_run import LoadTiny, largest_difference, train
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from maskrcnn_trt.model.checkpoint import CheckpointError
from maskrcnn_trt.training.config import ConfigError, TrainConfig
from maskrcnn_trt.training.data.coco.dataset import CocoDataset
from maskrcnn_trt.training.data.loading.batches import Batch
from maskrcnn_trt.training.data.loading.loader import train_loader
from maskrcnn_trt.training.distributed import Worker
from maskrcnn_trt.training.trainer import GpuMemoryError, Trainer

ALONE = Worker(0, 1, torch.device("cpu"))
CLASSES = "model.num_classes=3"


def _batches(config: TrainConfig) -> list[Batch]:
    return list(train_loader(CocoDataset(config.data.train), config))


def test_steps_equal_a_plain_loop(tiny: LoadTiny) -> None:
    config = tiny(CLASSES, "solver.weight_decay=0.1", "solver.bias_lr_factor=2")
    trainer, reference = Trainer(config, ALONE), Trainer(config, ALONE).model
    named = dict(reference.named_parameters())
    biases = [p for name, p in named.items() if name.endswith(".bias")]
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.1, "factor": 1},
        {"params": [named[n] for n in named if n.endswith(".weight") and named[n].dim() == 1]},
        {"params": biases, "factor": 2},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    for batch, rate in zip(_batches(config), (0.01 / 3, 0.02 / 3, 0.01, 0.001), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("factor", 1)
        losses = reference(batch.images, batch.image_sizes, batch.targets, batch.seeds).means()
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
        torch.testing.assert_close(trainer.step([batch]), losses.detach(), rtol=1e-4, atol=1e-5)
    assert largest_difference(trainer.model.state_dict(), reference.state_dict()) < 1e-5


def test_accumulation_equals_the_whole_batch(tiny: LoadTiny) -> None:
    whole, cut = (
        Trainer(tiny(CLASSES, *overrides), ALONE) for overrides in ((), ("solver.accumulate=4",))
    )
    start = {name: weight.clone() for name, weight in whole.model.state_dict().items()}
    parts = iter(_batches(cut.config))
    for batch in _batches(whole.config)[:2]:
        expected = whole.step([batch])
        losses = cut.step([next(parts) for _ in range(4)])
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    weights = whole.model.state_dict()
    assert largest_difference(weights, start) > 1e-3
    assert largest_difference(weights, cut.model.state_dict()) < 1e-5


def test_accumulation_shows_batch_norm_each_image_once(tiny: LoadTiny) -> None:
    config = tiny(CLASSES, "model.backbone.norm=bn", "solver.accumulate=2")
    trainer, reference = Trainer(config, ALONE), Trainer(config, ALONE)
    parts = _batches(config)[:2]
    with torch.no_grad():
        for part in parts:
            reference.model(part.images, part.image_sizes, part.targets, part.seeds)
    trainer.step(parts)
    buffers = dict(reference.model.named_buffers())
    assert buffers["backbone.body.bn1.num_batches_tracked"] == 2
    torch.testing.assert_close(dict(trainer.model.named_buffers()), buffers, rtol=0, atol=0)


def test_losses_do_not_depend_on_memory_order(tiny: LoadTiny) -> None:
    for_nchw, for_nhwc = (
        Trainer(tiny(CLASSES, f"channels_last={value}"), ALONE) for value in ("false", "true")
    )
    assert for_nhwc.model.backbone.body.conv1.weight.is_contiguous(
        memory_format=torch.channels_last
    )
    batch = _batches(for_nchw.config)[0]
    torch.testing.assert_close(for_nchw.step([batch]), for_nhwc.step([batch]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_bf16_trains(tiny: LoadTiny, optimizer: str) -> None:
    settings = (CLASSES, f"solver.optimizer={optimizer}", "solver.base_lr=0.001")
    exact, rough = (
        Trainer(tiny(*settings, f"precision={precision}"), ALONE) for precision in ("fp32", "bf16")
    )
    batch = _batches(exact.config)[0]
    for _ in range(2):
        expected, losses = exact.step([batch]), rough.step([batch])
        torch.testing.assert_close(losses, expected, rtol=0.1, atol=0.05)
        assert not torch.equal(losses, expected)
    assert all(p.dtype == torch.float32 for p in rough.model.parameters())
    assert largest_difference(rough.model.state_dict(), exact.model.state_dict()) > 0


def test_weights_are_where_training_starts(tiny: LoadTiny, tmp_path: Path) -> None:
    first = train(tiny("solver.max_iterations=1"))
    path = tmp_path / "model_final.pth"
    trainer = Trainer(tiny(CLASSES, f"weights={path}"), ALONE)
    assert trainer.iteration == 0
    assert largest_difference(trainer.model.state_dict(), first.weights) == 0


def test_precision_and_weights_must_fit(
    tiny: LoadTiny, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    for start in (lambda config: Trainer(config, ALONE), train):
        with pytest.raises(ConfigError, match="fp16 needs a GPU; use precision=bf16 or fp32"):
            start(tiny("precision=fp16"))
    assert not any(tmp_path.iterdir())  # no folder of a run
    with pytest.raises(CheckpointError, match=r"none\.pth does not exist"):
        Trainer(tiny(CLASSES, "weights=none.pth"), ALONE)
    with pytest.raises(CheckpointError) as caught:
        Trainer(tiny(CLASSES, f"weights={tiny_checkpoint}"), ALONE)
    assert str(tiny_checkpoint) in str(caught.value)
    assert "model.roi.box_head_dim=64" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_frozen_stages_stay(tiny: LoadTiny) -> None:
    config = tiny(CLASSES, "model.backbone.frozen_stages=2", "weights=null")
    trainer = Trainer(config, ALONE)
    start = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    for batch in _batches(config)[:2]:
        trainer.step([batch])
    weights = trainer.model.state_dict()
    stays = {name for name in start if torch.equal(weights[name], start[name])}
    frozen = tuple(f"backbone.body.{stage}." for stage in ("conv1", "bn1", "layer1"))
    expected = {name for name in start if name.startswith(frozen)}
    assert {name for name in stays if name.startswith("backbone.body.")} == expected


def test_average_equals_torchs(tiny: LoadTiny) -> None:
    """The decay is limited in the first steps."""
    config = tiny(CLASSES, "solver.ema_decay=0.25", "model.backbone.norm=bn")
    trainer = Trainer(config, ALONE)
    decays = iter((2 / 11, 0.25, 0.25))
    expected = AveragedModel(
        trainer.model, multi_avg_fn=lambda *args: get_ema_multi_avg_fn(next(decays))(*args)
    )
    expected.n_averaged += 1  # not a copy of the weights after the first step
    for batch in _batches(config)[:3]:
        trainer.step([batch])
        expected.update_parameters(trainer.model)
    weights = {name: p.detach() for name, p in expected.module.named_parameters()}
    found = {name: trainer.evaluated_model.state_dict()[name] for name in weights}
    assert largest_difference(found, weights) < 1e-6
    trained = {name: trainer.model.state_dict()[name] for name in weights}
    assert largest_difference(found, trained) > 1e-4
    mean = "backbone.body.bn1.running_mean"
    buffers, current = trainer.evaluated_model.state_dict(), trainer.model.state_dict()
    assert 0 < (buffers[mean] - current[mean]).abs().max() < current[mean].abs().max()
    assert buffers["backbone.body.bn1.num_batches_tracked"] == 3


def test_gradients_are_clipped(tiny: LoadTiny) -> None:
    plain = ("solver.base_lr=1", "solver.warmup_iterations=0", "solver.weight_decay=0")
    config = tiny(CLASSES, "solver.clip_gradient_norm=0.25", *plain)
    trainer = Trainer(config, ALONE)
    start = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.step(_batches(config)[:1])
    squares = [
        float((parameter.detach() - before).square().sum())
        for parameter, before in zip(trainer.model.parameters(), start, strict=True)
    ]
    assert math.sqrt(sum(squares)) == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (("solver.images_per_batch=12",), r"pass: 12, .*solver\.accumulate=2,.* 6 images per"),
        (("solver.images_per_batch=9",), r"solver\.accumulate=3,.* 3 images per"),
        (("solver.accumulate=2",), r"solver\.accumulate=4,.* 1 image per"),
        (("solver.accumulate=4",), "precision=bf16"),
        (
            ("solver.accumulate=4", "precision=bf16"),
            r"(64x96|96x64) pixels\); lower data\.min_size",
        ),
    ],
)
def test_out_of_memory_names_a_batch_that_may_fit(
    tiny: LoadTiny, overrides: tuple[str, ...], remedy: str
) -> None:
    config = tiny(*overrides)
    trainer = Trainer(config, ALONE)
    batches = _batches(config)[: config.solver.accumulate]

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    trainer.model.backbone.body.layer1.register_forward_hook(fail)
    with pytest.raises(GpuMemoryError, match=remedy):
        trainer.step(batches)
