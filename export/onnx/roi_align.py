"""ONNX function bodies of RoIAlign, in standard operators of opset 18.

The operation is specified in `plugins/pyramid_roi_align/operation.py`.
"""

from collections.abc import Sequence

from onnxscript import BOOL, FLOAT, INT64, script
from onnxscript import opset18 as op
from onnxscript.values import Opset

from ...model.bundle.spec import OPSET_DOMAIN, OPSET_VERSION

_DOMAIN = Opset(OPSET_DOMAIN, OPSET_VERSION)
_LN_2 = 0.6931471805599453


@script(_DOMAIN, default_opset=op)
def RoILevel(  # noqa: N802
    rois: FLOAT, spatial_scales: Sequence[float], canonical_level: int, canonical_size: float
) -> INT64:
    """Return the index of each RoI's pyramid level, [B, R] int64. Level 0 is the finest.

    The input is rois [B, R, 4], xyxy in input pixels. `spatial_scales` are the feature cells per
    input pixel of each level. A square RoI of `canonical_size` input pixels per side belongs to the
    level with a stride of 2 ** `canonical_level` input pixels.
    """
    ln_2 = op.Constant(value_float=_LN_2)
    x1, y1, x2, y2 = op.Split(rois, num_outputs=4, axis=2)
    side = op.Squeeze(op.Sqrt((x2 - x1) * (y2 - y1)), op.Constant(value_ints=[2]))
    strides_log2 = op.Round(op.Neg(op.Log(op.Constant(value_floats=spatial_scales)) / ln_2))
    finest, coarsest = (
        op.ReduceMin(strides_log2, keepdims=0),
        op.ReduceMax(strides_log2, keepdims=0),
    )
    canonical = op.Cast(op.Constant(value_int=canonical_level), to=1)
    relative = op.Log(side / op.Constant(value_float=canonical_size)) / ln_2
    level = op.Clip(op.Floor(canonical + relative + 1e-6), finest, coarsest) - finest
    return op.Cast(level, to=7)


@script(_DOMAIN, default_opset=op)
def PyramidRoIAlign(  # noqa: N802
    feature_0: FLOAT,
    feature_1: FLOAT,
    feature_2: FLOAT,
    feature_3: FLOAT,
    rois: FLOAT,
    output_size: int,
    sampling_ratio: int,
    spatial_scales: Sequence[float],
    canonical_level: int,
    canonical_size: float,
    aligned: int,
    inclusive: int,
) -> FLOAT:
    """RoIAlign of each RoI on its pyramid level, with one GridSample over a mosaic of all levels.

    The mosaic has the finest level at the top and the other levels side by side below it. Its last
    row and column are zero. A sampling position outside of its level is moved onto these zeros.

    Inputs are feature_0 to feature_3, one [B, C, H_l, W_l] per level, finest first, and rois
    [B, R, 4] (xyxy in input pixels). The output is [B * R, C, P, P] in the type of the features,
    where P is `output_size`. The other attributes (samples per cell, choice of the level, and
    coordinate convention) are those of the torch operation `maskrcnn::pyramid_roi_align`.
    """
    zero, one = op.Constant(value_float=0.0), op.Constant(value_float=1.0)
    scales = op.Constant(value_floats=spatial_scales)
    # If there are no RoIs, add one, because AveragePool does not accept an empty input.
    count = op.Shape(rois, start=1, end=2)
    missing = op.Cast(count == op.Constant(value_ints=[0]), to=7)
    rois = op.Pad(rois, op.Concat(op.Constant(value_ints=[0, 0, 0, 0]), missing,
                                  op.Constant(value_ints=[0]), axis=0), zero)  # fmt: skip
    x1, y1, x2, y2 = op.Split(rois, num_outputs=4, axis=2)
    level = RoILevel(rois, spatial_scales, canonical_level, canonical_size)

    # Position of each level in the mosaic.
    height_0, width_0 = op.Shape(feature_0, start=2, end=3), op.Shape(feature_0, start=3, end=4)
    height_1, width_1 = op.Shape(feature_1, start=2, end=3), op.Shape(feature_1, start=3, end=4)
    height_2, width_2 = op.Shape(feature_2, start=2, end=3), op.Shape(feature_2, start=3, end=4)
    height_3, width_3 = op.Shape(feature_3, start=2, end=3), op.Shape(feature_3, start=3, end=4)
    heights = op.Concat(height_0, height_1, height_2, height_3, axis=0)
    widths = op.Concat(width_0, width_1, width_2, width_3, axis=0)
    none = op.Constant(value_ints=[0])
    tops = op.Concat(none, height_0, height_0, height_0, axis=0)
    lefts = op.Concat(none, none, width_1, width_1 + width_2, axis=0)
    below = op.Max(height_1, height_2, height_3)
    total_width = op.Max(width_0, width_1 + width_2 + width_3) + op.Constant(value_ints=[1])
    total_height = height_0 + below + op.Constant(value_ints=[1])

    # The mosaic, [B, C, total_height, total_width] float32. Pad gets no input `axes`: if the
    # maps are channels-last, ONNX Runtime moves a Transpose past the Pad, and fails if the Pad has
    # this input.
    unpadded = op.Constant(value_ints=[0, 0, 0, 0, 0, 0])
    empty = op.CastLike(zero, feature_0)
    upper = op.Pad(feature_0, op.Concat(unpadded, none, total_width - width_0, axis=0), empty)
    rest = total_width - width_1 - width_2
    lower = op.Concat(
        op.Pad(feature_1,
               op.Concat(unpadded, total_height - height_0 - height_1, none, axis=0), empty),
        op.Pad(feature_2,
               op.Concat(unpadded, total_height - height_0 - height_2, none, axis=0), empty),
        op.Pad(feature_3,
               op.Concat(unpadded, total_height - height_0 - height_3, rest - width_3, axis=0),
               empty),
        axis=3,
    )  # fmt: skip
    mosaic = op.Cast(op.Concat(upper, lower, axis=2), to=1)

    # Sampling positions of each RoI in cells of its level: [B, R, S], S = P * sampling_ratio.
    size = op.Constant(value_int=output_size)
    samples = size * op.Constant(value_int=sampling_ratio)
    steps = op.Cast(op.Range(op.Constant(value_int=0), samples, op.Constant(value_int=1)), to=1)
    fractions = (steps + op.Constant(value_float=0.5)) / op.Cast(samples, to=1)
    scale = op.Unsqueeze(op.Gather(scales, level), op.Constant(value_ints=[2]))
    level_height = op.Unsqueeze(
        op.Cast(op.Gather(heights, level), to=1), op.Constant(value_ints=[2])
    )
    level_width = op.Unsqueeze(op.Cast(op.Gather(widths, level), to=1), op.Constant(value_ints=[2]))
    top = op.Unsqueeze(op.Cast(op.Gather(tops, level), to=1), op.Constant(value_ints=[2]))
    left = op.Unsqueeze(op.Cast(op.Gather(lefts, level), to=1), op.Constant(value_ints=[2]))
    shift = op.Cast(op.Constant(value_int=aligned), to=1)
    far = op.Cast(op.Constant(value_int=inclusive), to=1)
    least = one - shift
    y = y1 * scale - shift * 0.5 + op.Max((y2 - far - y1) * scale, least) * fractions
    x = x1 * scale - shift * 0.5 + op.Max((x2 - far - x1) * scale, least) * fractions

    # Sampling positions in cells of the mosaic.
    mosaic_height, mosaic_width = op.Cast(total_height, to=1), op.Cast(total_width, to=1)
    outside_y = op.Or(y < op.Neg(one), y > level_height)
    outside_x = op.Or(x < op.Neg(one), x > level_width)
    y = op.Where(outside_y, mosaic_height - one, top + op.Max(op.Min(y, level_height - one), zero))
    x = op.Where(outside_x, mosaic_width - one, left + op.Max(op.Min(x, level_width - one), zero))

    # GridSample expects positions in -1..1 from edge to edge.
    grid_y = op.Unsqueeze((y + y + one) / mosaic_height - one, op.Constant(value_ints=[3, 4]))
    grid_x = op.Unsqueeze((x + x + one) / mosaic_width - one, op.Constant(value_ints=[2, 4]))
    square = op.Concat(op.Shape(grid_y, start=0, end=3), op.Shape(x, start=2, end=3),
                       op.Constant(value_ints=[1]), axis=0)  # fmt: skip
    grid = op.Concat(op.Expand(grid_x, square), op.Expand(grid_y, square), axis=4)
    side_samples = op.Reshape(samples, op.Constant(value_ints=[1]))
    flat = op.Concat(op.Shape(rois, start=0, end=1), op.Constant(value_ints=[-1]), side_samples,
                     op.Constant(value_ints=[2]), axis=0)  # fmt: skip
    sampled = op.GridSample(
        mosaic, op.Reshape(grid, flat), mode="bilinear", padding_mode="border", align_corners=0
    )

    # Average the samples of each cell. `functions_for` fills in the sampling ratio, because a
    # function body cannot refer to an attribute inside a list.
    pooled = op.AveragePool(sampled, kernel_shape=[1, 1], strides=[1, 1])
    side_cells = op.Reshape(size, op.Constant(value_ints=[1]))
    cells = op.Concat(op.Shape(mosaic, start=0, end=2), op.Shape(rois, start=1, end=2),
                      side_cells, side_cells, axis=0)  # fmt: skip
    by_roi = op.Transpose(op.Reshape(pooled, cells), perm=[0, 2, 1, 3, 4])
    present = op.Slice(by_roi, op.Constant(value_ints=[0]), count, op.Constant(value_ints=[1]))
    shape = op.Concat(op.Shape(rois, start=0, end=1) * count, op.Shape(mosaic, start=1, end=2),
                      side_cells, side_cells, axis=0)  # fmt: skip
    return op.CastLike(op.Reshape(present, shape, allowzero=1), feature_0)


@script(_DOMAIN, default_opset=op)
def RoIAlignOnMap(  # noqa: N802
    feature: FLOAT,
    rois: FLOAT,
    chosen: BOOL,
    scale: FLOAT,
    output_size: int,
    sampling_ratio: int,
    aligned: int,
    inclusive: int,
) -> FLOAT:
    """RoIAlign of the chosen RoIs on one feature map with ONNX's operator RoiAlign.

    Inputs are feature [B, C, H, W], rois [B, R, 4] (xyxy in input pixels), chosen [B, R] (true for
    RoIs to pool) and scale [1] (feature cells per input pixel). The output is [B * R, C, P, P]
    float32, where P is `output_size`. It is zero for RoIs that are not chosen. The other attributes
    (samples per cell and coordinate convention) are those of the torch operation
    `maskrcnn::pyramid_roi_align`.
    """
    half = op.Constant(value_float=0.5)
    shift = op.Cast(op.Constant(value_int=aligned), to=1)
    far = op.Cast(op.Constant(value_int=inclusive), to=1)
    one = op.Constant(value_float=1.0)
    x1, y1, x2, y2 = op.Split(rois, num_outputs=4, axis=2)
    # The operator subtracts half a cell, so half a cell is added to unaligned RoIs first. Unaligned
    # RoIs are also widened to at least one cell.
    left, top = x1 * scale + half - half * shift, y1 * scale + half - half * shift
    width = op.Max((x2 - far - x1) * scale, one - shift)
    height = op.Max((y2 - far - y1) * scale, one - shift)
    regions = op.Concat(left, top, left + width, top + height, axis=2)
    # RoIs that are not chosen become empty, so that adaptive sampling takes no samples in them.
    columns = op.Unsqueeze(chosen, op.Constant(value_ints=[2]))
    regions = op.Where(columns, regions, op.Constant(value_float=0.0))
    batch, count = op.Shape(rois, start=0, end=1), op.Shape(rois, start=1, end=2)
    indices = op.Range(op.Constant(value_int=0), op.Squeeze(batch), op.Constant(value_int=1))
    indices = op.Expand(
        op.Unsqueeze(indices, op.Constant(value_ints=[1])), op.Concat(batch, count, axis=0)
    )
    pooled = op.RoiAlign(
        op.Cast(feature, to=1),
        op.Reshape(regions, op.Constant(value_ints=[-1, 4])),
        op.Reshape(indices, op.Constant(value_ints=[-1])),
        coordinate_transformation_mode="half_pixel",
        output_height=output_size,
        output_width=output_size,
        sampling_ratio=sampling_ratio,
    )
    planes = op.Reshape(chosen, op.Constant(value_ints=[-1, 1, 1, 1]))
    return op.Where(planes, pooled, op.Constant(value_float=0.0))


@script(_DOMAIN, default_opset=op)
def PyramidRoIAlignAdaptive(  # noqa: N802
    feature_0: FLOAT,
    feature_1: FLOAT,
    feature_2: FLOAT,
    feature_3: FLOAT,
    rois: FLOAT,
    output_size: int,
    sampling_ratio: int,
    spatial_scales: Sequence[float],
    canonical_level: int,
    canonical_size: float,
    aligned: int,
    inclusive: int,
) -> FLOAT:
    """RoIAlign over a feature pyramid, one level after another, with any sampling ratio.

    Inputs are feature_0 to feature_3, one [B, C, H_l, W_l] per level, finest first, and rois
    [B, R, 4] (xyxy in input pixels). The output is [B * R, C, P, P] in the type of the features,
    where P is `output_size`. If `sampling_ratio` is 0, a pooled cell has as many samples per axis
    as it spans feature cells, rounded up. The other attributes (choice of the level, and coordinate
    convention) are those of the torch operation `maskrcnn::pyramid_roi_align`.
    """
    scale_0, scale_1, scale_2, scale_3 = op.Split(
        op.Constant(value_floats=spatial_scales), num_outputs=4, axis=0
    )
    level = RoILevel(rois, spatial_scales, canonical_level, canonical_size)
    on_0, on_1 = level == op.Constant(value_int=0), level == op.Constant(value_int=1)
    on_2, on_3 = level == op.Constant(value_int=2), level == op.Constant(value_int=3)
    pooled_0 = RoIAlignOnMap(feature_0, rois, on_0, scale_0, output_size,
                             sampling_ratio, aligned, inclusive)  # fmt: skip
    pooled_1 = RoIAlignOnMap(feature_1, rois, on_1, scale_1, output_size,
                             sampling_ratio, aligned, inclusive)  # fmt: skip
    pooled_2 = RoIAlignOnMap(feature_2, rois, on_2, scale_2, output_size,
                             sampling_ratio, aligned, inclusive)  # fmt: skip
    pooled_3 = RoIAlignOnMap(feature_3, rois, on_3, scale_3, output_size,
                             sampling_ratio, aligned, inclusive)  # fmt: skip
    return op.CastLike(pooled_0 + pooled_1 + pooled_2 + pooled_3, feature_0)


@script(_DOMAIN, default_opset=op)
def SingleMapRoIAlign(  # noqa: N802
    feature: FLOAT,
    rois: FLOAT,
    output_size: int,
    sampling_ratio: int,
    spatial_scales: Sequence[float],
    canonical_level: int,
    canonical_size: float,
    aligned: int,
    inclusive: int,
) -> FLOAT:
    """RoIAlign on a single feature map.

    Inputs are feature [B, C, H, W] and rois [B, R, 4] (xyxy in input pixels). The output is
    [B * R, C, P, P] in the type of the feature map, where P is `output_size`. `canonical_level` and
    `canonical_size` are not used. The other attributes (samples per cell, scale of the map, and
    coordinate convention) are those of the torch operation `maskrcnn::pyramid_roi_align`.
    """
    scale = op.Constant(value_floats=spatial_scales)
    chosen = op.ReduceMax(op.Abs(rois), op.Constant(value_ints=[2]), keepdims=0) >= 0.0
    pooled = RoIAlignOnMap(feature, rois, chosen, scale, output_size,
                           sampling_ratio, aligned, inclusive)  # fmt: skip
    return op.CastLike(pooled, feature)
