"""Checkpoints as engines: the project's own model, and torchvision's with the same weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN as TorchvisionMaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import MultiScaleRoIAlign

from ..model.backbone import norm_layer, residual_network
from ..model.checkpoint import Checkpoint
from ..model.config import BackboneConfig, ModelConfig, RoiConfig

TorchPrecision = Literal["fp32", "tf32", "fp16"]


@dataclass
class TorchEngine:
    """A torch module, not compiled, on the GPU if there is one."""

    name: str
    model: nn.Module
    precision: TorchPrecision
    inputs_from: Callable[[Tensor], tuple[Any, ...]]
    """Arguments of the model for images [B, 3, H, W] uint8 on its device."""

    def __post_init__(self) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model.eval().to(self.device)

    def bind(self, images: NDArray[np.uint8]) -> Callable[[], None]:
        """A call over images [B, 3, H, W], which lie on the device before it."""
        inputs = self.inputs_from(torch.from_numpy(images).to(self.device))
        torch.backends.cuda.matmul.allow_tf32 = self.precision == "tf32"
        torch.backends.cudnn.allow_tf32 = self.precision == "tf32"

        def run() -> None:
            with (
                torch.inference_mode(),
                torch.autocast(self.device, torch.float16, enabled=self.precision == "fp16"),
            ):
                self.model(*inputs)
            if self.device == "cuda":
                torch.cuda.synchronize()

        return run

    def close(self) -> None:
        """Give back the memory."""
        self.model = nn.Identity()
        torch.cuda.empty_cache()


def engine_from_checkpoint(checkpoint: Checkpoint, precision: TorchPrecision) -> TorchEngine:
    """The project's model."""
    model = checkpoint.build_model()
    nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
    return TorchEngine("torch", model, precision, _images_and_sizes)


def torchvision_from_checkpoint(checkpoint: Checkpoint, precision: TorchPrecision) -> TorchEngine:
    """Torchvision's model with the checkpoint's weights.

    It is measured as it ships: it scales the images and pastes the masks into them.
    """
    model = _torchvision_from_config(checkpoint.model_config)
    model.load_state_dict(checkpoint.weights)

    def inputs_from(images: Tensor) -> tuple[list[Tensor]]:
        # The images have their size already; asking for it makes torchvision's resizing keep it.
        sides = images.shape[2:]
        model.transform.min_size, model.transform.max_size = (min(sides),), max(sides)
        return (list(images.float() / 255),)

    return TorchEngine("torchvision", model, precision, inputs_from)


def _images_and_sizes(images: Tensor) -> tuple[Tensor, Tensor]:
    sizes = torch.tensor(images.shape[2:], device=images.device).expand(len(images), 2)
    return images, sizes.contiguous()


def _torchvision_from_config(config: ModelConfig) -> TorchvisionMaskRCNN:
    roi, rpn, anchors = config.roi, config.rpn, config.anchors
    return TorchvisionMaskRCNN(
        _torchvision_backbone(config.backbone),
        image_mean=[value / 255 for value in config.pixel_mean],
        image_std=[value / 255 for value in config.pixel_std],
        rpn_anchor_generator=AnchorGenerator(
            tuple((size,) for size in anchors.sizes), (anchors.aspect_ratios,) * len(anchors.sizes)
        ),
        rpn_pre_nms_top_n_test=rpn.pre_nms_top_n_test,
        rpn_post_nms_top_n_test=rpn.post_nms_top_n_test,
        rpn_nms_thresh=rpn.nms_iou,
        box_score_thresh=roi.score_threshold,
        box_nms_thresh=roi.nms_iou,
        box_detections_per_img=roi.max_detections,
        **_torchvision_heads(config, roi),
    )


def _torchvision_backbone(config: BackboneConfig) -> BackboneWithFPN:
    network = residual_network(config)
    return BackboneWithFPN(
        network,
        return_layers={f"layer{i}": str(i - 1) for i in range(1, 5)},
        in_channels_list=[network.inplanes * 2**i // 16 for i in range(1, 5)],
        out_channels=config.fpn_channels,
        norm_layer=norm_layer(config.fpn_norm),
    )


def _torchvision_heads(config: ModelConfig, roi: RoiConfig) -> dict[str, nn.Module]:
    channels, outputs = config.backbone.fpn_channels, config.num_classes + 1

    def pool(side: int) -> MultiScaleRoIAlign:
        return MultiScaleRoIAlign(["0", "1", "2", "3"], side, roi.sampling_ratio)

    return {
        "box_roi_pool": pool(roi.box_pool),
        "box_head": TwoMLPHead(channels * roi.box_pool**2, roi.box_head_dim),
        "box_predictor": FastRCNNPredictor(roi.box_head_dim, outputs),
        "mask_roi_pool": pool(roi.mask_pool),
        "mask_head": MaskRCNNHeads(channels, [roi.mask_head_dim] * roi.mask_head_depth, 1),
        "mask_predictor": MaskRCNNPredictor(roi.mask_head_dim, roi.mask_head_dim, outputs),
    }
