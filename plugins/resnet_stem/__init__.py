"""`maskrcnn::resnet_stem`: normalisation, first convolution and max pooling of a ResNet."""

from .operation import arranged_weight, resnet_stem

__all__ = ["arranged_weight", "resnet_stem"]
