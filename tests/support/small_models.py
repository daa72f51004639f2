"""Small models with any backbone, which detect objects although their weights are random."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchvision.models import resnet

from maskrcnn_trt.model.bundle.spec import OUTPUT_NAMES
from maskrcnn_trt.model.config.schema import ModelConfig
from maskrcnn_trt.model.mask_rcnn import BatchDetections, MaskRCNN
from maskrcnn_trt.model.targets import Targets

HEIGHT, WIDTH = 64, 96

# Replacement of torchvision's function `resnet50` with 5 instead of 16 blocks, for quicker exports.
# C5 features need bottleneck blocks, which resnet10 does not have.
SHORT_RESNET50 = partial(resnet.ResNet, resnet.Bottleneck, [1, 1, 1, 2])

# Arguments `changes` of `small_config` for the conventions of other implementations.
CONVENTIONS: dict[str, dict[str, object]] = {
    "detectron2": {
        "anchors": {"convention": "detectron2"},
        "rpn": {"min_side": 0},
        "roi": {"sampling_ratio": 0, "aligned": True, "min_side": 0},
    },
    "maskrcnn-benchmark": {
        "inclusive_boxes": True,
        "anchors": {"convention": "legacy"},
        "rpn": {"min_side": 0},
        "roi": {"min_side": 0},
    },
}


def small_config(name: str, features: str, norm: str, **changes: object) -> ModelConfig:
    """Return a configuration with few proposals and narrow heads. `changes` update its sections."""
    pyramid = features == "fpn"
    pool = 14 if features == "c4" else 7
    values = {
        "num_classes": 3,
        "backbone": {
            "name": name,
            "features": features,
            "norm": norm,
            "fpn_channels": 32,
            "fpn_norm": "gn" if norm == "gn" and pyramid else "none",
        },
        "anchors": {"sizes": [8, 16, 32, 64, 128]},
        "rpn": {
            "pre_nms_top_n_train": 40,
            "pre_nms_top_n_test": 40,
            "post_nms_top_n_train": 20,
            "post_nms_top_n_test": 20,
            "sampling": {"batch_size_per_image": 64},
        },
        "roi": {
            "sampling": {"batch_size_per_image": 16},
            "box_pool": pool,
            "mask_pool": 14,
            "sampling_ratio": 2 if pyramid else 0,
            "box_head_dim": 32,
            "mask_head_dim": 32,
            "mask_head_depth": 1,
            "nms_candidates": 60,
            "max_detections": 10,
            "score_threshold": 0.2,
            "mask_crop_size": None,
        },
    }
    for section, change in changes.items():
        values[section] = values[section] | change if isinstance(change, dict) else change
    return ModelConfig.model_validate(values)


def random_model(config: ModelConfig) -> MaskRCNN:
    """Return a model with random weights, feature values of moderate size and distinct scores."""
    torch.manual_seed(0)
    model = MaskRCNN(config)
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("bn3.weight"):
                value.fill_(0.2)
        model.rpn.head.cls_logits.weight.mul_(30)
        model.roi_heads.box_predictor.cls_score.weight.mul_(10)
        # Large deltas, so that detections differ from their anchors.
        model.roi_heads.box_predictor.bbox_pred.weight.mul_(10)
    return model


def noise_images() -> tuple[Tensor, Tensor]:
    """Return two smooth images [2, 3, H, W] uint8, and heights and widths before padding [2, 2]."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(2, 3, 5, 7, generator=generator) * 255
    images = torch.nn.functional.interpolate(coarse, (HEIGHT, WIDTH), mode="bilinear")
    return images.to(torch.uint8), torch.tensor([[HEIGHT, WIDTH], [50, 80]])


def ground_truth() -> Targets:
    """Return two instances for the first image and one for the second."""
    boxes = torch.tensor([[[4, 6, 40, 50], [50, 10, 90, 40]], [[10, 5, 60, 45], [0, 0, 0, 0]]])
    labels = torch.tensor([[1, 3], [2, 0]])
    masks = torch.zeros(2, 2, HEIGHT, WIDTH, dtype=torch.uint8)
    for image in range(2):
        for row, (x1, y1, x2, y2) in enumerate(boxes[image].tolist()):
            masks[image, row, y1 : (y1 + y2) // 2, x1:x2] = 1
    return Targets(boxes.float(), labels, masks)


def detections_from_session(session: Any, images: Tensor, sizes: Tensor) -> BatchDetections:
    """Run an exported model, given as a session of ONNX Runtime."""
    feeds = {"images": images.numpy(), "image_sizes": sizes.numpy()}
    return BatchDetections(*map(torch.from_numpy, session.run(OUTPUT_NAMES, feeds)))


def assert_same(found: BatchDetections, expected: BatchDetections) -> None:
    """Check that detections are equal, with tolerances for boxes (0.01 px), scores and masks."""
    assert found.num_detections.tolist() == expected.num_detections.tolist()
    assert found.labels.tolist() == expected.labels.tolist()
    torch.testing.assert_close(found.boxes, expected.boxes, atol=1e-2, rtol=0)
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.masks, expected.masks, atol=1e-3, rtol=0)
