"""All implementations of `PyramidRoIAlign` agree on a table of cases."""

import functools
import math
from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from pooling_cases import (
    CANONICAL_LEVEL,
    CANONICAL_SIZE,
    DEFAULT,
    FORMATS,
    IMPLEMENTATIONS,
    MODES,
    ROIS,
    SCALES,
    SIDE,
    SINGLE_SCALE,
    Mode,
    Pool,
    attributes,
    pool_by_cuda,
    pool_by_torch,
    pool_by_torchvision,
    pyramid,
    random_rois,
)
from torch import Tensor

from maskrcnn_trt.export.onnx.functions import functions_for
from maskrcnn_trt.model.config.schema import BackboneConfig, ModelConfig, RoiConfig
from maskrcnn_trt.plugins.pyramid_roi_align import pyramid_roi_align
from maskrcnn_trt.plugins.pyramid_roi_align.kernel import (
    Pooling,
    forward_kernel,
    pyramid_roi_align_launch,
)
from maskrcnn_trt.plugins.runtime.launching import launch_kernel


def pool_by_definition(features: Sequence[Tensor], rois: Tensor, mode: Mode) -> Tensor:
    """Pool as specified: one RoI, cell and sample at a time."""
    batch, count, _ = rois.shape
    pooled = np.zeros((batch, count, features[0].shape[1], SIDE, SIDE))
    for image in range(batch):
        for roi in range(count):
            x1, y1, x2, y2 = rois[image, roi].tolist()
            level = level_of(x2 - x1, y2 - y1) if len(features) > 1 else 0
            feature = features[level][image].double().numpy()
            scale = SCALES[level] if len(features) > 1 else SINGLE_SCALE
            if mode.inclusive:
                x2, y2 = x2 - 1, y2 - 1
            least, shift = (-math.inf, 0.5) if mode.aligned else (1, 0)
            cell_height = max((y2 - y1) * scale, least) / SIDE
            cell_width = max((x2 - x1) * scale, least) / SIDE
            down = mode.ratio or math.ceil(cell_height)
            across = mode.ratio or math.ceil(cell_width)
            for row, column in np.ndindex(SIDE, SIDE):
                samples = [
                    bilinear(
                        feature,
                        y1 * scale - shift + (row + (i + 0.5) / down) * cell_height,
                        x1 * scale - shift + (column + (j + 0.5) / across) * cell_width,
                    )
                    for i, j in np.ndindex(down, across)
                ]
                if samples:
                    pooled[image, roi, :, row, column] = np.mean(samples, axis=0)
    return torch.from_numpy(pooled).to(features[0].dtype)


def level_of(width: float, height: float) -> int:
    side = math.sqrt(width * height)
    if side == 0:
        return 0
    level = math.floor(CANONICAL_LEVEL + math.log2(side / CANONICAL_SIZE) + 1e-6)
    return min(max(level, 2), 5) - 2


def bilinear(feature: np.ndarray, y: float, x: float) -> np.ndarray:
    """Interpolate [C, H, W] at a point; zero beyond one cell outside of the map."""
    _, height, width = feature.shape
    if not (-1 <= y <= height and -1 <= x <= width):
        return np.zeros(len(feature))
    y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    upper = (1 - x + left) * feature[:, top, left] + (x - left) * feature[:, top, right]
    lower = (1 - x + left) * feature[:, bottom, left] + (x - left) * feature[:, bottom, right]
    return (1 - y + top) * upper + (y - top) * lower


@functools.cache
def onnx_session(levels: int, kind: int, mode: Mode) -> onnxruntime.InferenceSession:
    """Return a session of one node, for maps of any size."""
    names = [f"feature_{level}" for level in range(levels)]
    side, ratio, scales, level, size, aligned, inclusive = attributes(levels, mode)
    node = helper.make_node(
        "PyramidRoIAlign" if levels > 1 else "SingleMapRoIAlign",
        [*names, "rois"],
        ["pooled"],
        domain="maskrcnn",
        output_size=side,
        sampling_ratio=ratio,
        spatial_scales=scales,
        canonical_level=level,
        canonical_size=size,
        aligned=int(aligned),
        inclusive=int(inclusive),
    )
    config = ModelConfig(
        backbone=BackboneConfig(features="fpn" if levels > 1 else "c4"),
        roi=RoiConfig(sampling_ratio=ratio),
    )
    inputs = [helper.make_tensor_value_info(name, kind, [None] * 4) for name in names]
    inputs.append(helper.make_tensor_value_info("rois", TensorProto.FLOAT, [None, None, 4]))
    output = helper.make_tensor_value_info("pooled", kind, [None] * 5)
    model = helper.make_model(
        helper.make_graph([node], "pool", inputs, [output]),
        functions=functions_for(config),
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("maskrcnn", 1)],
        ir_version=10,
    )
    onnx.checker.check_model(model)
    return onnxruntime.InferenceSession(model.SerializeToString())


def pool_by_onnx(features: Sequence[Tensor], rois: Tensor, mode: Mode = DEFAULT) -> Tensor:
    kind = TensorProto.FLOAT16 if features[0].dtype == torch.float16 else TensorProto.FLOAT
    feeds = {f"feature_{level}": feature.numpy() for level, feature in enumerate(features)}
    session = onnx_session(len(features), kind, mode)
    (pooled,) = session.run(["pooled"], feeds | {"rois": rois.numpy()})
    return torch.from_numpy(pooled.reshape(*rois.shape[:2], *pooled.shape[1:]))


OWN = [*IMPLEMENTATIONS, pytest.param(pool_by_onnx, id="onnx-function")]


@functools.cache
def maps_and_definition(
    case: str, mode: Mode, levels: int, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    features = pyramid(len(ROIS[case]), dtype)
    features = features if levels > 1 else features[2:3]
    return features, pool_by_definition(features, ROIS[case], mode)


@pytest.mark.parametrize("case", ROIS)
def test_the_definition_equals_torchvision(case: str) -> None:
    features, expected = maps_and_definition(case, DEFAULT, 4, torch.float32)
    pooled = pool_by_torchvision(features, ROIS[case])
    torch.testing.assert_close(pooled, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("implementation", OWN)
@pytest.mark.parametrize("levels", [4, 1], ids=["pyramid", "one map"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ROIS)
def test_modes_equal_the_definition(
    implementation: Pool, case: str, mode: str, levels: int
) -> None:
    features, expected = maps_and_definition(case, MODES[mode], levels, torch.float32)
    pooled = implementation(features, ROIS[case], MODES[mode])
    torch.testing.assert_close(pooled, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("implementation", OWN)
@pytest.mark.parametrize("case", ROIS)
def test_half_precision_is_near_the_definition(implementation: Pool, case: str) -> None:
    features, expected = maps_and_definition(case, DEFAULT, 4, torch.float16)
    pooled = implementation(features, ROIS[case], DEFAULT)
    assert pooled.dtype == torch.float16
    torch.testing.assert_close(pooled, expected, atol=4e-3, rtol=0)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("case", ["no RoI", "three images"])
def test_opcheck(case: str, memory_format: torch.memory_format, device: str) -> None:
    rois = ROIS[case].to(device)
    features = [
        feature.to(device, memory_format=memory_format).requires_grad_()
        for feature in pyramid(len(rois))
    ]
    torch.library.opcheck(pyramid_roi_align, (features, rois, *attributes(4, DEFAULT)))


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_undefined_and_too_large_rois_pool_zeros(ratio: int, device: str) -> None:
    undefined = [[torch.nan] * 4, [5, 5, torch.nan, 9], [9, 5, 5, 9]]
    endless = [0, 0, torch.inf, 5], [-torch.inf, 0, torch.inf, 9], [0, 0, 1e30, 1e30]
    # The sample in the middle of these two would be on the map.
    large = [-1e12, -1e12, 1e12, 1e12], [-1e12, 5, 1e12, 6]
    rois = torch.tensor([[[0, 0, 64, 64], *undefined, *endless, *large]])
    features = [feature.to(device) for feature in pyramid(1)]
    pooled = pool_by_torch(features, rois.to(device), Mode(ratio))[0]
    assert [bool(cells.any()) for cells in pooled] == [True] + [False] * 8


@pytest.mark.parametrize(
    "scales", [SCALES, (0.3, 0.15), (1 / 4, 1 / 4), (1 / 8, 1 / 4), (0.0, 0.0)]
)
def test_scales_that_are_not_a_pyramid_are_rejected(scales: tuple[float, ...], device: str) -> None:
    features, rois = [f.to(device) for f in pyramid(1)[:2]], torch.zeros(1, 1, 4, device=device)
    with pytest.raises(ValueError, match=r"one value per .*, not 4|must be powers of two, "):
        pyramid_roi_align(features, rois, SIDE, 2, scales, *attributes(4, DEFAULT)[3:])


@pytest.mark.gpu
def test_unsupported_features_are_rejected_on_a_gpu() -> None:
    features, rois = [f.cuda() for f in pyramid(1)], torch.zeros(1, 1, 4, device="cuda")
    huge = torch.zeros(1, device="cuda").expand(1, 256, 4096, 2048)
    mixed = [*features[:1], *(f.half() for f in features[1:])]
    for maps, boxes, pattern in (
        ([f.int() for f in features], rois, r"float32 or torch.float64, not torch.int32"),
        ([huge], rois, r"fewer than 2 \*\* 31 .*, not \[1, 256"),
        (
            [features[0][0]],
            rois.expand(12, 1, 4),
            r"features must be .* of shape \[\*, \*, \*, \*\]",
        ),
        (mixed, rois, r"float16 \[1, 12, 24, 32\] and torch.float32"),
        (features, rois.double(), r"rois must be torch.float32 of shape \[1, \*, 4\]"),
    ):
        with pytest.raises(ValueError, match=pattern):
            pool_by_torch(maps, boxes)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [8, 24, 264, 520])
@pytest.mark.parametrize("side", [3, 7, 14])
def test_channels_last_input_with_linear_output(side: int, channels: int) -> None:
    """Only TensorRT uses this variant of the kernel."""
    rois = random_rois(2, 10).cuda()
    features = [torch.randn(2, channels, 24 >> n, 32 >> n, device="cuda").half() for n in range(4)]
    pooling = Pooling(side, 2, SCALES, CANONICAL_LEVEL, CANONICAL_SIZE, False, False)
    kernel = forward_kernel(
        pooling, "float16", channels, channels_last=True, pooled_channels_last=False
    )
    sizes = [tuple(feature.shape[2:]) for feature in features]
    launch = pyramid_roi_align_launch(2, 10, channels, sizes, side)
    maps = [feature.contiguous(memory_format=torch.channels_last) for feature in features]
    pooled = torch.full((2, 10, channels, side, side), torch.nan, device="cuda").half()
    launch_kernel(kernel, launch, [*maps, rois], [pooled])
    assert torch.equal(pooled, pyramid_roi_align(maps, rois, *pooling))


@pytest.mark.gpu
def test_huge_rois_do_not_hang_a_gpu() -> None:
    rois = torch.tensor([[[-1e6, -1e6, 1e6, 1e6], [0, 0, 1e30, 1e30], [0, 0, torch.inf, 5]]])
    pooled = pool_by_cuda(pyramid(1), rois, MODES["adaptive"])
    assert pooled.isfinite().all()


@pytest.mark.gpu
# torch.compile itself raises deprecation warnings.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_and_captured_on_a_gpu() -> None:
    features, rois = [f.cuda() for f in pyramid(3)], ROIS["three images"].cuda()

    @torch.compile(fullgraph=True)
    def pool(rois: Tensor) -> Tensor:
        return pool_by_torch([feature * 2 for feature in features], rois) + 1

    pool(rois)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pooled = pool(rois)
    rois.copy_(rois.flip(1))
    graph.replay()
    expected = pool_by_torch([feature * 2 for feature in features], rois) + 1
    torch.testing.assert_close(pooled, expected)
