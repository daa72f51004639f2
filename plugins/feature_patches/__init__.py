"""`maskrcnn::feature_patches`: square patches of feature maps, with gradient."""

from .operation import feature_patches

__all__ = ["feature_patches"]
