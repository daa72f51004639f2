"""Matrix products fused with bias, residual and ReLU, through cuBLASLt.

torch cannot fuse all three steps with a product.
"""

import ctypes
import functools
import threading

import torch
from torch import Tensor

from ..runtime.graph_capture import workspace
from ..runtime.launching import current_stream_handle
from .libraries import Library, UnsupportedError

# Constants of the header files `cublasLt.h`, `cublas_api.h` and `library_types.h`.
_DATA_TYPES = {torch.float16: 2, torch.bfloat16: 14}
_FLOAT, _COMPUTE_FLOAT = 0, 68
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8
_EPILOGUE_BIAS, _EPILOGUE_RELU_BIAS = 4, 6
_MAX_WORKSPACE_BYTES = 1

# Maximum workspace of an algorithm in bytes.
_WORKSPACE = 4 << 20
# Maximum number of algorithms that cuBLASLt proposes for a product.
_CANDIDATES = 6

# Held while a product is queued, because all calls of a `Product` share one descriptor, in which a
# call stores the address of its bias.
_lock = threading.Lock()


class Algorithm(ctypes.Structure):
    """C struct `cublasLtMatmulHeuristicResult_t`: an algorithm for a matrix product."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Product:
    """cuBLASLt descriptors and algorithms for matrix products of one shape and dtype."""

    # cuBLASLt's matrices are column-major. The first operand of the product is `weight`,
    # transposed, the second is `rows`, and the result is the transpose of `output`.

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        count: int,
        outputs: int,
        inputs: int,
        has_residual: bool,
        relu: bool,
    ) -> None:
        """Query cuBLASLt for algorithms of `rows @ weight.T + bias + residual`.

        Args:
            device: GPU; it must be the current GPU.
            dtype: type of all matrices.
            count: number of rows of `rows` and of the result.
            outputs: number of rows of `weight` and of columns of the result.
            inputs: number of columns of `rows` and of `weight`.
            has_residual: whether a residual is added.
            relu: whether to apply a ReLU to the sum.

        Raises:
            UnsupportedError: cuBLASLt does not support the type, or has no algorithm.
        """
        if dtype not in _DATA_TYPES:
            raise UnsupportedError(
                f"matrix products with cuBLASLt do not support the data type {dtype}"
            )
        self._handle = _handle(device)
        self._residual_factor = ctypes.c_float(1.0 if has_residual else 0.0)
        self._operation = _library().create("cublasLtMatmulDescCreate", _COMPUTE_FLOAT, _FLOAT)
        epilogue = _EPILOGUE_RELU_BIAS if relu else _EPILOGUE_BIAS
        for attribute, value in ((_TRANSPOSE_A, 1), (_TRANSPOSE_B, 0), (_EPILOGUE, epilogue)):
            self._set(attribute, ctypes.c_int(value))
        self._weight, self._rows, self._output = (
            _library().create(
                "cublasLtMatrixLayoutCreate",
                _DATA_TYPES[dtype],
                ctypes.c_uint64(height),
                ctypes.c_uint64(width),
                ctypes.c_int64(height),
            )
            for height, width in ((inputs, outputs), (inputs, count), (outputs, count))
        )
        # In order of speed as cuBLASLt estimates it, the fastest first.
        self.algorithms = self._supported_algorithms()

    def _set(self, attribute: int, value: ctypes.c_int | ctypes.c_void_p) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        arguments = self._operation, attribute, ctypes.byref(value), size
        _library().call("cublasLtMatmulDescSetAttribute", *arguments)

    def _supported_algorithms(self) -> list[Algorithm]:
        preference = _library().create("cublasLtMatmulPreferenceCreate")
        limit = ctypes.c_size_t(_WORKSPACE)
        size = ctypes.c_size_t(ctypes.sizeof(limit))
        setting = preference, _MAX_WORKSPACE_BYTES, ctypes.byref(limit), size
        _library().call("cublasLtMatmulPreferenceSetAttribute", *setting)
        found, number = (Algorithm * _CANDIDATES)(), ctypes.c_int()
        _library().call(
            "cublasLtMatmulAlgoGetHeuristic",
            *(self._handle, self._operation),
            *(self._weight, self._rows, self._output, self._output),
            *(preference, _CANDIDATES, found, ctypes.byref(number)),
        )
        _library().call("cublasLtMatmulPreferenceDestroy", preference)
        algorithms = [own for own in list(found)[: number.value] if own.status == 0]
        if not algorithms:
            raise UnsupportedError(
                "cuBLASLt has no algorithm for a matrix product of this shape and type"
            )
        return algorithms

    def queue(
        self,
        algorithm: Algorithm,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor,
        residual: Tensor | None,
        output: Tensor,
    ) -> None:
        """Queue a matrix product in the current stream. Its result is written to `output`.

        The product is `rows @ weight.T + bias + residual`, followed by the constructor's optional
        ReLU. `algorithm` is an item of the attribute `algorithms`. All tensors must be contiguous
        and have the dtype given to the constructor. `rows` is [count, inputs], `weight`
        [outputs, inputs], `bias` [outputs]; `residual` and `output` are [count, outputs].

        Raises:
            UnsupportedError: the algorithm does not support the tensors. Nothing is queued then.
        """
        scratch = workspace(algorithm.workspace, rows.device)
        added = output if residual is None else residual
        rows_, weight_, bias_, added_, output_, scratch_ = (
            ctypes.c_void_p(tensor.data_ptr())
            for tensor in (rows, weight, bias, added, output, scratch)
        )
        stream = ctypes.c_void_p(current_stream_handle(rows.device))
        with _lock:
            self._set(_BIAS_POINTER, bias_)
            _library().call(
                "cublasLtMatmul",
                *(self._handle, self._operation, ctypes.byref(ctypes.c_float(1.0))),
                *(weight_, self._weight, rows_, self._rows),
                *(ctypes.byref(self._residual_factor), added_, self._output),
                # cuBLASLt expects a `cublasLtMatmulAlgo_t`, the first field of `Algorithm`.
                *(output_, self._output, ctypes.byref(algorithm)),
                *(scratch_, ctypes.c_size_t(algorithm.workspace), stream),
            )


matrix_product = functools.lru_cache(maxsize=1024)(Product)


@functools.cache
def _library() -> Library:
    return Library(f"libcublasLt.so.{(torch.version.cuda or '0').split('.')[0]}")


@functools.cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    return _library().create("cublasLtCreate")  # for the current GPU, which is `device`
