"""`maskrcnn::box_iou`: intersection over union of every pair of two sets of boxes.

Contract, held by every implementation to the bit: boxes are xyxy without the legacy +1, numbers
are of single precision, and what has no area or whose coordinates are no numbers has an IoU of 0.
"""

import torch
from torch import Tensor

from .arguments import kernel_argument
from .kernels.box_iou import BOX_IOU, box_iou_launch
from .launching import launch_kernel


@torch.library.custom_op("maskrcnn::box_iou", mutates_args=(), device_types="cpu")
def box_iou(boxes: Tensor, others: Tensor) -> Tensor:
    """IoU of the boxes of each image.

    Args:
        boxes: [B, G, 4] float32, xyxy.
        others: [B, N, 4], or [1, N, 4] shared by all images; float32, xyxy.

    Returns:
        [B, G, N] float32.

    Raises:
        ValueError: on a GPU, an argument has another dtype or shape.
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
