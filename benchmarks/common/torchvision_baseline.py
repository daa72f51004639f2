"""Baseline: torchvision's Mask R-CNN with the settings of this project's model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN as TorchvisionMaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import MultiScaleRoIAlign

from ...model.backbone import build_resnet, norm_layer
from ...model.config.schema import BackboneConfig, ModelConfig, RoiConfig
from ...model.losses import LOSS_NAMES
from ...model.mask_rcnn import MaskRCNN
from ...training.config import ConfigError, TrainConfig
from ...training.data.loading.batches import Batch
from ...training.distributed import Worker
from ...training.optimizer import apply_gradients, build_optimizer, set_learning_rates
from ...training.trainer import AUTOCAST_DTYPES, Trainer


def torchvision_from_config(config: ModelConfig) -> TorchvisionMaskRCNN:
    """Build torchvision's Mask R-CNN with random weights. Its state dict has this project's keys.

    If torchvision lacks layers of the configured model, such as the layers of a C4 model, this
    function raises no error, but `load_state_dict` of the returned model does.
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
    network = build_resnet(config)
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


class TorchvisionTrainer:
    """Trainer of torchvision's Mask R-CNN. `step` has the same arguments as `Trainer.step`.

    Initial weights, optimiser, learning-rate schedule and precision are those of a `Trainer` with
    the same configuration. There is one difference if a step has several batches: this trainer
    averages the mean losses of the batches, while `Trainer` sums each loss and its denominator over
    all batches, and divides the two sums.
    """

    def __init__(self, config: TrainConfig, worker: Worker) -> None:
        """Build torchvision's model with the initial weights of a `Trainer` for `config`.

        Args:
            config: training configuration.
            worker: rank and device of this process.

        Raises:
            ConfigError: torchvision has no model of this configuration.
        """
        own = Trainer(config, worker)
        settings = config.model
        if (settings.anchors.convention, settings.roi.aligned, settings.inclusive_boxes) != (
            "torchvision", False, False
        ):  # fmt: skip
            raise ConfigError(
                "the comparison with torchvision needs model.anchors.convention=torchvision, "
                "model.roi.aligned=false and model.inclusive_boxes=false, but this configuration "
                "has other values; measure without --peer"
            )
        model = torchvision_from_config(settings)
        try:
            model.load_state_dict(own.model.state_dict())
        except RuntimeError as error:
            raise ConfigError(
                "torchvision has no model with the architecture of this configuration; measure "
                "without --peer"
            ) from error
        for name, parameter in own.model.named_parameters():
            model.get_parameter(name).requires_grad_(parameter.requires_grad)
        transform = model.transform
        model.transform = _TransformWithoutResize(0, 0, transform.image_mean, transform.image_std)
        self._config, self._device = config, worker.device
        self._model = model.to(worker.device).train()
        self._optimizer = build_optimizer(self._model, config.solver)
        self.scaler = own.scaler
        self._iteration = 0

    @property
    def evaluated_model(self) -> MaskRCNN:
        """This project's model with the trained weights.

        Its detections are the same as those of torchvision's model.
        """
        model = MaskRCNN(self._config.model)
        model.load_state_dict(self._model.state_dict())
        return model.to(self._device)

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """Run one optimiser step with the mean gradient of several batches.

        Returns:
            Mean losses [5] of the batches, in the order of `LOSS_NAMES`.
        """
        solver = self._config.solver
        set_learning_rates(self._optimizer, solver, self._iteration)
        losses = torch.zeros(len(LOSS_NAMES), device=self._device)
        for batch in batches:
            terms = self._losses(batch) / len(batches)
            self.scaler.scale(terms.sum()).backward()  # type: ignore[no-untyped-call]
            losses += terms.detach()
        apply_gradients(self._model, self._optimizer, self.scaler, solver)
        self._iteration += 1
        return losses

    def _losses(self, batch: Batch) -> Tensor:
        dtype = AUTOCAST_DTYPES.get(self._config.precision)
        with torch.autocast(self._device.type, dtype, enabled=dtype is not None):
            losses: Mapping[str, Tensor] = self._model(*_torchvision_inputs(batch))
        return torch.stack([losses[name].float() for name in LOSS_NAMES])


class _TransformWithoutResize(GeneralizedRCNNTransform):  # type: ignore[misc]
    """Torchvision's preprocessing without resizing. Images of a batch are already resized."""

    def resize(
        self, image: Tensor, target: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        return image, target


def _torchvision_inputs(batch: Batch) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Convert a batch to torchvision's lists of images and targets. Padding is removed."""
    targets = batch.targets
    assert targets is not None
    images, converted = [], []
    for n, (height, width) in enumerate(batch.image_sizes.tolist()):
        images.append(batch.images[n, :, :height, :width].float() / 255)
        sides = targets.boxes[n, :, 2:] - targets.boxes[n, :, :2]
        # Torchvision rejects boxes of zero area; this project's model ignores them.
        valid = (targets.labels[n] > 0) & (sides > 0).all(dim=1)
        converted.append(
            {
                "boxes": targets.boxes[n][valid],
                "labels": targets.labels[n][valid],
                "masks": targets.masks[n][valid][:, :height, :width],
            }
        )
    return images, converted
