"""One table of cases that every implementation of `PyramidRoIAlign` answers alike."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor
from torchvision.ops import MultiScaleRoIAlign

from maskrcnn_trt.export.onnx_functions import functions_for
from maskrcnn_trt.model.config import BackboneConfig, ModelConfig, RoiConfig
from maskrcnn_trt.plugins.kernels.pyramid_roi_align import (
    Pooling,
    forward_kernel,
    pyramid_roi_align_launch,
)
from maskrcnn_trt.plugins.launching import launch_kernel
from maskrcnn_trt.plugins.pyramid_roi_align import pyramid_roi_align

SCALES = (1 / 4, 1 / 8, 1 / 16, 1 / 32)
SINGLE_SCALE = 1 / 16
HEIGHT, WIDTH = 192, 256
CANONICAL_LEVEL, CANONICAL_SIZE = 4, 64.0
SIDE = 3


class Mode(NamedTuple):
    """The attributes in which implementations of RoIAlign differ."""

    ratio: int = 2
    aligned: bool = False
    inclusive: bool = False


DEFAULT = Mode()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FORMATS = [torch.contiguous_format, torch.channels_last]
MODES = {
    "default": DEFAULT,
    "aligned": Mode(aligned=True),
    "inclusive": Mode(inclusive=True),
    "adaptive": Mode(ratio=0),
    "adaptive, aligned": Mode(ratio=0, aligned=True),
    "adaptive, inclusive": Mode(ratio=0, inclusive=True),
}

Pool = Callable[[Sequence[Tensor], Tensor, Mode], Tensor]


def pool_by_definition(features: Sequence[Tensor], rois: Tensor, mode: Mode) -> Tensor:
    """The contract word by word: one RoI, cell and sample after the other."""
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
    """Value of [C, H, W] at a point; beyond one cell outside the map, zero."""
    _, height, width = feature.shape
    if not (-1 <= y <= height and -1 <= x <= width):
        return np.zeros(len(feature))
    y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    upper = (1 - x + left) * feature[:, top, left] + (x - left) * feature[:, top, right]
    lower = (1 - x + left) * feature[:, bottom, left] + (x - left) * feature[:, bottom, right]
    return (1 - y + top) * upper + (y - top) * lower


def attributes(levels: int, mode: Mode) -> tuple[object, ...]:
    scales = SCALES if levels > 1 else (SINGLE_SCALE,)
    level_and_size = CANONICAL_LEVEL, CANONICAL_SIZE
    return SIDE, mode.ratio, scales, *level_and_size, mode.aligned, mode.inclusive


def pool_by_torch(features: Sequence[Tensor], rois: Tensor, mode: Mode = DEFAULT) -> Tensor:
    return pyramid_roi_align(features, rois, *attributes(len(features), mode))


def pool_channels_last(features: Sequence[Tensor], rois: Tensor, mode: Mode = DEFAULT) -> Tensor:
    """With channels innermost, which the result must have too."""
    pooled = pool_by_torch(
        [feature.contiguous(memory_format=torch.channels_last) for feature in features], rois, mode
    )
    assert pooled.movedim(2, -1).is_contiguous()
    return pooled


def pool_by_cuda(features: Sequence[Tensor], rois: Tensor, mode: Mode = DEFAULT) -> Tensor:
    return pool_by_torch([feature.cuda() for feature in features], rois.cuda(), mode).cpu()


def pool_channels_last_by_cuda(
    features: Sequence[Tensor], rois: Tensor, mode: Mode = DEFAULT
) -> Tensor:
    return pool_channels_last([feature.cuda() for feature in features], rois.cuda(), mode).cpu()


def pool_by_torchvision(features: Sequence[Tensor], rois: Tensor, mode: Mode = DEFAULT) -> Tensor:
    assert mode == DEFAULT
    pool = MultiScaleRoIAlign(
        [str(level) for level in range(4)],
        SIDE,
        mode.ratio,
        canonical_scale=int(CANONICAL_SIZE),
        canonical_level=CANONICAL_LEVEL,
    )
    maps = {str(level): feature.float() for level, feature in enumerate(features)}
    pooled = pool(maps, list(rois), [(HEIGHT, WIDTH)] * len(rois))
    return pooled.to(features[0].dtype).unflatten(0, rois.shape[:2])


def pool_by_onnx(features: Sequence[Tensor], rois: Tensor, mode: Mode = DEFAULT) -> Tensor:
    names = [f"feature_{level}" for level in range(len(features))]
    kind = TensorProto.FLOAT16 if features[0].dtype == torch.float16 else TensorProto.FLOAT
    side, ratio, scales, level, size, aligned, inclusive = attributes(len(features), mode)
    node = helper.make_node(
        "PyramidRoIAlign" if len(features) > 1 else "SingleMapRoIAlign",
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
        backbone=BackboneConfig(features="fpn" if len(features) > 1 else "c4"),
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
    session = onnxruntime.InferenceSession(model.SerializeToString())
    feeds = {name: feature.numpy() for name, feature in zip(names, features, strict=True)}
    return torch.from_numpy(session.run(["pooled"], feeds | {"rois": rois.numpy()})[0])


def pyramid(batch: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(batch)
    return [
        torch.randn(batch, 12, int(HEIGHT * s), int(WIDTH * s), generator=generator).to(dtype)
        for s in SCALES
    ]


def random_rois(batch: int, count: int) -> Tensor:
    """RoIs of all levels, many of them over a border."""
    generator = torch.Generator().manual_seed(count)
    size = torch.tensor([WIDTH, HEIGHT])
    centers = torch.rand(batch, count, 2, generator=generator) * size
    half_sides = 2 ** (1 + 6 * torch.rand(batch, count, 2, generator=generator))
    return torch.cat([centers - half_sides, centers + half_sides], dim=2)


ROIS: dict[str, Tensor] = {
    "no RoI": torch.zeros(2, 0, 4),
    "one image": random_rois(1, 40),
    "three images": random_rois(3, 20),
    "padding and other empty RoIs": torch.tensor(
        [[[0, 0, 0, 0], [50, 60, 50, 90], [50, 60, 90, 60], [255.5, 191.5, 255.5, 191.5]]]
    ).float(),
    "sides at which the level changes": torch.tensor(
        [[[8.3, 7.1, 8.3 + side, 7.1 + side] for side in (31.9, 32.0, 32.1, 63.9, 64, 128, 128.1)]]
    ),
    "over and beyond the borders": torch.tensor(
        [
            [
                [-30, -20, 40, 50],
                [240, 170, 300, 230],
                [-90, 20, -50, 70],
                [-200, -150, 500, 400],
                [300, 250, 340, 290],
            ]
        ]
    ).float(),
    "whole image": torch.tensor([[[0, 0, WIDTH, HEIGHT]]]).float(),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 4e-3)])
@pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(pool_by_torch, id="torch-cpu"),
        pytest.param(pool_channels_last, id="torch-cpu-channels-last"),
        pytest.param(pool_by_onnx, id="onnx-function"),
        pytest.param(pool_by_torchvision, id="torchvision"),
        pytest.param(pool_by_cuda, id="torch-cuda", marks=pytest.mark.gpu),
        pytest.param(
            pool_channels_last_by_cuda, id="torch-cuda-channels-last", marks=pytest.mark.gpu
        ),
    ],
)
@pytest.mark.parametrize("case", ROIS)
def test_implementations_pool_the_same(
    implementation: Pool, case: str, dtype: torch.dtype, tolerance: float
) -> None:
    rois = ROIS[case]
    features = pyramid(len(rois), dtype)
    pooled = implementation(features, rois, DEFAULT)
    assert pooled.dtype == dtype
    expected = pool_by_definition(features, rois, DEFAULT)
    torch.testing.assert_close(pooled, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(pool_by_torch, id="torch-cpu"),
        pytest.param(pool_channels_last, id="torch-cpu-channels-last"),
        pytest.param(pool_by_onnx, id="onnx-function"),
        pytest.param(pool_by_cuda, id="torch-cuda", marks=pytest.mark.gpu),
        pytest.param(
            pool_channels_last_by_cuda, id="torch-cuda-channels-last", marks=pytest.mark.gpu
        ),
    ],
)
@pytest.mark.parametrize("levels", [4, 1], ids=["pyramid", "one map"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ROIS)
def test_modes_pool_as_defined(implementation: Pool, case: str, mode: str, levels: int) -> None:
    rois = ROIS[case]
    features = pyramid(len(rois)) if levels > 1 else pyramid(len(rois))[2:3]
    pooled = implementation(features, rois, MODES[mode])
    expected = pool_by_definition(features, rois, MODES[mode])
    torch.testing.assert_close(pooled, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(pool_by_torch, id="torch-cpu"),
        pytest.param(pool_channels_last, id="torch-cpu-channels-last"),
        pytest.param(pool_by_cuda, id="torch-cuda", marks=pytest.mark.gpu),
        pytest.param(
            pool_channels_last_by_cuda, id="torch-cuda-channels-last", marks=pytest.mark.gpu
        ),
    ],
)
@pytest.mark.parametrize("case", ["no RoI", "three images", "over and beyond the borders"])
def test_gradients_equal_torchvisions(implementation: Pool, case: str) -> None:
    """Compared in single precision, in which the operation computes whatever it is given."""
    rois = ROIS[case]
    ours = [feature.requires_grad_() for feature in pyramid(len(rois))]
    theirs = [feature.requires_grad_() for feature in pyramid(len(rois))]
    pooled = implementation(ours, rois)
    weights = torch.randn(pooled.shape, generator=torch.Generator().manual_seed(0))
    (pooled * weights).sum().backward()
    (pool_by_torchvision(theirs, rois) * weights).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        wanted = torch.zeros_like(other) if other.grad is None else other.grad
        torch.testing.assert_close(mine.grad, wanted, atol=1e-5, rtol=1e-5)


def test_gradient_of_half_precision_features_is_of_half_precision() -> None:
    rois = ROIS["three images"]
    halves = [feature.requires_grad_() for feature in pyramid(3, torch.float16)]
    singles = [feature.detach().float().requires_grad_() for feature in halves]
    pool_by_torch(halves, rois).sum().backward()
    pool_by_torch(singles, rois).sum().backward()
    for half, single in zip(halves, singles, strict=True):
        assert half.grad.dtype == torch.float16
        torch.testing.assert_close(half.grad.float(), single.grad, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("case", ["no RoI", "three images"])
def test_registration_holds(case: str, memory_format: torch.memory_format, device: str) -> None:
    rois = ROIS[case].to(device)
    features = [
        feature.to(device, memory_format=memory_format).requires_grad_()
        for feature in pyramid(len(rois))
    ]
    torch.library.opcheck(pyramid_roi_align, (features, rois, *attributes(4, DEFAULT)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("mode", ["default", "adaptive, aligned"])
def test_gradients_are_those_of_finite_differences(
    mode: str, memory_format: torch.memory_format, device: str
) -> None:
    rois = torch.tensor([[[1, 2, 15, 11], [-3, 0, 40, 30], [0, 0, 31, 15]]] * 2).float().to(device)
    features = [
        torch.rand(2, 4, 8 >> level, 8 >> level, dtype=torch.float64, device=device)
        .to(memory_format=memory_format)
        .requires_grad_()
        for level in range(4)
    ]
    assert torch.autograd.gradcheck(
        lambda *maps: pyramid_roi_align(maps, rois, *attributes(4, MODES[mode])),
        features,
        nondet_tol=1e-12,
    )


@pytest.mark.parametrize("device", DEVICES)
def test_rois_that_are_no_numbers_pool_zeros(device: str) -> None:
    rois = torch.tensor([[[torch.nan] * 4, [5, 5, torch.nan, 9], [0, 0, 64, 64], [9, 5, 5, 9]]])
    pooled = pool_by_torch([f.to(device) for f in pyramid(1)], rois.to(device))[0]
    assert [bool(cells.any()) for cells in pooled] == [False, False, True, False]


@pytest.mark.parametrize("device", DEVICES)
def test_scales_that_do_not_belong_to_the_levels_are_refused(device: str) -> None:
    features, rois = [f.to(device) for f in pyramid(1)[:3]], torch.zeros(1, 1, 4, device=device)
    with pytest.raises(ValueError, match=r"3 levels of features need as many .* not 4"):
        pyramid_roi_align(features, rois, *attributes(4, DEFAULT))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scales", [(0.3, 0.15), (1 / 4, 1 / 4), (1 / 8, 1 / 4), (0.0, 0.0)])
def test_scales_of_no_pyramid_are_refused(scales: tuple[float, ...], device: str) -> None:
    features, rois = [f.to(device) for f in pyramid(1)[:2]], torch.zeros(1, 1, 4, device=device)
    with pytest.raises(ValueError, match=r"must be powers of two, each half the one before, not"):
        pyramid_roi_align(features, rois, SIDE, 2, scales, *attributes(4, DEFAULT)[3:])


@pytest.mark.gpu
def test_features_that_the_kernel_cannot_read_are_refused_on_a_gpu() -> None:
    rois = torch.zeros(1, 1, 4, device="cuda")
    with pytest.raises(ValueError, match=r"float32 or torch.float64, not torch.int32"):
        pool_by_torch([feature.cuda().int() for feature in pyramid(1)], rois)
    huge = torch.zeros(1, device="cuda").expand(1, 256, 4096, 2048)
    with pytest.raises(ValueError, match=r"fewer than 2 \*\* 31 an image and level, not \[1, 256"):
        pool_by_torch([huge], rois)
    with pytest.raises(ValueError, match=r"features must be .* of shape \[\*, \*, \*, \*\]"):
        pool_by_torch([pyramid(1)[0][0].cuda()], rois.expand(12, 1, 4))


@pytest.mark.gpu
def test_unlike_features_are_refused_on_a_gpu() -> None:
    features = [feature.cuda() for feature in pyramid(1)]
    rois = torch.zeros(1, 1, 4, device="cuda")
    with pytest.raises(ValueError, match=r"float16 \[1, 12, 24, 32\] stands beside torch.float32"):
        pool_by_torch([*features[:1], *(f.half() for f in features[1:])], rois)
    with pytest.raises(ValueError, match=r"rois must be torch.float32 of shape \[1, \*, 4\]"):
        pool_by_torch(features, rois.double())


@pytest.mark.gpu
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("channels", [1, 5, 8, 36, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("batch", "side"), [(0, 7), (1, 7), (3, 14), (16, 2)])
def test_equals_the_cpu_on_a_gpu(
    dtype: torch.dtype,
    batch: int,
    side: int,
    channels: int,
    memory_format: torch.memory_format,
) -> None:
    """Forward and backward, by number of channels, type, layout, batch and size."""
    rois = random_rois(batch, 10)
    generator = torch.Generator().manual_seed(channels)
    sizes = [(int(HEIGHT * s), int(WIDTH * s)) for s in SCALES]
    maps = [torch.randn(batch, channels, *size, generator=generator).to(dtype) for size in sizes]
    weights = torch.randn(batch, 10, channels, side, side, generator=generator).to(dtype)
    answers = []
    for device in ("cpu", "cuda"):
        features = [
            m.to(device, memory_format=memory_format, copy=True).requires_grad_() for m in maps
        ]
        pooled = pyramid_roi_align(features, rois.to(device), side, *attributes(4, DEFAULT)[1:])
        pooled.backward(weights.to(device))
        answers.append([x.cpu() for x in (pooled.detach(), *(f.grad for f in features))])
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(dtype, 2e-5)
    for ours, wanted in zip(answers[1], answers[0], strict=True):
        torch.testing.assert_close(ours, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [8, 24, 264, 520])
@pytest.mark.parametrize("side", [3, 7, 14])
def test_engines_pool_channels_last_into_planes(side: int, channels: int) -> None:
    """A variant of the kernel that TensorRT alone asks for."""
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
# Torch's own compiler is not free of what it deprecates.
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
