"""Torchvision's Mask R-CNN under the settings of the project's model, to compare with."""

from torch import nn
from torchvision.models.detection import MaskRCNN as TorchvisionMaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import MultiScaleRoIAlign

from ..model.backbone import norm_layer, residual_network
from ..model.config import BackboneConfig, ModelConfig, RoiConfig


def torchvision_from_config(config: ModelConfig) -> TorchvisionMaskRCNN:
    """Torchvision's model with random weights, which takes those of the project's model.

    Only what torchvision has comes out equal: other bodies and conventions show when weights are
    loaded.
    """
    roi, rpn, anchors = config.roi, config.rpn, config.anchors
    return TorchvisionMaskRCNN(
        _torchvision_backbone(config.backbone),
        image_mean=[value / 255 for value in config.pixel_mean],
        image_std=[value / 255 for value in config.pixel_std],
        rpn_anchor_generator=AnchorGenerator(
            tuple((size,) for size in anchors.sizes), (anchors.aspect_ratios,) * len(anchors.sizes)
        ),
        rpn_pre_nms_top_n_train=rpn.pre_nms_top_n_train,
        rpn_pre_nms_top_n_test=rpn.pre_nms_top_n_test,
        rpn_post_nms_top_n_train=rpn.post_nms_top_n_train,
        rpn_post_nms_top_n_test=rpn.post_nms_top_n_test,
        rpn_nms_thresh=rpn.nms_iou,
        rpn_fg_iou_thresh=rpn.sampling.foreground_iou,
        rpn_bg_iou_thresh=rpn.sampling.background_iou,
        rpn_batch_size_per_image=rpn.sampling.batch_size_per_image,
        rpn_positive_fraction=rpn.sampling.positive_fraction,
        box_score_thresh=roi.score_threshold,
        box_nms_thresh=roi.nms_iou,
        box_detections_per_img=roi.max_detections,
        box_fg_iou_thresh=roi.sampling.foreground_iou,
        box_bg_iou_thresh=roi.sampling.background_iou,
        box_batch_size_per_image=roi.sampling.batch_size_per_image,
        box_positive_fraction=roi.sampling.positive_fraction,
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
