import pytest

from maskrcnn_trt.serving.backends.gpu_execution import GpuDriver


@pytest.fixture(params=["pycuda_driver.PycudaDriver", "cuda_bindings_driver.CudaBindingsDriver"])
def driver(request: pytest.FixtureRequest) -> GpuDriver:
    """Interface to CUDA's driver. A test runs with each interface that is installed."""
    module, _, name = request.param.partition(".")
    if module == "pycuda_driver":
        pytest.importorskip("pycuda.driver", exc_type=ImportError)
    imported = pytest.importorskip(f"maskrcnn_trt.serving.backends.{module}")
    found: GpuDriver = getattr(imported, name)()
    return found
