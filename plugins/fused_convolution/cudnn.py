"""Convolution fused with a bias and an optional ReLU, through cuDNN.

torch offers this fused operation only with the ReLU.
"""

import ctypes
import functools
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from ..runtime.graph_capture import workspace
from ..runtime.launching import current_stream_handle
from .libraries import Library, UnsupportedError

# Constants of cuDNN's header files.
_DATA_TYPES = {torch.float16: 2, torch.bfloat16: 9}
_FLOAT, _NHWC, _CROSS_CORRELATION, _TENSOR_OP_MATH = 0, 1, 1, 1
_RELU, _IDENTITY = 1, 5
# Without an activation, cuDNN supports only this algorithm. Several kernels implement it, of which
# cuDNN selects one.
_PRECOMPUTED_GEMM = 1

# A handle must not be used by two threads at once.
_lock = threading.Lock()


def convolve_with_bias(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    output: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    relu: bool,
) -> None:
    """Queue a convolution with bias, and with a ReLU if `relu`. It writes its result to `output`.

    `images` is [B, C, H, W], `weight` [N, C, K, K], `bias` [N] and `output` [B, N, H', W']. The
    tensors must be on the current GPU, channels-last, and all float16 or all bfloat16. `stride`,
    `padding` and `dilation` have a vertical and a horizontal value each.

    Raises:
        UnsupportedError: cuDNN does not support the convolution. Nothing is queued then.
    """
    if images.dtype not in _DATA_TYPES:
        raise UnsupportedError(
            f"convolutions with cuDNN do not support the data type {images.dtype}"
        )
    shapes = tuple(tuple(tensor.shape) for tensor in (images, weight, output))
    convolution = _convolution(images.dtype, *shapes, (*padding, *stride, *dilation), relu)
    convolution.queue(_handle(images.device), images, weight, bias, output)


class _Convolution:
    """cuDNN's descriptors of one convolution and its tensors."""

    def __init__(
        self,
        dtype: torch.dtype,
        images: Sequence[int],
        weight: Sequence[int],
        output: Sequence[int],
        window: Sequence[int],
        relu: bool,
    ) -> None:
        data_type = _DATA_TYPES[dtype]
        self._images, self._output, self._bias = (
            _descriptor("Tensor", "Tensor4d", _NHWC, data_type, *shape)
            for shape in (images, output, (1, weight[0], 1, 1))
        )
        self._weight = _descriptor("Filter", "Filter4d", data_type, _NHWC, *weight)
        mode = _CROSS_CORRELATION, _FLOAT
        self._window = _descriptor("Convolution", "Convolution2d", *window, *mode)
        _library().call("cudnnSetConvolutionMathType", self._window, _TENSOR_OP_MATH)
        mode_of_nan, unused = 0, ctypes.c_double(0.0)
        activation = _RELU if relu else _IDENTITY, mode_of_nan, unused
        self._activation = _descriptor("Activation", "Activation", *activation)

    def queue(
        self, handle: ctypes.c_void_p, images: Tensor, weight: Tensor, bias: Tensor, output: Tensor
    ) -> None:
        scratch = workspace(self._workspace_size(handle), images.device)
        images_, weight_, bias_, output_, scratch_ = (
            ctypes.c_void_p(tensor.data_ptr()) for tensor in (images, weight, bias, output, scratch)
        )
        one, zero = ctypes.byref(ctypes.c_float(1.0)), ctypes.byref(ctypes.c_float(0.0))
        stream = ctypes.c_void_p(current_stream_handle(images.device))
        with _lock:
            _library().call("cudnnSetStream", handle, stream)
            _library().call(
                "cudnnConvolutionBiasActivationForward",
                handle,
                *(one, self._images, images_, self._weight, weight_),
                *(self._window, _PRECOMPUTED_GEMM),
                *(scratch_, ctypes.c_size_t(scratch.numel())),
                *(zero, self._output, output_),  # no residual
                *(self._bias, bias_, self._activation),
                *(self._output, output_),
            )

    def _workspace_size(self, handle: ctypes.c_void_p) -> int:
        """Return the size in bytes of the workspace that cuDNN needs for the convolution."""
        size = ctypes.c_size_t()
        operands = self._images, self._weight, self._window, self._output
        arguments = (handle, *operands, _PRECOMPUTED_GEMM, ctypes.byref(size))
        with _lock:
            _library().call("cudnnGetConvolutionForwardWorkspaceSize", *arguments)
        return size.value


_convolution = functools.lru_cache(maxsize=1024)(_Convolution)


@functools.cache
def _library() -> Library:
    version: int = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    # The version is 91900 for 9.19.0. cuDNN 8, whose version numbers have another form, is not
    # supported.
    return Library(f"libcudnn.so.{version // 10000}")


@functools.cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    return _library().create("cudnnCreate")  # for the current GPU, which is `device`


def _descriptor(kind: str, setter: str, *values: object) -> ctypes.c_void_p:
    descriptor = _library().create(f"cudnnCreate{kind}Descriptor")
    _library().call(f"cudnnSet{setter}Descriptor", descriptor, *values)
    return descriptor
