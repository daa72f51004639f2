"""Kernels of the plugins, captured with dynamic shapes and launched as TensorRT launches them."""

import ctypes
import functools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from box_cases import random_boxes
from plugin_builder import PluginKernel, evaluated
from plugin_emulator import (
    GuardedTensor,
    LoadedKernel,
    captured_plugin,
    channels_last,
    executed,
    guarded,
    own_architecture,
    packed_arguments,
)
from pooling_cases import CANONICAL_LEVEL, CANONICAL_SIZE, SCALES, pyramid, random_rois
from torch import Tensor

from maskrcnn_trt.plugins.box_deltas import decode_boxes
from maskrcnn_trt.plugins.nms_keep import nms_keep
from maskrcnn_trt.plugins.pyramid_roi_align import pyramid_roi_align
from maskrcnn_trt.plugins.runtime.compilation import Launch

BATCHES = range(1, 9)
# Architecture of launches that are only evaluated, and oldest one that kernels are compiled for.
HOPPER, TURING = 90, 75
CHANNELS, BOXES, ROIS = 72, 700, 50


class Case(NamedTuple):
    """Plugin, its attributes, type and format of its maps, and format of its output."""

    plugin: str
    attributes: dict[str, Any]
    dtype: torch.dtype = torch.float32
    map_format: str = "LINEAR"
    pooled_format: str = "LINEAR"

    def operation(self, *inputs: Tensor) -> Tensor:
        """Return what the torch operation computes, as the plugin's type."""
        if self.plugin == "NmsKeep":
            return nms_keep(*inputs, **self.attributes).int()
        if self.plugin == "DecodeBoxes":
            inclusive = bool(self.attributes["inclusive"])
            values = {**self.attributes, "inclusive": inclusive, "min_side": 0.0}
            return decode_boxes(*inputs, **values)[0]
        *maps, rois = inputs
        flags = {name: bool(self.attributes[name]) for name in ("aligned", "inclusive")}
        return pyramid_roi_align(maps, rois, **{**self.attributes, **flags}).flatten(0, 1)


def pooling(levels: tuple[float, ...], side: int, ratio: int, flag: int) -> dict[str, Any]:
    return {
        "output_size": side,
        "sampling_ratio": ratio,
        "spatial_scales": list(levels),
        "canonical_level": CANONICAL_LEVEL,
        "canonical_size": CANONICAL_SIZE,
        "aligned": flag,
        "inclusive": flag,
    }


# Type and format of maps, and format of the output.
FORMATS = tuple(
    (dtype, *formats)
    for dtype, last in (
        (torch.float32, "HWC"),
        (torch.float16, "HWC8"),
        (torch.bfloat16, "HWC8"),
    )
    for formats in (("LINEAR", "LINEAR"), (last, "LINEAR"), (last, last))
)
TOLERANCES = {torch.int32: 0, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
CASES = {
    "NMS": Case("NmsKeep", {"iou_threshold": 0.5, "max_keep": 0}),
    "NMS of 100": Case("NmsKeep", {"iou_threshold": 0.7, "max_keep": 100}),
    "decoding": Case("DecodeBoxes", {"center_weight": 10.0, "size_weight": 5.0, "inclusive": 1}),
    "decoding of shared references": Case(
        "DecodeBoxes", {"center_weight": 1.0, "size_weight": 1.0, "inclusive": 0}
    ),
    **{
        f"{name} {str(dtype)[6:]} {' to '.join(formats)}": Case(plugin, attributes, dtype, *formats)
        for name, plugin, attributes in (
            ("pyramid", "PyramidRoIAlign", pooling(SCALES, 7, 2, 0)),
            ("single map", "SingleMapRoIAlign", pooling(SCALES[2:3], 14, 0, 1)),
        )
        for dtype, *formats in FORMATS
    },
}


@functools.cache
def inputs_of(name: str, seed: int = 0) -> list[Tensor]:
    """Return the inputs for the largest batch."""
    case, batch = CASES[name], max(BATCHES)
    if case.plugin == "NmsKeep":
        generator = torch.Generator().manual_seed(seed)
        classes = torch.randint(-1, 4, (batch, BOXES), generator=generator)
        return [random_boxes(batch, BOXES, seed=seed), classes]
    if case.plugin == "DecodeBoxes":
        generator = torch.Generator().manual_seed(seed)
        deltas = torch.randn(batch, BOXES, 3, 4, generator=generator) * 0.3
        references = random_boxes(1 if "shared" in name else batch, BOXES, seed=seed)
        indices = torch.randint(-1, 3 * BOXES, (batch, 333), generator=generator)
        sizes = torch.randint(60, 200, (batch, 2), generator=generator)
        return [deltas, references, indices, sizes]
    maps = pyramid(batch, case.dtype, CHANNELS)
    if case.plugin == "SingleMapRoIAlign":
        maps = maps[2:3]
    return [*(m.flip(0) if seed else m for m in maps), random_rois(batch, ROIS + seed)[:, :ROIS]]


@functools.cache
def expected_of(name: str, seed: int = 0) -> Tensor:
    return CASES[name].operation(*inputs_of(name, seed))


@functools.cache
def captured(name: str, architecture: int) -> PluginKernel:
    case, inputs, expected = CASES[name], inputs_of(name), expected_of(name)
    formats = case.map_format, case.pooled_format
    plugin = captured_plugin(case.plugin, case.attributes, inputs, *formats, architecture)
    assert plugin.dtype == expected.dtype
    for batch in BATCHES:
        shapes = [tuple(tensor[:batch].shape) for tensor in inputs]
        assert evaluated(plugin.sizes, shapes) == _first(batch, expected).shape
    return plugin.kernel


def _first(batch: int, output: Tensor) -> Tensor:
    """Return the part of the output for the first images."""
    return output[: len(output) * batch // max(BATCHES)]


@pytest.mark.parametrize("batch", BATCHES)
def test_launch_of_nms_keep(batch: int) -> None:
    kernel = captured("NMS", HOPPER)
    assert kernel.launch([(batch, 700, 4), (batch, 700)]) == ((batch, 1, 1), (1024, 1, 1), (700,))


@pytest.mark.parametrize("batch", BATCHES)
def test_launches_of_decode_boxes(batch: int) -> None:
    """Only the batch size is another one than that of the capture."""
    for name, references, stride in (
        ("decoding", batch, BOXES),
        ("decoding of shared references", 1, 0),
    ):
        shapes = [(batch, BOXES, 3, 4), (references, BOXES, 4), (batch, 333), (batch, 2)]
        expected = Launch((2, batch, 1), (256, 1, 1), (BOXES, stride, 3, 333))
        assert captured(name, HOPPER).launch(shapes) == expected


@pytest.mark.parametrize("batch", BATCHES)
def test_launches_of_roi_align(batch: int) -> None:
    """Sizes of maps and the number of RoIs are other ones than those of the capture."""
    sizes = [(200, 336), (100, 168), (50, 84), (25, 42)]
    maps, rois = [(batch, CHANNELS, *size) for size in sizes], (batch, 1000, 4)
    for name, given, sides in (
        ("pyramid float16 HWC8 to HWC8", [*maps, rois], (200, 336, 100, 168, 50, 84, 25, 42)),
        ("single map float32 LINEAR to LINEAR", [maps[1], rois], (100, 168)),
    ):
        # A block computes 49 cells of a RoI.
        blocks = {"pyramid": 1, "single map": 4}[name.partition(" float")[0]]
        expected = Launch((1000, batch, blocks), (256, 1, 1), (CHANNELS, *sides))
        assert captured(name, HOPPER).launch(given) == expected


@pytest.mark.parametrize("name", ["NMS", "pyramid float16 HWC8 to LINEAR"])
def test_arguments_are_inputs_scalars_and_output(name: str) -> None:
    kernel, inputs = captured(name, HOPPER), inputs_of(name)
    scalars = kernel.launch([tuple(tensor.shape) for tensor in inputs]).scalars
    addresses = [1 << 40 | index for index in range(len(inputs))]
    packed = packed_arguments(kernel, addresses, scalars, 7)
    assert [value.value for value in packed] == [*addresses, *scalars, 7]
    (parameters,) = re.findall(rf"\.entry {kernel.entry}\((.*?)\)", kernel.ptx.decode(), re.DOTALL)
    widths = [int(bits) // 8 for bits in re.findall(r"\.param \.u(\d+)", parameters)]
    assert [ctypes.sizeof(value) for value in packed] == widths
    with pytest.raises(AssertionError, match="exceeds its type"):
        packed_arguments(kernel, addresses, [1 << 31, *scalars[1:]], 7)


def test_guard_zones_show_writes_out_of_bounds() -> None:
    held = GuardedTensor((2, 3), torch.float16, "cpu")
    assert held.tensor.isnan().all()
    held.tensor.zero_()
    held.check()
    beyond = held.tensor.as_strided((1,), (1,), held.tensor.storage_offset() + 6)
    beyond.zero_()
    with pytest.raises(AssertionError, match="out of bounds"):
        held.check()


@pytest.fixture(scope="module", params=["own architecture", "oldest architecture"])
def loaded(request: pytest.FixtureRequest) -> Iterator[dict[str, LoadedKernel]]:
    """All kernels, loaded in this process."""
    architecture = own_architecture() if request.param == "own architecture" else TURING
    kernels = {name: captured(name, architecture) for name in CASES}
    assert len({kernel.entry for kernel in kernels.values()}) == len(CASES)
    loaded_kernels = {name: LoadedKernel(kernel) for name, kernel in kernels.items()}
    yield loaded_kernels
    torch.cuda.synchronize()
    for kernel in loaded_kernels.values():
        kernel.close()


class Run:
    """Memory of a kernel's inputs and output on the GPU for a batch size."""

    def __init__(self, name: str, batch: int, guard: int) -> None:
        self._name, self._batch = name, batch
        self._case, self._expected = CASES[name], expected_of(name)
        self._shapes = [tuple(tensor[:batch].shape) for tensor in inputs_of(name)]
        self._inputs = [self._placed(tensor, guard) for tensor in inputs_of(name)]
        shape = tuple(_first(batch, self._expected).shape)
        if self._case.pooled_format != "LINEAR":
            shape = channels_last(shape)
        self._output = GuardedTensor(shape, self._expected.dtype, "cuda", guard)

    def _placed(self, tensor: Tensor, guard: int) -> GuardedTensor:
        is_map = tensor.dim() == 4
        last = is_map and self._case.map_format != "LINEAR"
        return guarded(tensor[: self._batch], "cuda", channels_last=last, guard=guard)

    def replace_inputs(self, seed: int) -> None:
        """Overwrite the inputs in place, and poison the output."""
        self._expected = expected_of(self._name, seed)
        for held, tensor in zip(self._inputs, inputs_of(self._name, seed), strict=True):
            held.tensor.copy_(self._placed(tensor, 0).tensor)
        self._output.poison()

    def launch(self, kernel: LoadedKernel) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch(self._inputs, self._shapes, self._output, stream)

    def check(self, seed: int = 0) -> None:
        torch.cuda.synchronize()
        found, expected = self._output.tensor.cpu(), _first(self._batch, self._expected)
        if self._case.pooled_format != "LINEAR":
            found = found.movedim(-1, 1)
        torch.testing.assert_close(found, expected, atol=TOLERANCES[found.dtype], rtol=0)
        for held, tensor in zip(self._inputs, inputs_of(self._name, seed), strict=True):
            assert torch.equal(held.tensor, self._placed(tensor, 0).tensor)
            held.check()
        self._output.check()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_driver_reads_the_same_parameters(loaded: dict[str, LoadedKernel], name: str) -> None:
    fixed = {"NmsKeep": 1, "DecodeBoxes": 4}
    scalars = fixed.get(CASES[name].plugin, 2 * len(inputs_of(name)) - 1)
    sizes = [8] * len(inputs_of(name)) + [4] * scalars + [8]
    assert loaded[name].parameter_sizes() == sizes


@pytest.mark.gpu
@pytest.mark.parametrize("guard", [4096, 0], ids=["guard zones", "exact sizes"])
@pytest.mark.parametrize("name", CASES)
def test_results_equal_the_torch_operation(
    loaded: dict[str, LoadedKernel], name: str, guard: int
) -> None:
    """Memory of exact sizes lets compute-sanitizer, which is slow, see reads out of bounds."""
    for batch in BATCHES if guard else (1, max(BATCHES)):
        run = Run(name, batch, guard)
        run.launch(loaded[name])
        run.check()


@pytest.mark.gpu
def test_kernels_in_one_cuda_graph(loaded: dict[str, LoadedKernel]) -> None:
    runs = {name: Run(name, 5, 4096) for name in CASES}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for name, run in runs.items():
            run.launch(loaded[name])
    for seed in (1, 0, 1):
        for run in runs.values():
            run.replace_inputs(seed)
        graph.replay()
        for run in runs.values():
            run.check(seed)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "map_format", "pooled_format"), FORMATS)
def test_maps_of_a_default_model(dtype: torch.dtype, map_format: str, pooled_format: str) -> None:
    # The reference is the torch operation on the GPU, which other tests compare with the CPU's.
    sizes = [(200, 336), (100, 168), (50, 84), (25, 42)]
    maps = [torch.randn(8, 256, *size, dtype=dtype, device="cuda") for size in sizes]
    rois = (random_rois(8, 1000) * 5).cuda()
    attributes = {**pooling(SCALES, 7, 2, 0), "canonical_size": 224.0}
    inputs = [*maps, rois]
    formats = map_format, pooled_format
    plugin = captured_plugin("PyramidRoIAlign", attributes, inputs, *formats, own_architecture())
    kernel = LoadedKernel(plugin.kernel)
    found = executed(plugin, kernel, inputs)
    kernel.close()
    expected = Case("PyramidRoIAlign", attributes).operation(*inputs)
    torch.testing.assert_close(found, expected, atol=TOLERANCES[dtype], rtol=0)
