import pytest
import torch
from box_cases import ODD_BOXES, iou_by_definition, random_boxes
from cuda_graphs import replayed
from torch import Tensor
from torchvision.ops import box_iou as torchvision_iou

from maskrcnn_trt.plugins.box_iou import box_iou


def iou_on(device: str, boxes: Tensor, others: Tensor) -> Tensor:
    return box_iou(boxes.to(device), others.to(device)).cpu()


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize(
    ("batch", "rows", "columns"),
    [(2, 7, 11), (1, 1, 1), (3, 17, 300), (1, 40, 1025), (2, 0, 4), (2, 3, 0), (0, 2, 2)],
)
def test_equals_torchvision(batch: int, rows: int, columns: int, shared: bool, device: str) -> None:
    boxes = random_boxes(batch, rows, seed=1)
    others = random_boxes(1 if shared else batch, columns, seed=2)
    iou = iou_on(device, boxes, others)
    assert iou.shape == (batch, rows, columns)
    for own, own_boxes, own_others in zip(iou, boxes, others.expand(batch, -1, 4), strict=True):
        assert torch.equal(own, torchvision_iou(own_boxes, own_others))


def test_iou_of_degenerate_boxes(device: str) -> None:
    iou = iou_on(device, ODD_BOXES[None], ODD_BOXES[None])[0]
    assert torch.equal(iou, torch.from_numpy(iou_by_definition(ODD_BOXES, ODD_BOXES)))
    assert iou.isfinite().all()


def test_any_memory_layout(device: str) -> None:
    boxes, others = random_boxes(2, 6), random_boxes(2, 9)
    strided = boxes.transpose(0, 1).contiguous().transpose(0, 1)
    # The data begin at an address that is not aligned for wide loads.
    shifted = torch.cat([torch.zeros(1), others.flatten()]).to(device)[1:].view(2, 9, 4)
    iou = box_iou(strided.to(device), shifted).cpu()
    assert torch.equal(iou, box_iou(boxes, others))


@pytest.mark.gpu
def test_wrong_arguments_are_rejected_on_a_gpu() -> None:
    boxes = random_boxes(2, 3).cuda()
    with pytest.raises(ValueError, match=r"others must be torch.float32 of shape \[2, \*, 4\]"):
        box_iou(boxes, random_boxes(3, 5).cuda())
    with pytest.raises(ValueError, match=r"boxes must be torch.float32 .* not torch.float64"):
        box_iou(boxes.double(), boxes)


def test_opcheck(device: str) -> None:
    inputs = random_boxes(2, 5).to(device), random_boxes(1, 7).to(device)
    torch.library.opcheck(box_iou, inputs)


@pytest.mark.gpu
def test_can_be_captured() -> None:
    example = random_boxes(2, 5), random_boxes(1, 700)
    inputs = random_boxes(2, 5, seed=8), random_boxes(1, 700, seed=9)
    (iou,) = replayed(lambda *boxes: [box_iou(*boxes)], example, inputs)
    assert torch.equal(iou, box_iou(*inputs))
