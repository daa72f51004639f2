"""`maskrcnn::box_iou`: pairwise intersection over union of two sets of boxes.

Specification of all implementations, whose results are equal bit for bit: boxes are xyxy with sides
x2 - x1 and y2 - y1, arithmetic is float32, and the IoU is 0 if the union is empty or a coordinate
is NaN.
"""

import torch
from torch import Tensor

from ..runtime.arguments import kernel_argument
from ..runtime.launching import launch_kernel
from .kernel import BOX_IOU, box_iou_launch


@torch.library.custom_op("maskrcnn::box_iou", mutates_args=(), device_types="cpu")
def box_iou(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the IoU of every pair of boxes of each image.

    Args:
        boxes: [B, G, 4] float32, xyxy.
        others: [B, N, 4], or [1, N, 4] shared by all images; float32, xyxy.

    Returns:
        [B, G, N] float32.
    """
    top_left = torch.maximum(boxes[:, :, None, :2], others[:, None, :, :2])
    bottom_right = torch.minimum(boxes[:, :, None, 2:], others[:, None, :, 2:])
    intersection = (bottom_right - top_left).clamp(min=0).prod(dim=-1)
    union = _area(boxes)[:, :, None] + _area(others)[:, None] - intersection
    return torch.where(union > 0, intersection / union, 0).contiguous()


def _area(boxes: Tensor) -> Tensor:
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


@box_iou.register_fake
def _(boxes: Tensor, others: Tensor) -> Tensor:
    return boxes.new_empty(*boxes.shape[:2], others.shape[1])


@box_iou.register_kernel("cuda")
def _(boxes: Tensor, others: Tensor) -> Tensor:
    boxes = kernel_argument("boxes", boxes, torch.float32, (-1, -1, 4))
    batch, rows, _ = boxes.shape
    shared = others.shape[0] == 1
    others = kernel_argument("others", others, torch.float32, (1 if shared else batch, -1, 4))
    columns = others.shape[1]
    iou = boxes.new_empty(batch, rows, columns)
    launch_kernel(
        BOX_IOU, box_iou_launch(batch, rows, columns, shared=shared), [boxes, others], [iou]
    )
    return iou
