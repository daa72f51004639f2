"""Detections and losses equal torchvision's for the same weights."""

import math

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor
from torchvision.models.detection import MaskRCNN as TorchvisionMaskRCNN
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import FrozenBatchNorm2d

from maskrcnn_trt.model.bundle.manifest import Preprocessing
from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.model.config.schema import ModelConfig, RoiConfig, RpnConfig
from maskrcnn_trt.model.losses import LOSS_NAMES
from maskrcnn_trt.model.mask_rcnn import MaskRCNN
from maskrcnn_trt.model.resizing import resized_size
from maskrcnn_trt.model.targets import Targets
from maskrcnn_trt.serving.engines.host_steps import plan_image, prepare_image

CLASSES = 5
SIZES = ((96, 128), (128, 96), (64, 160))
PADDED = (128, 160)
# Few, because the mask head takes most of the time.
PROPOSALS, DETECTIONS = 30, 10
RPN = RpnConfig(
    pre_nms_top_n_train=PROPOSALS,
    pre_nms_top_n_test=PROPOSALS,
    post_nms_top_n_train=PROPOSALS,
    post_nms_top_n_test=PROPOSALS,
)


def torchvision_model(**settings) -> TorchvisionMaskRCNN:
    """Return torchvision's model with random weights that give detections of many scores."""
    torch.manual_seed(0)
    backbone = resnet_fpn_backbone(
        backbone_name="resnet50", weights=None, norm_layer=FrozenBatchNorm2d, trainable_layers=3
    )
    model = TorchvisionMaskRCNN(
        backbone,
        num_classes=CLASSES + 1,
        rpn_pre_nms_top_n_train=PROPOSALS,
        rpn_pre_nms_top_n_test=PROPOSALS,
        rpn_post_nms_top_n_train=PROPOSALS,
        rpn_post_nms_top_n_test=PROPOSALS,
        box_detections_per_img=DETECTIONS,
        **settings,
    )
    with torch.no_grad():
        for name, buffer in model.backbone.named_buffers():
            if name.endswith("bn3.weight"):
                # Close to trained values; otherwise activations grow from block to block.
                buffer.fill_(0.2)
        model.rpn.head.cls_logits.weight.mul_(100)
        model.rpn.head.bbox_pred.weight.mul_(20)
        model.roi_heads.box_predictor.cls_score.weight.mul_(100)
        model.roi_heads.box_predictor.bbox_pred.weight.mul_(5)
    return model


def images() -> Tensor:
    """Return three images of different sizes in a padded batch [3, 3, H, W] in 0..255."""
    generator = torch.Generator().manual_seed(1)
    batch = torch.zeros(len(SIZES), 3, *PADDED)
    for image, (height, width) in zip(batch, SIZES, strict=True):
        coarse = torch.rand(1, 3, 12, 12, generator=generator) * 255
        image[:, :height, :width] = torch.nn.functional.interpolate(
            coarse, (height, width), mode="bilinear"
        )[0]
    return batch


def normalised(batch: Tensor, config: ModelConfig) -> Tensor:
    mean, std = (torch.tensor(x)[:, None, None] for x in (config.pixel_mean, config.pixel_std))
    result = torch.zeros_like(batch)
    for target, image, (height, width) in zip(result, batch, SIZES, strict=True):
        target[:, :height, :width] = ((image - mean) / std)[:, :height, :width]
    return result


@torch.inference_mode()
def test_detections_equal_torchvision() -> None:
    theirs, batch = torchvision_model().eval(), images()
    inputs = normalised(batch, ModelConfig())
    features = theirs.backbone(inputs)
    proposals, _ = theirs.rpn(ImageList(inputs, list(SIZES)), features)
    for threshold, expected in ((0.97, "none"), (0.7, "few"), (0.01, "all")):
        theirs.roi_heads.score_thresh = threshold
        wanted, _ = theirs.roi_heads(features, proposals, list(SIZES))
        counts = [len(w["scores"]) for w in wanted]
        assert {
            "none": max(counts) == 0,
            "few": 0 < max(counts) < DETECTIONS,
            "all": min(counts) == DETECTIONS,
        }[expected], counts
        roi = RoiConfig(score_threshold=threshold, max_detections=DETECTIONS)
        ours = MaskRCNN(ModelConfig(num_classes=CLASSES, rpn=RPN, roi=roi)).eval()
        ours.load_state_dict(theirs.state_dict())
        found = ours(batch, torch.tensor(SIZES))
        assert found.num_detections.tolist() == counts
        for index, (count, want) in enumerate(zip(counts, wanted, strict=True)):
            own = (
                found.boxes[index, :count],
                found.scores[index, :count],
                found.masks[index, :count],
            )
            masks = want["masks"][:, 0]
            torch.testing.assert_close(own[0], want["boxes"], atol=1e-2, rtol=0)
            torch.testing.assert_close(own[1], want["scores"], atol=1e-4, rtol=0)
            torch.testing.assert_close(own[2], masks, atol=1e-3, rtol=0)
            assert found.labels[index, :count].tolist() == want["labels"].tolist()
            assert all(not part[index, count:].any() for part in found[1:])


@torch.inference_mode()
def test_whole_images_equal_torchvision() -> None:
    """Photographs of odd sizes, from bytes to boxes in their pixels."""
    theirs = torchvision_model(min_size=96, max_size=160, box_score_thresh=0.3).eval()
    roi = RoiConfig(score_threshold=0.3, max_detections=DETECTIONS)
    ours = MaskRCNN(ModelConfig(num_classes=CLASSES, rpn=RPN, roi=roi)).eval()
    ours.load_state_dict(theirs.state_dict())
    preprocessing = Preprocessing(
        min_size=96, max_size=160, resize="torchvision", pixel_mean=(0, 0, 0), pixel_std=(1, 1, 1)
    )
    for height, width in ((427, 640), (301, 97), (83, 77)):
        rough = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
        image = np.array(Image.fromarray(rough).filter(ImageFilter.GaussianBlur(6)))
        size = resized_size(height, width, 96, 160, "torchvision")
        # Padded as torchvision does. Larger padding changes features near the edges.
        bucket = ShapeBucket(*(math.ceil(side / 32) * 32 for side in size))
        prepared = prepare_image(plan_image(image, preprocessing, [bucket]))
        found = ours(torch.from_numpy(prepared.pixels[None]), torch.tensor([prepared.size]))
        count = int(found.num_detections)
        boxes = found.boxes[0, :count] * torch.tensor([width / size[1], height / size[0]] * 2)
        (wanted,) = theirs([torch.from_numpy(image).permute(2, 0, 1) / 255])
        assert count == len(wanted["boxes"]) > 5
        torch.testing.assert_close(boxes, wanted["boxes"], atol=0.05, rtol=0)
        torch.testing.assert_close(found.scores[0, :count], wanted["scores"], atol=1e-3, rtol=0)


def ground_truth() -> tuple[Targets, list[dict[str, Tensor]]]:
    """Return four, one and no instances for three images, padded and in torchvision's form."""
    generator = torch.Generator().manual_seed(2)
    boxes = torch.zeros(3, 4, 4)
    labels = torch.zeros(3, 4, dtype=torch.int64)
    masks = torch.zeros(3, 4, *PADDED, dtype=torch.uint8)
    lists = []
    for index, count in enumerate((4, 1, 0)):
        height, width = SIZES[index]
        for row in range(count):
            x, y, w, h = torch.rand(4, generator=generator).tolist()
            x1, y1 = int(x * width * 0.5), int(y * height * 0.5)
            x2, y2 = x1 + 16 + int(w * width * 0.4), y1 + 16 + int(h * height * 0.4)
            boxes[index, row] = torch.tensor([x1, y1, x2, y2])
            labels[index, row] = 1 + row % CLASSES
            masks[index, row, y1:y2, x1:x2] = 1
            masks[index, row, y1 : (y1 + y2) // 2, x1 : (x1 + x2) // 2] = 0
        parts = {"boxes": boxes, "labels": labels, "masks": masks}
        lists.append({name: part[index, :count] for name, part in parts.items()})
    return Targets(boxes, labels, masks), lists


def test_losses_and_gradients_equal_torchvision() -> None:
    # All candidates are sampled, so the losses do not depend on random numbers.
    everything = 10**6
    theirs = torchvision_model(
        rpn_batch_size_per_image=everything, box_batch_size_per_image=everything
    ).train()
    take_all = {"batch_size_per_image": everything}
    roi = RoiConfig(mask_crop_size=None)
    config = ModelConfig(
        num_classes=CLASSES,
        rpn=RPN.model_copy(update={"sampling": RPN.sampling.model_copy(update=take_all)}),
        roi=roi.model_copy(update={"sampling": roi.sampling.model_copy(update=take_all)}),
    )
    ours = MaskRCNN(config).train()
    ours.load_state_dict(theirs.state_dict())
    batch, (targets, lists) = images(), ground_truth()

    terms = ours(batch, torch.tensor(SIZES), targets, torch.arange(3))
    losses = dict(zip(LOSS_NAMES, terms.means(), strict=True))
    features = theirs.backbone(normalised(batch, config))
    image_list = ImageList(normalised(batch, config), list(SIZES))
    proposals, rpn_losses = theirs.rpn(image_list, features, lists)
    _, roi_losses = theirs.roi_heads(features, proposals, list(SIZES), lists)
    wanted = rpn_losses | roi_losses
    assert losses.keys() == wanted.keys()
    for name, loss in losses.items():
        torch.testing.assert_close(loss, wanted[name], atol=1e-4, rtol=1e-4, msg=name)

    sum(losses.values()).backward()
    sum(wanted.values()).backward()
    for (name, mine), (_, other) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        if mine.requires_grad:
            error = (mine.grad - other.grad).norm() / other.grad.norm().clamp(min=1e-6)
            assert error < 1e-3, (name, float(error))
