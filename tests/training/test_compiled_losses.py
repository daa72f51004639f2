import gc
import weakref
from itertools import chain
from pathlib import Path

import pytest
import torch
from tiny_run import LoadTiny
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import cache_dir

from maskrcnn_trt.model.mask_rcnn import MaskRCNN
from maskrcnn_trt.training.compiled_losses import CompiledLosses, parameters_by_part
from maskrcnn_trt.training.config import ConfigError
from maskrcnn_trt.training.data.coco.dataset import CocoDataset
from maskrcnn_trt.training.data.loading.loader import train_loader
from maskrcnn_trt.training.distributed import Worker
from maskrcnn_trt.training.trainer import Trainer, set_arithmetic

# torch.compile imports deprecated parts of torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
FROZEN = ("model.num_classes=3", "model.backbone.norm=frozen_bn", "weights=null")


@pytest.mark.slow
def test_traced_steps_equal_eager_ones(tiny: LoadTiny) -> None:
    """Tracing without code generation: whole, for any number of objects, and when accumulating.

    Counts are reported before the losses, and gradients as soon as they are complete.
    """
    config = tiny(*FROZEN, "solver.accumulate=2")
    alone = Worker(0, 1, torch.device("cpu"))
    eager, traced = Trainer(config, alone), Trainer(config, alone)
    reported: list[dict[str, Tensor]] = []

    def on_gradients() -> None:
        named = traced.model.named_parameters()
        reported.append({name: x.grad.clone() for name, x in named if x.grad is not None})

    counts: list[Tensor] = []
    losses = CompiledLosses(
        traced.model, backend="aot_eager", on_counts=counts.append, on_gradients=on_gradients
    )
    traced.model.losses = losses  # type: ignore[method-assign]
    torch._dynamo.utils.counters.clear()
    parts = list(train_loader(CocoDataset(config.data.train), config))[:2]
    assert parts[0].targets.labels.shape[1] != parts[1].targets.labels.shape[1]
    torch.testing.assert_close(traced.step(parts), eager.step(parts))
    torch.testing.assert_close(traced.model.state_dict(), eager.model.state_dict())

    reported.clear()
    batch = parts[0]
    terms = losses(batch.images, batch.image_sizes, batch.targets, batch.seeds)
    assert counts[-1].equal(terms.counts)
    terms.sums.sum().backward()
    names = {parameter: name for name, parameter in traced.model.named_parameters()}
    groups = parameters_by_part(traced.model)
    assert {*chain.from_iterable(groups)} == names.keys()
    for index, gradients in enumerate(reported):
        for parameter in chain.from_iterable(groups[: index + 1]):
            assert parameter.grad is not None
            assert parameter.grad.equal(gradients[names[parameter]])
        assert not any(names[parameter] in gradients for parameter in groups[-1])
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 3
    assert not counters["graph_break"]


def test_without_a_compiler_steps_are_only_slower(
    tiny: LoadTiny, caplog: pytest.LogCaptureFixture
) -> None:
    """No gradients are reported, because they may be incomplete."""
    config, alone = tiny(*FROZEN), Worker(0, 1, torch.device("cpu"))
    eager, trainer = Trainer(config, alone), Trainer(config, alone)
    reported: list[None] = []

    def no_compiler(*_: object) -> None:
        raise RuntimeError("there is no compiler")

    batches = list(train_loader(CocoDataset(config.data.train), config))[:3]
    trainer.model.losses = CompiledLosses(trainer.model, no_compiler)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"no compiler.*compile=false"):
        trainer.step(batches[:1])
    trainer.model.losses = CompiledLosses(  # type: ignore[method-assign]
        trainer.model,
        no_compiler,
        required=False,
        on_gradients=lambda: reported.append(None),
    )
    for batch in batches:
        torch.testing.assert_close(trainer.step([batch]), eager.step([batch]))
    assert not reported
    assert caplog.text.count("without compilation") == 1


def test_programs_are_in_the_user_cache(
    tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also if torch has set its own default, as it does when it is imported."""
    model = MaskRCNN(tiny(*FROZEN).model)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert not Path(cache_dir()).is_relative_to(tmp_path)
    CompiledLosses(model)
    assert Path(cache_dir()).is_relative_to(tmp_path / "maskrcnn-trt")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "chosen"))
    CompiledLosses(model)
    assert Path(cache_dir()) == tmp_path / "chosen"


def test_a_compiled_model_is_freed_before_the_next(tiny: LoadTiny) -> None:
    """The validation set of a run freezes all objects."""
    config, alone = tiny(*FROZEN, "compile=true"), Worker(0, 1, torch.device("cpu"))
    model = weakref.ref(Trainer(config, alone).model)
    gc.freeze()
    Trainer(config, alone)
    assert model() is None


BODIES = {
    "fpn": (*FROZEN, "model.backbone.name=resnet50"),
    "c4": (*FROZEN, "model.backbone.features=c4"),
    "c5": (*FROZEN, "model.backbone.name=resnet50", "model.backbone.features=c5"),
    "group norm": ("model.num_classes=3", "weights=null"),
    # The maps of `layer4` have 25x42 cells. By default, torch's compiler would pad such maps.
    "group norm, large images": (
        *("model.num_classes=3", "weights=null", "model.backbone.name=resnet50"),
        *("data.min_size=800", "data.max_size=1333", "data.buckets=[[800,1344],[1344,800]]"),
    ),
    "batch norm": (
        *("model.num_classes=3", "weights=null"),
        *("model.backbone.norm=bn", "model.roi.head_norm=bn", "model.roi.box_head_convs=1"),
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("body", "precision"),
    [*((body, "fp16") for body in BODIES), ("fpn", "fp32"), ("fpn", "bf16")],
)
def test_compiled_steps_equal_eager_ones(tiny: LoadTiny, body: str, precision: str) -> None:
    """Steps with several numbers of objects, repeated until their CUDA graphs are replayed."""
    settings = (f"precision={precision}", "channels_last=true", "solver.base_lr=0.00001")
    device = torch.device("cuda", 0)
    eager, compiled = (
        Trainer(tiny(*BODIES[body], *settings, f"compile={value}"), Worker(0, 1, device))
        for value in ("false", "true")
    )
    set_arithmetic(eager.config)
    tolerance = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 1e-1}[precision]
    batches = list(train_loader(CocoDataset(eager.config.data.train), eager.config))
    same_shape = [b.to(device) for b in batches if b.images.shape == batches[0].images.shape]
    for batch in same_shape[:2] * 4:
        losses = [trainer.step([batch]) for trainer in (compiled, eager)]
        torch.testing.assert_close(*losses, rtol=tolerance, atol=tolerance)
    # Sums of the gradients of all steps.
    momenta = [
        [state["momentum_buffer"].flatten() for state in trainer.optimizer.state.values()]
        for trainer in (compiled, eager)
    ]
    whole, expected = map(torch.cat, momenta)
    assert (whole - expected).norm() < 10 * tolerance * expected.norm()
    # An error in a few layers hardly changes the norm over all layers.
    for one, other in zip(*momenta, strict=True):
        assert (one - other).norm() < 0.5 * other.norm() + 1e-3 * expected.norm()
