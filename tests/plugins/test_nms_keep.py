"""One table of cases that every implementation of `NmsKeep` answers alike."""

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from cuda_graphs import replayed
from onnx import TensorProto, helper
from torch import Tensor
from torchvision.ops import batched_nms

from maskrcnn_trt.export.onnx.functions import NmsKeep
from maskrcnn_trt.plugins.nms_keep import nms_keep


def keep_by_definition(
    boxes: Tensor, classes: Tensor, iou_threshold: float, max_keep: int
) -> Tensor:
    """The specification word by word, in single precision."""
    keep = np.zeros(classes.shape, dtype=bool)
    for set_boxes, set_classes, set_keep in zip(boxes.numpy(), classes.numpy(), keep, strict=True):
        for j in range(len(set_classes)):
            suppressed = any(
                set_keep[i]
                and set_classes[i] == set_classes[j]
                and iou(set_boxes[i], set_boxes[j]) > np.float32(iou_threshold)
                for i in range(j)
            )
            full = 0 < max_keep <= set_keep[:j].sum()
            set_keep[j] = set_classes[j] >= 0 and not suppressed and not full
    return torch.from_numpy(keep)


def iou(a: np.ndarray, b: np.ndarray) -> np.float32:
    sides = np.maximum(np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2]), 0)
    intersection = sides[0] * sides[1]
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - intersection
    return intersection / union if union > 0 else np.float32(0)


def keep_by_onnx(boxes: Tensor, classes: Tensor, iou_threshold: float, max_keep: int) -> Tensor:
    graph = helper.make_graph(
        [
            helper.make_node(
                "NmsKeep",
                ["boxes", "classes"],
                ["keep"],
                domain="maskrcnn",
                iou_threshold=iou_threshold,
                max_keep=max_keep,
            )
        ],
        "nms",
        [
            helper.make_tensor_value_info("boxes", TensorProto.FLOAT, [None, None, 4]),
            helper.make_tensor_value_info("classes", TensorProto.INT64, [None, None]),
        ],
        [helper.make_tensor_value_info("keep", TensorProto.INT32, [None, None])],
    )
    model = helper.make_model(
        graph,
        functions=[NmsKeep.to_function_proto()],
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("maskrcnn", 1)],
        ir_version=10,
    )
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    feeds = {"boxes": boxes.numpy(), "classes": classes.numpy()}
    return torch.from_numpy(session.run(["keep"], feeds)[0]).bool()


def keep_by_cuda(boxes: Tensor, classes: Tensor, iou_threshold: float, max_keep: int) -> Tensor:
    return nms_keep(boxes.cuda(), classes.cuda(), iou_threshold, max_keep).cpu()


def random_sets(batch: int, count: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return strongly overlapping boxes with random classes from -1 to `classes` - 1."""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(batch, count, 2, generator=generator) * 60
    sides = torch.rand(batch, count, 2, generator=generator) * 40
    labels = torch.randint(-1, classes, (batch, count), generator=generator)
    return torch.cat([corners, corners + sides], dim=2), labels


def one_set(boxes: list[list[float]], classes: list[int]) -> tuple[Tensor, Tensor]:
    return torch.tensor([boxes], dtype=torch.float32), torch.tensor([classes])


SQUARE = [0.0, 0.0, 10.0, 10.0]
CASES: dict[str, tuple[tuple[Tensor, Tensor], float]] = {
    "no set": ((torch.zeros(0, 5, 4), torch.zeros(0, 5, dtype=torch.int64)), 0.5),
    "no box": ((torch.zeros(2, 0, 4), torch.zeros(2, 0, dtype=torch.int64)), 0.5),
    "one box": (one_set([SQUARE], [0]), 0.5),
    "only padding": ((torch.zeros(3, 4, 4), torch.full((3, 4), -1)), 0.5),
    "identical boxes": (one_set([SQUARE] * 5, [0] * 5), 0.5),
    "identical boxes of several classes": (one_set([SQUARE] * 5, [2, 0, 2, -1, 0]), 0.5),
    "padding suppresses nothing": (one_set([SQUARE] * 3, [-1, 4, -1]), 0.5),
    "IoU of exactly one half stays": (one_set([SQUARE, [0, 0, 10, 5]], [0, 0]), 0.5),
    "IoU of exactly three fifths stays": (one_set([SQUARE, [0, 0, 10, 6]], [0, 0]), 0.6),
    # The second is suppressed, and so cannot suppress the third.
    "chain": (one_set([[0, 0, 10, 10], [3, 0, 13, 10], [6, 0, 16, 10]], [0] * 3), 0.5),
    "long chain": (one_set([[3 * i, 0, 3 * i + 10, 10] for i in range(50)], [0] * 50), 0.5),
    "empty boxes": (one_set([[5, 5, 5, 5], [5, 5, 5, 5], [5, 0, 5, 9], SQUARE], [0] * 4), 0.5),
    "huge boxes": (
        one_set([[-1e6, -1e6, 1e6, 1e6], [-1e6, -1e6, 1e6, 9e5], SQUARE, SQUARE], [0] * 4),
        0.5,
    ),
    "threshold of one": (one_set([SQUARE, SQUARE], [0, 0]), 1.0),
    "full batch": (random_sets(8, 40, 1, seed=1), 0.7),
    "several classes": (random_sets(3, 80, 6, seed=2), 0.3),
    "300 boxes": (random_sets(2, 300, 3, seed=3), 0.5),
}


TORCH = [
    pytest.param(nms_keep, id="torch-cpu"),
    pytest.param(keep_by_cuda, id="torch-cuda", marks=pytest.mark.gpu),
]
IMPLEMENTATIONS = [*TORCH, pytest.param(keep_by_onnx, id="onnx-function")]
Suppress = Callable[[Tensor, Tensor, float, int], Tensor]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("max_keep", [0, 1, 7], ids=["all", "one", "seven"])
@pytest.mark.parametrize("case", CASES)
def test_implementations_keep_the_same(implementation: Suppress, case: str, max_keep: int) -> None:
    (boxes, classes), threshold = CASES[case]
    keep = implementation(boxes, classes, threshold, max_keep)
    assert keep.dtype == torch.bool
    assert torch.equal(keep, keep_by_definition(boxes, classes, threshold, max_keep))


@pytest.mark.parametrize("implementation", TORCH)
@pytest.mark.parametrize("threshold", [0.5, 0.7])
def test_keeps_what_torchvision_keeps(implementation: Suppress, threshold: float) -> None:
    boxes, classes = random_sets(4, 1000, 4, seed=4)
    keep = implementation(boxes, classes, threshold, 0)
    ranks = torch.arange(1000, 0, -1).float()
    for set_boxes, set_classes, set_keep in zip(boxes, classes, keep, strict=True):
        members = (set_classes >= 0).nonzero()[:, 0]
        kept = batched_nms(set_boxes[members], ranks[members], set_classes[members], threshold)
        assert set_keep.nonzero()[:, 0].tolist() == members[kept].tolist()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", ["no box", "several classes"])
def test_opcheck(case: str, device: str) -> None:
    (boxes, classes), threshold = CASES[case]
    torch.library.opcheck(nms_keep, (boxes.to(device), classes.to(device), threshold, 5))


@pytest.mark.gpu
@pytest.mark.parametrize("max_keep", [0, 100])
@pytest.mark.parametrize("count", [63, 64, 65, 1000, 1023, 1025, 4097, 16384])
def test_large_sets_on_a_gpu(count: int, max_keep: int) -> None:
    boxes, classes = random_sets(2, count, 3, seed=count)
    keep = keep_by_cuda(boxes, classes, 0.5, max_keep)
    assert torch.equal(keep, nms_keep(boxes, classes, 0.5, max_keep))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_boxes_that_are_no_numbers_suppress_nothing(implementation: Suppress) -> None:
    endless = [0, 0, torch.inf, torch.inf]
    boxes, classes = one_set(
        [[torch.nan] * 4, SQUARE, endless, SQUARE, [0, torch.nan, 10, 10], endless], [0] * 6
    )
    expected = [[True, True, True, False, True, True]]
    assert implementation(boxes, classes, 0.5, 0).tolist() == expected


@pytest.mark.gpu
def test_too_large_a_set_is_rejected_on_a_gpu() -> None:
    boxes, classes = random_sets(1, 16385, 1, seed=5)
    with pytest.raises(ValueError, match=r"\[1, 16385, 4\].*at most 16384 boxes per set"):
        keep_by_cuda(boxes, classes, 0.5, 0)


@pytest.mark.gpu
def test_wrong_arguments_are_rejected_on_a_gpu() -> None:
    boxes, classes = (tensor.cuda() for tensor in random_sets(2, 5, 1, seed=6))
    with pytest.raises(ValueError, match=r"boxes must be torch.float32 .* not torch.float16"):
        nms_keep(boxes.half(), classes, 0.5, 0)
    with pytest.raises(ValueError, match=r"boxes must be .* shape \[\*, \*, 4\], not .* \[5, 4\]"):
        nms_keep(boxes[0], classes, 0.5, 0)
    with pytest.raises(ValueError, match=r"classes must be torch.int64 of shape \[2, 5\]"):
        nms_keep(boxes, classes[:, :4], 0.5, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("max_keep", [0, 100])
def test_can_be_captured(max_keep: int) -> None:
    example, inputs = random_sets(3, 700, 2, seed=7), random_sets(3, 700, 2, seed=8)
    (keep,) = replayed(lambda *held: [nms_keep(*held, 0.5, max_keep)], example, inputs)
    assert torch.equal(keep, nms_keep(*inputs, 0.5, max_keep))


@pytest.mark.gpu
# torch.compile itself raises deprecation warnings.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_can_be_compiled() -> None:
    @torch.compile(fullgraph=True)
    def suppress(boxes: Tensor, classes: Tensor) -> Tensor:
        return nms_keep(boxes * 2, classes - 1, 0.5, 100) & (classes > 0)

    # Two numbers of sets, so that the second is symbolic.
    for sets in (3, 5):
        boxes, classes = random_sets(sets, 700, 3, seed=sets)
        keep = suppress(boxes.cuda(), classes.cuda()).cpu()
        assert torch.equal(keep, nms_keep(boxes * 2, classes - 1, 0.5, 100) & (classes > 0))
