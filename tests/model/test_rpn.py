import pytest
import torch

from maskrcnn_trt.model.config.schema import ModelConfig, RpnConfig
from maskrcnn_trt.model.rpn import RegionProposalNetwork


@pytest.mark.parametrize("conv_depth", [1, 2, 3])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_outputs_for_single_anchors_equal_those_for_all(conv_depth: int, device: str) -> None:
    """The gradients are equal, too. Some anchors are at the borders of the maps."""
    torch.manual_seed(0)
    sizes = [(13, 9), (7, 5), (4, 3), (2, 2), (1, 1)]
    config = ModelConfig(num_classes=1, rpn=RpnConfig(conv_depth=conv_depth))
    rpn = RegionProposalNetwork(config, channels=8).to(device)
    for parameter in rpn.head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    features = [torch.randn(2, 8, *size, device=device) for size in sizes]
    leaves = [x.requires_grad_() for x in (*features, *rpn.head.parameters())]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        outputs = rpn(features, (52, 36))
        indices = torch.randint(sum(outputs.counts), (2, 200), device=device)
        actual = rpn._outputs_at(features, indices)
        deltas = [own[rows] for own, rows in zip(outputs.deltas, indices, strict=True)]
        expected = outputs.logits.gather(1, indices), torch.stack(deltas)
        torch.testing.assert_close(actual, expected)
        gradients, wanted = (
            torch.autograd.grad((x.square().sum() + y.sin().sum()), leaves)
            for x, y in (actual, expected)
        )
    torch.testing.assert_close(gradients, wanted, rtol=1e-3, atol=1e-4)
