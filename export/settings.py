"""Settings of an export, and their checks against each other and the checkpoint."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, Field, InstanceOf, StrictBool, ValidationError

from ..model.bundle.manifest import (
    MISSING_PRECISIONS,
    QUANTIZED_PRECISIONS,
    BundleError,
    InputDtype,
    Precision,
    Preprocessing,
)
from ..model.bundle.spec import BUCKET_STEP, MAX_PIXELS, ShapeBucket
from ..model.config.error_messages import validation_message
from ..model.resizing import pixel_dtype
from .engines.builder import EngineBuilder


class ExportSettings(NamedTuple):
    """Settings that apply to all model files of an export."""

    precisions: Sequence[Precision]
    buckets: Sequence[ShapeBucket]
    # Data type of the model's input `images`.
    input_dtype: InputDtype
    # Image files on which the value ranges for int8 and fp8 are measured.
    calibration: Sequence[Path]
    # Function that is called with a progress message at the start of each step.
    report: Callable[[str], None]


class ExportArguments(BaseModel):
    """Arguments of `bundle_from_checkpoint` whose types and values are checked."""

    precisions: tuple[Precision, ...] = Field(min_length=1)
    buckets: tuple[ShapeBucket, ...]
    input_dtype: InputDtype | None
    builders: tuple[InstanceOf[EngineBuilder], ...]
    with_programs: StrictBool
    calibration: tuple[Path, ...]


def validated_arguments(**arguments: object) -> ExportArguments:
    """Check the types and values of the arguments that `ExportArguments` lists.

    Raises:
        BundleError: an argument is not allowed. The message names the allowed values.
    """
    try:
        return ExportArguments.model_validate(arguments)
    except ValidationError as error:
        raise BundleError(validation_message(error, ExportArguments)) from None


def check_precisions(
    precisions: Sequence[Precision], with_engines: bool, with_programs: bool, is_calibrated: bool
) -> None:
    """Check that the requested precisions fit the requested runtimes and the calibration images.

    - If bf16 is requested, TensorRT engines or torch programs must be requested.
    - If fp8 is requested, TensorRT engines must be requested.
    - If int8 or fp8 is requested, calibration images must be given.
    - If torch programs are requested, a precision other than int8 and fp8 must be requested.
    - If calibration images are given, int8 or fp8 must be requested.

    Raises:
        BundleError: one of these conditions is not met.
    """
    if "bf16" in precisions and not (with_programs or with_engines):
        raise BundleError(
            "ONNX Runtime does not compute in bf16; add --engine torch, tensorrt or tensorrt-rtx "
            "(in Python, with_programs=True or builders)"
        )
    if "fp8" in precisions and not with_engines:
        raise BundleError(
            "neither ONNX Runtime nor torch computes in fp8; add --engine tensorrt or tensorrt-rtx "
            "(in Python, builders)"
        )
    for precision in QUANTIZED_PRECISIONS:
        if precision in precisions and not is_calibrated:
            raise BundleError(
                f"{precision} needs calibration images to measure the value ranges of "
                "tensors; run maskrcnn export with --calibration IMAGES (in Python, calibration)"
            )
    if with_programs and set(precisions) <= set(MISSING_PRECISIONS["torch"]):
        raise BundleError(
            f"torch does not compute in {' and '.join(precisions)}; leave out --engine torch (in "
            "Python, with_programs), or add the precision fp32"
        )
    if is_calibrated and not set(precisions) & set(QUANTIZED_PRECISIONS):
        raise BundleError(
            f"the precisions {', '.join(precisions)} need no calibration; leave out --calibration "
            f"(in Python, calibration), or add the precision {' or '.join(QUANTIZED_PRECISIONS)}"
        )


def check_buckets(buckets: Sequence[ShapeBucket], preprocessing: Preprocessing) -> None:
    """Check that the model supports each input size, and that resized images can fit into it.

    Raises:
        BundleError: a side is not a multiple of 32 pixels, or an input size is too large, or so
            small that no resized image fits into it.
    """
    shorter, longer = preprocessing.min_size, preprocessing.max_size
    for bucket in buckets:
        if not bucket.is_multiple_of_step:
            raise BundleError(
                f"the input size {bucket} must be a multiple of {BUCKET_STEP} pixels on both "
                "sides; choose another --shape (in Python, buckets)"
            )
        # By default, the server rejects images with more than MAX_PIXELS pixels. The largest
        # feature map has 16 values per image pixel. At this limit, the map of one image therefore
        # has half of the 2**31 values that a 32-bit index reaches.
        if bucket.height * bucket.width > MAX_PIXELS:
            raise BundleError(
                f"the input size {bucket} has more than {MAX_PIXELS} pixels; choose a smaller "
                "--shape (in Python, buckets)"
            )
        if not preprocessing.fits(bucket):
            raise BundleError(
                f"the input size {bucket} is too small: images are resized to a shorter side of "
                f"{shorter} pixels or a longer side of {longer} pixels; choose a larger --shape "
                "(in Python, buckets)"
            )


def checked_dtype(input_dtype: InputDtype | None, preprocessing: Preprocessing) -> InputDtype:
    """Return the data type of the model's input images: `input_dtype`, or a default if it is None.

    The default is float32 if `preprocessing` resizes images as torchvision does, without rounding
    pixel values. Otherwise the default is uint8.

    Raises:
        BundleError: `input_dtype` is uint8, and `preprocessing` does not round pixel values.
    """
    needs_floats = pixel_dtype(preprocessing.resize) is np.float32
    if needs_floats and input_dtype == "uint8":
        raise BundleError(
            "inputs of type uint8 would round pixels to integers, but the resize rule "
            f"{preprocessing.resize} keeps fractions; omit --input-dtype (in Python, input_dtype), "
            "or convert the weights to a checkpoint with the rule pillow, which rounds pixels "
            "(`maskrcnn weights convert` with preprocessing.resize=pillow)"
        )
    return input_dtype or ("float32" if needs_floats else "uint8")
