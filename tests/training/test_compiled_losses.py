import pytest
import torch
from tiny_run import LoadTiny

from maskrcnn_trt.training.compiled_losses import CompiledLosses
from maskrcnn_trt.training.data.coco.dataset import CocoDataset
from maskrcnn_trt.training.data.loading.loader import train_loader
from maskrcnn_trt.training.distributed import Worker
from maskrcnn_trt.training.trainer import Trainer, set_arithmetic

# torch.compile imports deprecated parts of torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
FROZEN = ("model.num_classes=3", "model.backbone.norm=frozen_bn", "weights=null")


@pytest.mark.slow
def test_traced_steps_equal_eager_ones(tiny: LoadTiny) -> None:
    """Tracing without code generation: whole, for any number of objects, and when accumulating."""
    config = tiny(*FROZEN, "solver.accumulate=2")
    alone = Worker(0, 1, torch.device("cpu"))
    eager, traced = Trainer(config, alone), Trainer(config, alone)
    traced.model.losses = CompiledLosses(traced.model, backend="aot_eager")  # type: ignore[method-assign]
    torch._dynamo.utils.counters.clear()
    parts = list(train_loader(CocoDataset(config.data.train), config))[:2]
    assert parts[0].targets.labels.shape[1] != parts[1].targets.labels.shape[1]
    torch.testing.assert_close(traced.step(parts), eager.step(parts))
    torch.testing.assert_close(traced.model.state_dict(), eager.model.state_dict())
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_compiled_steps_equal_eager_ones(tiny: LoadTiny, precision: str) -> None:
    settings = (f"precision={precision}", "channels_last=true")
    device = torch.device("cuda", 0)
    eager, compiled = (
        Trainer(tiny(*FROZEN, *settings, f"compile={value}"), Worker(0, 1, device))
        for value in ("false", "true")
    )
    set_arithmetic(eager.config)
    tolerance = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}[precision]
    for batch in list(train_loader(CocoDataset(eager.config.data.train), eager.config))[:3]:
        losses = [trainer.step([batch.to(device)]) for trainer in (compiled, eager)]
        torch.testing.assert_close(*losses, rtol=tolerance, atol=tolerance)
