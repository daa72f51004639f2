"""Configuration of the augmentation of training images: the entries of `data.transforms`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError, model_validator

from ..model.config.error_messages import validation_message
from ..model.config.schema import YamlConfig

# Larger factors need gigabytes per image.
_Factor = Annotated[float, Field(gt=0, le=10)]


class TransformConfig(YamlConfig):
    """Base class of transform configurations. Names and parameters are as in torchvision."""

    name: str
    """Name of the torchvision class."""
    p: float = Field(1.0, gt=0, le=1)
    """Probability that an image is transformed."""


class ScaleJitterConfig(TransformConfig):
    """Large-scale jitter: multiply the size of resized images by a random factor."""

    name: Literal["ScaleJitter"]
    scale_range: tuple[_Factor, _Factor] = (0.1, 2.0)
    """Smallest and largest factor of the image size."""

    @model_validator(mode="after")
    def _check_range(self) -> "ScaleJitterConfig":
        low, high = self.scale_range
        if low > high:
            raise ValueError(f"scale_range [{low}, {high}] is not two ascending numbers")
        return self


class RandomShortestSizeConfig(TransformConfig):
    """Multi-scale training: replace `data.min_size` by a random one of several sizes."""

    name: Literal["RandomShortestSize"]
    min_size: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (640, 672, 704, 736, 768, 800), min_length=1
    )
    """Shorter sides to choose from, in pixels."""


class RandomCropConfig(TransformConfig):
    """Crop images to a size at a random position. A side that is already shorter is kept."""

    name: Literal["RandomCrop"]
    size: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]
    """Height and width in pixels."""


class RandomRotationConfig(TransformConfig):
    """Rotate images about their centre by a random angle. The image size does not change."""

    name: Literal["RandomRotation"]
    degrees: float = Field(gt=0, le=180)
    """Largest angle in degrees. The random angle lies between -`degrees` and `degrees`."""


class RandomVerticalFlipConfig(TransformConfig):
    """Flip images upside down."""

    name: Literal["RandomVerticalFlip"]
    p: float = Field(0.5, gt=0, le=1)


class ColorJitterConfig(TransformConfig):
    """Change brightness, contrast, saturation and hue at random."""

    name: Literal["ColorJitter"]
    brightness: float = Field(0.0, ge=0, le=10)
    """Largest deviation of the random brightness factor from 1."""
    contrast: float = Field(0.0, ge=0, le=10)
    """Largest deviation of the random contrast factor from 1."""
    saturation: float = Field(0.0, ge=0, le=10)
    """Largest deviation of the random saturation factor from 1."""
    hue: float = Field(0.0, ge=0, le=0.5)
    """Largest change of the hue, as a share of the colour circle."""


class SimpleCopyPasteConfig(TransformConfig):
    """Paste random objects of another training image into an image (Ghiasi et al., 2021)."""

    name: Literal["SimpleCopyPaste"]
    p: float = Field(0.5, gt=0, le=1)


_KINDS: Mapping[str, type[TransformConfig]] = {
    "ScaleJitter": ScaleJitterConfig,
    "RandomShortestSize": RandomShortestSizeConfig,
    "RandomCrop": RandomCropConfig,
    "RandomRotation": RandomRotationConfig,
    "RandomVerticalFlip": RandomVerticalFlipConfig,
    "ColorJitter": ColorJitterConfig,
    "SimpleCopyPaste": SimpleCopyPasteConfig,
}
# Transforms that determine the size to which an image is resized.
RESIZING = (ScaleJitterConfig, RandomShortestSizeConfig)


def _transform_from(value: Any) -> Any:
    if isinstance(value, TransformConfig):
        return value
    name = value.get("name") if isinstance(value, Mapping) else None
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(
            f"{value!r} is not a transform; write one as in {{name: ColorJitter, hue: 0.1}}; "
            f"names: {', '.join(_KINDS)}"
        )
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise ValueError(f"{name}: {validation_message(error, kind)}") from None


# The name selects the class, so that an error message names the parameters of this transform only.
Transform = Annotated[SerializeAsAny[TransformConfig], BeforeValidator(_transform_from)]


def check_order(transforms: tuple[TransformConfig, ...]) -> None:
    """Check the order: a resizing transform can only be first, and copy-paste only last.

    Raises:
        ValueError: `ScaleJitter` or `RandomShortestSize` is not first, or `SimpleCopyPaste` is not
            last.
    """
    for transform in transforms[1:]:
        if isinstance(transform, RESIZING):
            raise ValueError(
                f"{transform.name} must be the first of transforms, because it replaces the "
                "resizing to data.min_size"
            )
    for transform in transforms[:-1]:
        if isinstance(transform, SimpleCopyPasteConfig):
            raise ValueError(
                "SimpleCopyPaste must be the last of transforms, because all others apply to both "
                "images: the one that receives objects, and the one whose objects are pasted"
            )
