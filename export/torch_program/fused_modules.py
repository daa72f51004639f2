"""Equivalents of the model's modules that run faster on a GPU."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.rpn import RPNHead

from ...model.mask_rcnn import MaskRCNN
from ...model.roi_heads import MaskPredictor
from ...plugins.class_logits import upsampled_class_logits
from ...plugins.fused_convolution import gemm_convolution
from ...plugins.resnet_stem import arranged_weight, resnet_stem
from ...plugins.runtime.arguments import HALF_TYPES

# Tensor cores process input channels in groups of four, and matrix columns in groups of eight. The
# stem's input and the box predictor's output are padded with zeros to these sizes.
_STEM_CHANNELS = 4
_MATRIX_MULTIPLE = 8


def optimize_for_gpu(model: MaskRCNN) -> None:
    """Replace modules by equivalents that make fewer passes over GPU memory, in place.

    Also convert the weights of convolutions to channels-last.

    Args:
        model: model whose batch norms `fold_batch_norms` has folded.
    """
    body = model.backbone.body
    is_half = body.conv1.weight.dtype in HALF_TYPES
    # A stem with a group norm is not fused: the norm cannot be folded into the convolution.
    if is_half and isinstance(body.bn1, nn.Identity):
        fused = _FusedStem(model)
        model.backbone.body.conv1 = fused  # a submodule, so that its parameters move with the model
        setattr(model, "stem", fused.forward)  # noqa: B010, a type checker sees a method
    else:
        model.backbone.body.conv1 = _PaddedStem(model.backbone.body.conv1)
    model.rpn.head = _MergedRpnHead(model.rpn.head)
    heads = model.roi_heads
    if isinstance(heads.box_head, TwoMLPHead):
        heads.box_head = _ChannelsLastBoxHead(heads.box_head, heads.config.box_pool)
    heads.box_predictor = _MergedBoxPredictor(heads.box_predictor)
    setattr(heads, "mask_predictor", _FusedMaskPredictor(heads.mask_predictor))  # noqa: B010
    nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)


class _FusedStem(nn.Module):
    """Stem of the ResNet, including pixel normalization, as one kernel.

    This module's `forward` replaces the method `MaskRCNN.stem`, and computes the same. The module
    holds the parameters of the ResNet's first convolution, and replaces that convolution.
    """

    def __init__(self, model: MaskRCNN) -> None:
        super().__init__()
        stem = model.backbone.body.conv1
        self.weight = nn.Parameter(arranged_weight(stem.weight.detach()))
        self.bias = stem.bias
        self.register_buffer("mean", model.pixel_mean.float())
        self.register_buffer("std", model.pixel_std.float())

    def forward(self, images: Tensor, image_sizes: Tensor) -> Tensor:
        stem = (self.weight, self.bias, self.mean, self.std)
        output: Tensor = resnet_stem(images, image_sizes, *stem)
        return output


class _PaddedStem(nn.Module):
    """First convolution of the ResNet, with its input zero-padded to four channels."""

    def __init__(self, stem: nn.Conv2d) -> None:
        super().__init__()
        self._missing = _STEM_CHANNELS - stem.in_channels
        weight = F.pad(stem.weight.detach(), (0, 0, 0, 0, 0, self._missing))
        self.weight = nn.Parameter(weight.contiguous(memory_format=torch.channels_last))
        self.bias = stem.bias
        self._stride, self._padding = stem.stride, stem.padding

    def forward(self, images: Tensor) -> Tensor:
        padded = F.pad(images, (0, 0, 0, 0, 0, self._missing))
        return F.conv2d(padded, self.weight, self.bias, self._stride, self._padding)


class _MergedRpnHead(nn.Module):
    """RPN head in which one convolution computes both the logits and the box deltas."""

    def __init__(self, head: RPNHead) -> None:
        super().__init__()
        self.conv = head.conv
        parts = (head.cls_logits, head.bbox_pred)
        self._outputs = [part.out_channels for part in parts]
        self.output = nn.Conv2d(head.cls_logits.in_channels, sum(self._outputs), 1)
        self.output.weight = nn.Parameter(torch.cat([part.weight for part in parts]))
        self.output.bias = nn.Parameter(torch.cat([part.bias for part in parts]))

    def forward(self, features: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        outputs = [self.output(self.conv(feature)) for feature in features]
        logits, deltas = zip(*(x.split(self._outputs, dim=1) for x in outputs), strict=True)
        return list(logits), list(deltas)


class _ChannelsLastBoxHead(nn.Module):
    """Box head whose first layer reads pooled features in channels-last memory order."""

    def __init__(self, head: TwoMLPHead, side: int) -> None:
        super().__init__()
        self.fc6, self.fc7 = head.fc6, head.fc7
        by_channel = self.fc6.weight.detach().unflatten(1, (-1, side, side))
        self.fc6.weight = nn.Parameter(by_channel.permute(0, 2, 3, 1).flatten(1))

    def forward(self, pooled: Tensor) -> Tensor:
        hidden = pooled.permute(0, 2, 3, 1).flatten(1)
        return self._linear_relu(self.fc7, self._linear_relu(self.fc6, hidden))

    @staticmethod
    def _linear_relu(layer: nn.Linear, rows: Tensor) -> Tensor:
        if layer.weight.dtype not in HALF_TYPES:
            return F.relu(layer(rows))
        pixels, weight = rows[:, :, None, None], layer.weight[:, :, None, None]
        output: Tensor = gemm_convolution(pixels, weight, layer.bias, None, True)
        return output.flatten(1)


class _MergedBoxPredictor(nn.Module):
    """Box predictor in which one matrix product computes both the logits and the box deltas."""

    def __init__(self, predictor: FastRCNNPredictor) -> None:
        super().__init__()
        parts = (predictor.cls_score, predictor.bbox_pred)
        outputs = [part.out_features for part in parts]
        unused = -sum(outputs) % _MATRIX_MULTIPLE
        self._outputs = [*outputs, unused]
        self.output = nn.Linear(predictor.cls_score.in_features, sum(self._outputs))
        weight = torch.cat([part.weight.detach() for part in parts])
        bias = torch.cat([part.bias.detach() for part in parts])
        self.output.weight = nn.Parameter(F.pad(weight, (0, 0, 0, unused)))
        self.output.bias = nn.Parameter(F.pad(bias, (0, unused)))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits, deltas, _ = self.output(hidden.flatten(1)).split(self._outputs, dim=1)
        return logits, deltas


class _FusedMaskPredictor(nn.Module):
    """Mask predictor whose layers are one operation."""

    def __init__(self, predictor: MaskPredictor) -> None:
        super().__init__()
        upsample = predictor.conv5_mask
        assert upsample.bias is not None
        weight = upsample.weight.detach().permute(2, 3, 1, 0)
        self.weight = nn.Parameter(weight.contiguous())
        self.bias = upsample.bias
        self.logits = predictor.mask_fcn_logits

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        weight, bias = self.logits.weight.flatten(1), self.logits.bias
        logits: Tensor = upsampled_class_logits(
            features, self.weight, self.bias, weight, bias, labels
        )
        return logits
