"""The machine of a benchmark: hardware, package versions, and upper bounds of its throughput."""

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...model.bundle.manifest import Precision
from ...model.bundle.spec import ShapeBucket
from ...model.config.schema import ModelConfig
from ...serving.host import gpu_names, installed_versions
from .timing import measure_call_rate, measure_durations

_PACKAGES = (
    "maskrcnn-trt",
    "numpy",
    "nvidia-cuda-nvrtc",
    "nvidia-cudnn-cu13",
    "onnxruntime",
    "onnxruntime-gpu",
    "pycocotools",
    "torch",
    "torchvision",
    "triton",
)

# Number of rows and of columns of the matrices. The rate of their product gives the roofline.
MATMUL_SIDE = 8192


@dataclass(frozen=True)
class MachineInfo:
    """Hardware and package versions of a machine."""

    cpu: str
    # Number of CPU cores that this process may use.
    cores: int
    # Name and driver version of each NVIDIA GPU.
    gpus: tuple[str, ...]
    python: str
    # Versions of the installed packages that affect speed.
    packages: dict[str, str]


@dataclass(frozen=True)
class MatmulRoofline:
    """Upper bound of a model's throughput, derived from the GPU's rate of matrix products.

    The bound assumes that the GPU computes only the model's convolutions and matrix products.
    """

    precision: Precision
    # Measured rate of the product of two large square matrices.
    teraflops_per_second: float
    # Operations of the model's convolutions and matrix products. A multiply-add counts as two.
    flops_per_image: int

    @property
    def images_per_second(self) -> float:
        """Upper bound of the throughput, in images per second."""
        return 1e12 * self.teraflops_per_second / self.flops_per_image


def describe_machine() -> MachineInfo:
    """Return hardware and package versions of this machine, without importing the packages."""
    return MachineInfo(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        gpus=gpu_names(),
        python=platform.python_version(),
        packages=installed_versions(_PACKAGES),
    )


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def measure_matmul_rooflines(
    precisions: Sequence[Precision], config: ModelConfig, bucket: ShapeBucket
) -> Iterator[MatmulRoofline]:
    """For each precision, yield the upper bound of a model's throughput on the current GPU.

    Without a GPU, yield nothing. `bucket` is the model's input size.
    """
    import torch

    if not torch.cuda.is_available():
        return
    flops = flops_per_image(config, bucket)
    for precision in precisions:
        yield MatmulRoofline(precision, matmul_teraflops(precision, MATMUL_SIDE, "cuda"), flops)


def flops_per_image(config: ModelConfig, bucket: ShapeBucket) -> int:
    """Return the number of floating-point operations for one image of the size `bucket`.

    Only convolutions and matrix products count. A multiply-add counts as two operations. The model
    runs on the meta device, so nothing is computed.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from ...model.mask_rcnn import MaskRCNN

    with torch.device("meta"):
        model = MaskRCNN(config).eval()
        images = torch.empty(1, 3, *bucket, dtype=torch.uint8)
        sizes = torch.empty(1, 2, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model.detect(images, sizes)
    flops: int = counter.get_total_flops()
    return flops


def matmul_teraflops(precision: Precision, side: int, device: str, seconds: float = 0.5) -> float:
    """Return the rate of the product of two matrices [side, side] in 10^12 operations per second.

    Args:
        precision: Precision of the product. `tf32` enables TF32 in this process, and every other
            precision disables it.
        side: Number of rows and of columns of each matrix.
        device: `cuda` or `cpu`.
        seconds: Length of the measurement, after a warm-up of the same length.
    """
    import torch

    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    enqueue = partial(torch.mm, left, right, out=torch.empty_like(left))

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def run() -> None:
        enqueue()
        synchronize()

    count = len(measure_durations(run, seconds))
    return 2 * side**3 * measure_call_rate(enqueue, synchronize, count) / 1e12
