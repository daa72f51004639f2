"""Plain implementations of box decoding, clipping and RoI pooling.

If `plus_one` is 1, boxes include the pixels of their far edges, as in maskrcnn-benchmark.
"""

import math

import torch
from torch import Tensor
from torchvision.ops import roi_align


def decode(deltas: Tensor, references: Tensor, plus_one: int) -> Tensor:
    """Decode boxes as other implementations do. `plus_one` is maskrcnn-benchmark's TO_REMOVE."""
    widths = references[:, 2] - references[:, 0] + plus_one
    heights = references[:, 3] - references[:, 1] + plus_one
    x = deltas[:, 0] * widths + references[:, 0] + 0.5 * widths
    y = deltas[:, 1] * heights + references[:, 1] + 0.5 * heights
    limit = math.log(1000 / 16)
    w = deltas[:, 2].clamp(max=limit).exp() * widths
    h = deltas[:, 3].clamp(max=limit).exp() * heights
    return torch.stack(
        [x - 0.5 * w, y - 0.5 * h, x + 0.5 * w - plus_one, y + 0.5 * h - plus_one], dim=1
    )


def clip(boxes: Tensor, height: int, width: int, plus_one: int) -> Tensor:
    limits = torch.tensor([width, height, width, height]) - plus_one
    return torch.minimum(boxes.clamp(min=0), limits)


def pool(
    maps: list[Tensor], boxes: Tensor, side: int, ratio: int, aligned: bool, plus_one: int
) -> Tensor:
    """Pool each box from the pyramid level for its size.

    If there is only one map, all boxes are pooled from it, with a stride of 16 pixels.
    """
    pooled = []
    for box in boxes:
        level, stride = 0, 16
        if len(maps) > 1:
            area = torch.prod(box[2:] - box[:2] + plus_one)
            level = int((4 + torch.log2(area.sqrt() / 224) + 1e-6).floor().clamp(2, 5)) - 2
            stride = 4 * 2**level
        roi = torch.cat([torch.zeros(1), box])[None]
        pooled.append(roi_align(maps[level], roi, side, 1 / stride, ratio, aligned))
    return torch.cat(pooled)
