"""What the machine at hand is, as far as plans depend on it."""

import importlib
from types import ModuleType

from ...model.manifest import EngineKind, current_platform
from ..errors import BackendError
from .plan_checks import RUNTIMES, Machine, Runtime


def probe_machine(kind: EngineKind) -> Machine:
    """The machine at hand, as plans of a kind see it.

    Raises:
        BackendError: it has no GPU, or lacks a module; the message says how to get it.
    """
    runtime = RUNTIMES[kind]
    trt = _module(runtime.module, runtime)
    cuda = _module("pycuda.driver", runtime)
    from .pycuda_device import compute_capability, current_gpu, free_memory

    try:
        with current_gpu():
            return Machine(
                runtime_version=trt.__version__,
                compute_capability=compute_capability(),
                platform=current_platform(),
                free_memory=free_memory(),
            )
    except cuda.Error as error:
        raise BackendError(
            f"no GPU answers ({error}); find out why with nvidia-smi, or use --backend onnxruntime"
        ) from None


def _module(name: str, runtime: Runtime) -> ModuleType:
    install = f'pip install "maskrcnn-trt[{runtime.extra}]"'
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or name).partition(".")[0]
        raise BackendError(f"{missing} is not installed; install it with {install}") from None
    except (ImportError, OSError) as error:
        raise BackendError(
            f"{name} does not load ({error}); install an NVIDIA driver if nvidia-smi finds none, "
            f"and otherwise the package again with {install}"
        ) from None
