"""Detections of converted models equal those of independent implementations of the origins."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_states import State, detectron2, maskrcnn_benchmark
from reference_boxes import clip, decode, pool
from torch import Tensor
from torch.nn import functional as F
from torchvision.models.detection import MaskRCNN as TorchvisionMaskRCNN
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import FrozenBatchNorm2d, batched_nms

from maskrcnn_trt.model.config.schema import ModelConfig
from maskrcnn_trt.model.mask_rcnn import BatchDetections, MaskRCNN
from maskrcnn_trt.model.weights.conversion import checkpoint_from_weights
from maskrcnn_trt.model.weights.recognition import read_weights

CLASSES = 3
HEIGHT, WIDTH = 96, 160
# The origins run the final NMS over all candidates.
ALL_CANDIDATES = ("roi.nms_candidates=8000",)
IMAGENET_MEAN, IMAGENET_STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


@dataclass(frozen=True)
class LayerNames:
    """Layer names of an implementation."""

    stem: str
    stage: str
    first_stage: int
    shortcut: str
    lateral: str
    output: str
    first_level: int
    rpn: tuple[str, str, str]
    box: tuple[str, str, str, str]
    mask: tuple[str, str, str]


DETECTRON2 = LayerNames(
    "backbone.bottom_up.stem.conv1", "backbone.bottom_up.res", 2, "shortcut",
    "backbone.fpn_lateral", "backbone.fpn_output", 2,
    ("proposal_generator.rpn_head.conv", "proposal_generator.rpn_head.objectness_logits",
     "proposal_generator.rpn_head.anchor_deltas"),
    ("roi_heads.box_head.fc1", "roi_heads.box_head.fc2",
     "roi_heads.box_predictor.cls_score", "roi_heads.box_predictor.bbox_pred"),
    ("roi_heads.mask_head.mask_fcn", "roi_heads.mask_head.deconv",
     "roi_heads.mask_head.predictor"),
)  # fmt: skip

_MB = "module.roi_heads"
MASKRCNN_BENCHMARK = LayerNames(
    "module.backbone.body.stem.conv1", "module.backbone.body.layer", 1, "downsample.0",
    "module.backbone.fpn.fpn_inner", "module.backbone.fpn.fpn_layer", 1,
    ("module.rpn.head.conv", "module.rpn.head.cls_logits", "module.rpn.head.bbox_pred"),
    (f"{_MB}.box.feature_extractor.fc6", f"{_MB}.box.feature_extractor.fc7",
     f"{_MB}.box.predictor.cls_score", f"{_MB}.box.predictor.bbox_pred"),
    (f"{_MB}.mask.feature_extractor.mask_fcn", f"{_MB}.mask.predictor.conv5_mask",
     f"{_MB}.mask.predictor.mask_fcn_logits"),
)  # fmt: skip


class ReferenceModel:
    """Mask R-CNN for one image by the conventions of detectron2 or of maskrcnn-benchmark."""

    def __init__(self, state: State, *, legacy: bool) -> None:
        self.state = state
        self.legacy = legacy
        self.names = MASKRCNN_BENCHMARK if legacy else DETECTRON2
        # Legacy boxes include their last pixel, so a side is one pixel more than the difference.
        self.one = int(legacy)

    def detect(self, rgb: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return boxes, scores, labels (from 1) and masks of an image [3, H, W] in 0..255."""
        features = self.features(rgb)
        proposals = self.proposals(features)
        hidden = self.pooled(features, proposals, 7).flatten(1)
        fc1, fc2, scores_name, boxes_name = self.names.box
        for name in (fc1, fc2):
            hidden = self.linear(hidden, name).relu()
        scores = self.linear(hidden, scores_name).softmax(dim=1)
        deltas = self.linear(hidden, boxes_name).view(len(hidden), -1, 4)
        found = []
        for label in range(1, CLASSES + 1):
            # Legacy rows begin with the background; detectron2 has it last, or not at all.
            row = label if self.legacy else label - 1
            boxes = self.decoded(deltas[:, row] / torch.tensor([10, 10, 5, 5]), proposals)
            good = scores[:, row] > 0.05
            found.append((boxes[good], scores[good, row], torch.full((int(good.sum()),), label)))
        boxes, scores, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
        keep = self.suppressed(boxes, scores, labels, 0.5)[:100]
        boxes, scores, labels = boxes[keep], scores[keep], labels[keep]
        return boxes, scores, labels, self.masks(features, boxes, labels)

    def features(self, rgb: Tensor) -> list[Tensor]:
        mean = [102.9801, 115.9465, 122.7717] if self.legacy else [103.53, 116.28, 123.675]
        bgr = (rgb[[2, 1, 0]] - torch.tensor(mean)[:, None, None])[None]
        x = self.normalised(self.conv(bgr, self.names.stem, 2, 3), self.names.stem).relu()
        x = F.max_pool2d(x, 3, 2, 1)
        stages = []
        for index, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                stride = 2 if index > 0 and block == 0 else 1
                name = f"{self.names.stage}{self.names.first_stage + index}.{block}"
                x = self.bottleneck(x, name, stride)
            stages.append(x)
        return self.pyramid(stages)

    def bottleneck(self, x: Tensor, name: str, stride: int) -> Tensor:
        y = x
        for conv, own_stride, padding in (("conv1", stride, 0), ("conv2", 1, 1), ("conv3", 1, 0)):
            full = f"{name}.{conv}"
            y = self.normalised(self.conv(y, full, own_stride, padding), full)
            y = y if conv == "conv3" else y.relu()
        shortcut = f"{name}.{self.names.shortcut}"
        if f"{shortcut}.weight" in self.state:
            x = self.normalised(self.conv(x, shortcut, stride, 0), shortcut)
        return (x + y).relu()

    def normalised(self, x: Tensor, conv: str) -> Tensor:
        norm, eps = f"{conv}.norm", 1e-5
        if self.legacy:
            norm, eps = conv.replace("conv", "bn").replace("downsample.0", "downsample.1"), 0.0
        weight, bias, mean, var = (
            self.state[f"{norm}.{part}"][:, None, None]
            for part in ("weight", "bias", "running_mean", "running_var")
        )
        return (x - mean) / (var + eps).sqrt() * weight + bias

    def pyramid(self, stages: list[Tensor]) -> list[Tensor]:
        levels: list[Tensor] = []
        above: Tensor | None = None
        for index in (3, 2, 1, 0):
            number = index + self.names.first_level
            inner = self.conv(stages[index], f"{self.names.lateral}{number}")
            above = inner if above is None else inner + F.interpolate(above, scale_factor=2)
            levels.insert(0, self.conv(above, f"{self.names.output}{number}", 1, 1))
        return [*levels, levels[3][:, :, ::2, ::2]]

    def proposals(self, features: list[Tensor]) -> Tensor:
        conv, objectness, regression = self.names.rpn
        boxes, scores, levels = [], [], []
        for level, x in enumerate(features):
            hidden = self.conv(x, conv, 1, 1).relu()
            logits = self.conv(hidden, objectness)[0].permute(1, 2, 0).flatten()
            deltas = self.conv(hidden, regression)[0].permute(1, 2, 0).reshape(-1, 4)
            anchors = self.anchors(level, x.shape[2], x.shape[3])
            best = logits.sort(descending=True).indices[:1000]
            boxes.append(self.decoded(deltas[best], anchors[best]))
            scores.append(logits[best])
            levels.append(torch.full((len(best),), level))
        all_boxes, all_scores = torch.cat(boxes), torch.cat(scores)
        return all_boxes[self.suppressed(all_boxes, all_scores, torch.cat(levels), 0.7)[:1000]]

    def anchors(self, level: int, rows: int, columns: int) -> Tensor:
        stride, size = 4 * 2**level, 32 * 2**level
        cells = []
        for ratio in (0.5, 1.0, 2.0):
            if self.legacy:
                width = round(math.sqrt(stride * stride / ratio))
                w, h = width * size / stride, round(width * ratio) * size / stride
                middle = (stride - 1) / 2
                cells.append([middle - (w - 1) / 2, middle - (h - 1) / 2,
                              middle + (w - 1) / 2, middle + (h - 1) / 2])  # fmt: skip
            else:
                w = math.sqrt(size * size / ratio)
                cells.append([-w / 2, -w * ratio / 2, w / 2, w * ratio / 2])
        shifts = [
            [x * stride, y * stride, x * stride, y * stride]
            for y in range(rows)
            for x in range(columns)
        ]
        grid = torch.tensor(shifts)[:, None] + torch.tensor(cells)
        return grid.reshape(-1, 4)

    def decoded(self, deltas: Tensor, boxes: Tensor) -> Tensor:
        return clip(decode(deltas, boxes, self.one), HEIGHT, WIDTH, self.one)

    def suppressed(self, boxes: Tensor, scores: Tensor, groups: Tensor, iou: float) -> Tensor:
        sides = boxes[:, 2:] - boxes[:, :2] + self.one
        wide = torch.cat([boxes[:, :2], boxes[:, 2:] + self.one], dim=1)
        solid = (sides > 0).all(dim=1).nonzero()[:, 0]
        return solid[batched_nms(wide[solid], scores[solid], groups[solid], iou)]

    def pooled(self, features: list[Tensor], boxes: Tensor, side: int) -> Tensor:
        return pool(features, boxes, side, 2 if self.legacy else -1, not self.legacy, self.one)

    def masks(self, features: list[Tensor], boxes: Tensor, labels: Tensor) -> Tensor:
        convs, deconv, logits = self.names.mask
        x = self.pooled(features, boxes, 14)
        for number in (1, 2, 3, 4):
            x = self.conv(x, f"{convs}{number}", 1, 1).relu()
        x = F.conv_transpose2d(x, *self.parameters(deconv), stride=2).relu()
        x = self.conv(x, logits).sigmoid()
        return x[torch.arange(len(x)), labels if self.legacy else labels - 1]

    def conv(self, x: Tensor, name: str, stride: int = 1, padding: int = 0) -> Tensor:
        return F.conv2d(x, *self.parameters(name), stride=stride, padding=padding)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, *self.parameters(name))

    def parameters(self, name: str) -> tuple[Tensor, Tensor | None]:
        return self.state[f"{name}.weight"], self.state.get(f"{name}.bias")


SMALL: dict[str, Any] = {
    "num_classes": CLASSES,
    "backbone": {"fpn_channels": 32},
    "roi": {"box_head_dim": 64, "mask_head_dim": 32},
}


def lively_state(values: dict[str, Any]) -> State:
    """Return random weights that give moderate features and many detections."""
    torch.manual_seed(0)
    config = ModelConfig.model_validate(values)
    state = {name: tensor.clone() for name, tensor in MaskRCNN(config).state_dict().items()}
    for name, tensor in state.items():
        if name.endswith("running_mean"):
            tensor.normal_(std=0.1)
        elif name.endswith("running_var"):
            tensor.uniform_(0.5, 1.5)
        elif ".bn" in name and name.endswith("weight"):
            tensor.uniform_(0.2, 0.5)
        elif name == "backbone.body.conv1.weight":
            tensor.mul_(1 / 58)
        elif "rpn.head" in name and name.endswith("weight"):
            tensor.normal_(std=0.03)
        elif "bias" in name:
            tensor.normal_(std=0.05)
    return state


def smooth_image() -> Tensor:
    coarse = torch.rand(1, 3, 12, 20, generator=torch.Generator().manual_seed(1)) * 255
    return F.interpolate(coarse, (HEIGHT, WIDTH), mode="bilinear")


@pytest.mark.parametrize("legacy", [False, True], ids=["detectron2", "maskrcnn-benchmark"])
@torch.inference_mode()
def test_converted_model_matches_its_origin(legacy: bool, tmp_path: Path) -> None:
    state = lively_state(SMALL)
    theirs = maskrcnn_benchmark(state) if legacy else detectron2(state, pyramid=True)
    torch.save({"model": theirs}, tmp_path / "model.pth")
    converted = checkpoint_from_weights(read_weights(tmp_path / "model.pth"), ALL_CANDIDATES)
    image = smooth_image()
    found = converted.checkpoint.build_model()(image, torch.tensor([[HEIGHT, WIDTH]]))
    boxes, scores, labels, masks = ReferenceModel(theirs, legacy=legacy).detect(image[0])
    boxes[:, 2:] += float(legacy)
    assert_same(found, boxes, scores, labels, masks)


def assert_same(
    found: BatchDetections, boxes: Tensor, scores: Tensor, labels: Tensor, masks: Tensor
) -> None:
    assert found.num_detections.tolist() == [len(boxes)]
    assert len(boxes) > 20
    assert len(set(labels.tolist())) > 1
    rows = slice(len(boxes))
    assert found.labels[0, rows].tolist() == labels.tolist()
    torch.testing.assert_close(found.scores[0, rows], scores, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.boxes[0, rows], boxes, atol=1e-2, rtol=0)
    torch.testing.assert_close(found.masks[0, rows], masks, atol=1e-3, rtol=0)


@torch.inference_mode()
def test_converted_model_of_91_outputs_matches_torchvision(tmp_path: Path) -> None:
    """Epsilon is 0, as for torchvision's published weights."""
    state = lively_state({"num_classes": 90})
    state["roi_heads.box_predictor.cls_score.weight"].mul_(100)
    for name, tensor in state.items():
        if ".bn" in name and name.endswith("running_var"):
            # Variances so small that an epsilon would change the results.
            tensor[::7] = 1e-5
            state[name.replace("running_var", "weight")][::7] *= 3e-3
    norm = partial(FrozenBatchNorm2d, eps=0.0)
    body = resnet_fpn_backbone(backbone_name="resnet50", weights=None, norm_layer=norm)
    theirs = TorchvisionMaskRCNN(body, num_classes=91).eval()
    theirs.load_state_dict(state)
    torch.save(theirs.state_dict(), tmp_path / "model.pth")
    converted = checkpoint_from_weights(read_weights(tmp_path / "model.pth"), ALL_CANDIDATES)
    image, sizes = smooth_image(), [(HEIGHT, WIDTH)]
    found = converted.checkpoint.build_model()(image, torch.tensor(sizes))
    mean, std = (torch.tensor(x)[:, None, None] for x in (IMAGENET_MEAN, IMAGENET_STD))
    inputs = ImageList((image - mean) / std, sizes)
    features = theirs.backbone(inputs.tensors)
    expected = theirs.roi_heads(features, theirs.rpn(inputs, features)[0], sizes)[0][0]
    boxes, masks = expected["boxes"], expected["masks"][:, 0]
    assert_same(found, boxes, expected["scores"], expected["labels"], masks)
