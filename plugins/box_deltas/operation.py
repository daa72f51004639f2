"""`maskrcnn::encode_boxes` and `maskrcnn::decode_boxes`: conversion of boxes to deltas and back.

Specification of all implementations (Girshick et al., R-CNN, appendix C): dx and dy are the box's
centre minus the reference's centre, divided by the reference's width and height; dw and dh are the
logarithms of the ratios box width / reference width and box height / reference height. Each delta
is multiplied by a weight. A decoded box, before clipping, is at most 1000 / 16 times as wide and
high as its reference. Boxes are xyxy, and arithmetic is float32. Implementations may differ in the
rounding of `log` and `exp`.
"""

import torch
from torch import Tensor

from ..runtime.arguments import kernel_argument
from ..runtime.launching import launch_kernel
from .kernel import (
    MAX_LOG_SCALE,
    decode_boxes_kernel,
    decode_boxes_launch,
    encode_boxes_kernel,
    encode_boxes_launch,
)


@torch.library.custom_op("maskrcnn::encode_boxes", mutates_args=(), device_types="cpu")
def encode_boxes(
    boxes: Tensor, references: Tensor, center_weight: float, size_weight: float
) -> Tensor:
    """Encode boxes as deltas relative to references.

    Args:
        boxes: [..., 4] float32, xyxy.
        references: [..., 4] float32, anchors or proposals with positive sides.
        center_weight: factor of dx and dy.
        size_weight: factor of dw and dh.

    Returns:
        [..., 4] float32: dx, dy, dw, dh.
    """
    sides, reference_sides = (x[..., 2:] - x[..., :2] for x in (boxes, references))
    centers = boxes[..., :2] + 0.5 * sides
    reference_centers = references[..., :2] + 0.5 * reference_sides
    shifts = center_weight * (centers - reference_centers) / reference_sides
    scales = size_weight * torch.log(sides / reference_sides)
    return torch.cat([shifts, scales], dim=-1)


@encode_boxes.register_fake
def _(boxes: Tensor, references: Tensor, center_weight: float, size_weight: float) -> Tensor:
    return boxes.new_empty(boxes.shape)


@encode_boxes.register_kernel("cuda")
def _(boxes: Tensor, references: Tensor, center_weight: float, size_weight: float) -> Tensor:
    shape = (*boxes.shape[:-1], 4)
    boxes = kernel_argument("boxes", boxes, torch.float32, shape)
    references = kernel_argument("references", references, torch.float32, shape)
    deltas = boxes.new_empty(shape)
    launch_kernel(
        encode_boxes_kernel(center_weight, size_weight),
        encode_boxes_launch(deltas.numel() // 4),
        [boxes, references],
        [deltas],
    )
    return deltas


@torch.library.custom_op("maskrcnn::decode_boxes", mutates_args=(), device_types="cpu")
def decode_boxes(
    deltas: Tensor,
    references: Tensor,
    indices: Tensor,
    image_sizes: Tensor,
    center_weight: float,
    size_weight: float,
    inclusive: bool,
    min_side: float,
) -> tuple[Tensor, Tensor]:
    """Decode selected deltas, clip the boxes to their images, and mark the boxes that are large.

    Args:
        deltas: [B, N, C, 4] float32, C deltas of each of N references: one per class, or one for
            all classes.
        references: [B, N, 4], or [1, N, 4] shared by all images; float32, xyxy in input pixels.
        indices: [B, K] int64, deltas to decode: n * C + c for delta c of reference n. A negative
            index marks padding.
        image_sizes: [B, 2] int64, height and width in pixels.
        center_weight: factor by which dx and dy were multiplied in encoding.
        size_weight: factor by which dw and dh were multiplied in encoding.
        inclusive: whether boxes include the pixels at their right and bottom edges. If so, a box
            outside of its image is clipped to one pixel at the image's edge, else to an empty box.
        min_side: minimum width and height, in pixels, of boxes that are marked as large.

    Returns:
        boxes [B, K, 4] float32, xyxy in input pixels, zero for padding; and `large` [B, K] bool,
        True for boxes whose sides x2 - x1 and y2 - y1 are at least `min_side`, False for empty
        boxes and padding.
    """
    exists = indices >= 0
    # For padding, the first delta is gathered. The resulting box is set to zero below.
    indices = indices.clamp(min=0)
    owners = indices // deltas.shape[2]
    references = references.expand(deltas.shape[0], -1, -1)
    deltas, references = (
        rows.gather(1, index[..., None].expand(-1, -1, 4))
        for rows, index in ((deltas.flatten(1, 2), indices), (references, owners))
    )
    boxes = _clip(_decode(deltas, references, center_weight, size_weight), image_sizes, inclusive)
    boxes = torch.where(exists[..., None], boxes, 0)
    return boxes, are_large(boxes, min_side)


def are_large(boxes: Tensor, min_side: float) -> Tensor:
    """Return which boxes [B, K, 4] have both sides above 0 and at least `min_side`: [B, K] bool."""
    sides = boxes[..., 2:] - boxes[..., :2]
    return ((sides >= min_side) & (sides > 0)).all(dim=-1)


def _decode(deltas: Tensor, references: Tensor, center_weight: float, size_weight: float) -> Tensor:
    reference_sides = references[..., 2:] - references[..., :2]
    reference_centers = references[..., :2] + 0.5 * reference_sides
    centers = deltas[..., :2] / center_weight * reference_sides + reference_centers
    scales = (deltas[..., 2:] / size_weight).clamp(max=MAX_LOG_SCALE).exp()
    half_sides = 0.5 * scales * reference_sides
    return torch.cat([centers - half_sides, centers + half_sides], dim=-1)


def _clip(boxes: Tensor, image_sizes: Tensor, inclusive: bool) -> Tensor:
    limits = image_sizes.flip(1)[:, None].to(boxes.dtype)
    near = torch.minimum(boxes[..., :2].clamp(min=0), limits - float(inclusive))
    far = torch.minimum(boxes[..., 2:].clamp(min=float(inclusive)), limits)
    return torch.cat([near, far], dim=-1)


@decode_boxes.register_fake
def _(
    deltas: Tensor, references: Tensor, indices: Tensor, *_attributes: object, **_named: object
) -> tuple[Tensor, Tensor]:
    return _empty_boxes(deltas, indices)


@decode_boxes.register_kernel("cuda")
def _(
    deltas: Tensor,
    references: Tensor,
    indices: Tensor,
    image_sizes: Tensor,
    center_weight: float,
    size_weight: float,
    inclusive: bool,
    min_side: float,
) -> tuple[Tensor, Tensor]:
    deltas = kernel_argument("deltas", deltas, torch.float32, (-1, -1, -1, 4))
    batch, count, classes, _ = deltas.shape
    shared = references.shape[0] == 1
    inputs = [
        deltas,
        kernel_argument(
            "references", references, torch.float32, (1 if shared else batch, count, 4)
        ),
        kernel_argument("indices", indices, torch.int64, (batch, -1)),
        kernel_argument("image_sizes", image_sizes, torch.int64, (batch, 2)),
    ]
    boxes, large = _empty_boxes(deltas, indices)
    launch_kernel(
        decode_boxes_kernel(center_weight, size_weight, min_side, inclusive=inclusive),
        decode_boxes_launch(batch, count, classes, indices.shape[1], shared=shared),
        inputs,
        [boxes, large],
    )
    return boxes, large


def _empty_boxes(deltas: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    boxes = deltas.new_empty(*indices.shape, 4)
    return boxes, indices.new_empty(indices.shape, dtype=torch.bool)
