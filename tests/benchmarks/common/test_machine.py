"""Matmul rate of a machine, operations of a model, and the upper bound that follows."""

import pytest
import torch

from maskrcnn_trt.benchmarks.common.machine import (
    MatmulRoofline,
    flops_per_image,
    matmul_teraflops,
    measure_matmul_rooflines,
)
from maskrcnn_trt.model.bundle.manifest import Precision
from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.model.config.schema import ModelConfig, RoiConfig


def test_operations_grow_with_detections():
    """Per detection: four 3x3 convolutions at 14x14, a deconvolution, and one class of a 1x1."""
    few, many = (
        flops_per_image(ModelConfig(roi=RoiConfig(max_detections=count)), ShapeBucket(96, 96))
        for count in (10, 60)
    )
    convolutions = 4 * 14**2 * 9 * 256 * 256 + 28**2 * 256 * 256 + 28**2 * 256
    assert many - few == 50 * 2 * convolutions


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_matmul_rate_is_measured(precision: Precision):
    before = torch.backends.cuda.matmul.allow_tf32
    assert matmul_teraflops(precision, 64, "cpu", seconds=0.01) > 0
    assert torch.backends.cuda.matmul.allow_tf32 == (precision == "tf32")
    torch.backends.cuda.matmul.allow_tf32 = before


def test_roofline_is_rate_divided_by_operations():
    """The operations were counted by hand: 267 GMAC, with 1000 proposals and 100 detections."""
    flops = flops_per_image(ModelConfig(), ShapeBucket(800, 1344))
    assert flops == pytest.approx(2 * 267e9, rel=0.01)
    roofline = MatmulRoofline("fp16", teraflops_per_second=800.0, flops_per_image=500_000_000_000)
    assert roofline.images_per_second == pytest.approx(1600)


@pytest.mark.gpu
def test_rooflines_of_a_gpu():
    floors = list(measure_matmul_rooflines(["fp16", "fp32"], ModelConfig(), ShapeBucket(96, 96)))
    assert [floor.precision for floor in floors] == ["fp16", "fp32"]
    assert floors[0].images_per_second > floors[1].images_per_second > 0
