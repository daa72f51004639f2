"""JPEG decoding by the decoder hardware of NVIDIA GPUs (NVJPG), through the library nvJPEG.

nvJPEG decodes luma and chroma planes, and the operation `rgb_from_ycbcr` converts them to RGB. The
RGB output of nvJPEG itself is not used: it repeats chroma samples where Pillow interpolates them.
"""

import ctypes
import functools
import itertools
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from ctypes import c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torchvision.io  # noqa: F401, loads nvJPEG
from cuda.bindings import driver
from torch import Tensor

from ..plugins.rgb_from_ycbcr import rgb_from_ycbcr
from ..plugins.runtime.launching import bind_context, checked, current_stream_handle, on_gpu

_log = logging.getLogger(__name__)

# Lock for calls of nvJPEG, also for those by torchvision. nvJPEG's documentation allows several
# threads to use a handle at the same time. With the decoder hardware, however, about 1 of 1000 such
# calls failed (benchmarks/results/jpeg-decoder-h100-202611.md).
NVJPEG_LOCK = threading.RLock()

# Constants of nvjpeg.h.
_SUCCESS: Final = 0
_BACKEND_HARDWARE: Final = 3
_OUTPUT_YUV: Final = 1
_MAX_COMPONENTS: Final = 4
# Divisors of the numbers of rows and of columns in chroma planes, by the value of the enum
# `nvjpegChromaSubsampling_t`. None: the image is grey. The hardware does not support other values.
_CHROMA_FACTORS: Final = {0: (1, 1), 1: (1, 2), 2: (2, 2), 3: (2, 1), 6: None}

# Maximum number of nvJPEG states, because each one takes GPU memory. The states suffice for all
# batches that a server has in flight.
_MAX_SLOTS: Final = 8


class _NvjpegImage(ctypes.Structure):
    """C struct `nvjpegImage_t`: address and bytes per row of each channel of a decoded image."""

    _fields_ = (("channel", c_void_p * _MAX_COMPONENTS), ("pitch", c_size_t * _MAX_COMPONENTS))


class _Library:
    """C functions of nvJPEG, with the types of their arguments."""

    def __init__(self, path: str) -> None:
        # Short functions are called through PyDLL, which keeps the GIL. They take microseconds:
        # releasing the GIL would cost this thread more than the other threads gain.
        short, long = ctypes.PyDLL(path), ctypes.CDLL(path)
        self.create = long.nvjpegCreateEx
        self.create.argtypes = (c_int, c_void_p, c_void_p, c_uint, c_void_p)
        self.create_state = long.nvjpegJpegStateCreate
        self.create_state.argtypes = (c_void_p, c_void_p)
        self.create_header = short.nvjpegJpegStreamCreate
        self.create_header.argtypes = (c_void_p, c_void_p)
        self.parse_header = short.nvjpegJpegStreamParseHeader
        self.parse_header.argtypes = (c_void_p, c_void_p, c_size_t, c_void_p)
        self.frame_size = short.nvjpegJpegStreamGetFrameDimensions
        self.frame_size.argtypes = (c_void_p, c_void_p, c_void_p)
        self.subsampling = short.nvjpegJpegStreamGetChromaSubsampling
        self.subsampling.argtypes = (c_void_p, c_void_p)
        self.is_supported = short.nvjpegDecodeBatchedSupported
        self.is_supported.argtypes = (c_void_p, c_void_p, c_void_p)
        self.set_batch_size = long.nvjpegDecodeBatchedInitialize
        self.set_batch_size.argtypes = (c_void_p, c_void_p, c_int, c_int, c_int)
        self.decode = long.nvjpegDecodeBatched
        self.decode.argtypes = (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)


class _PlaneSizes(NamedTuple):
    """Height and width of an image, and of its chroma planes. Grey images have no chroma planes."""

    height: int
    width: int
    chroma_height: int
    chroma_width: int

    @property
    def samples(self) -> int:
        """Number of samples in all planes of the image."""
        return self.height * self.width + 2 * self.chroma_height * self.chroma_width

    def image_at(self, luma: int) -> _NvjpegImage:
        """Return the C struct `nvjpegImage_t` of an image whose planes are contiguous in memory.

        `luma` is the address of the luma plane, which is the first.
        """
        if not self.chroma_height:
            return _NvjpegImage((luma, None, None, None), (self.width, 0, 0, 0))
        blue = luma + self.height * self.width
        red = blue + self.chroma_height * self.chroma_width
        columns = self.width, self.chroma_width, self.chroma_width
        return _NvjpegImage((luma, blue, red, None), (*columns, 0))


class _Slot:
    """nvJPEG state for the decoding of one batch at a time.

    When the CUDA event `converted` has occurred, the slot can be used for another batch.
    """

    def __init__(self, state: c_void_p) -> None:
        self.state = state
        self.batch_size = 0
        # Files and decoded planes of the batch. The GPU uses their memory until `converted` occurs.
        self.files: Sequence[Tensor] = ()
        self.planes: Tensor | None = None
        self.converted: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]


class HardwareJpegDecoder:
    """Decoder of baseline JPEGs on one GPU.

    Its methods do not wait for the GPU, unless 8 batches are in flight or nvJPEG reports an error.
    """

    # torchvision's decoder uses the same hardware, but waits for the previous batch and occupies a
    # CPU core meanwhile (benchmarks/results/jpeg-decoder-h100-202611.md).

    def __init__(self, library: _Library, handle: c_void_p, device: torch.device) -> None:
        """Take ownership of an nvJPEG handle that was created for the GPU `device`.

        Do not call this constructor directly. Call `hardware_jpeg_decoder`, which creates one
        handle and one decoder per GPU.
        """
        self._library = library
        self._handle = handle
        self._device = device
        # All slots, that of the oldest batch first.
        self._slots: list[_Slot] = []
        self._header = c_void_p()
        _check(library.create_header(handle, ctypes.byref(self._header)))

    def decode(self, files: Sequence[Tensor]) -> list[Tensor | None]:
        """Queue the decoding of JPEGs in the current stream.

        Args:
            files: contents as [N] uint8 tensors on the CPU.

        Returns:
            Per file, pixels [3, h, w] uint8 RGB without EXIF rotation, or None if the hardware does
            not support the file. The pixels are valid once the stream has run the queued work. All
            images are views of one allocation. If nvJPEG reports an error, for example because one
            of the files is damaged, all entries are None.
        """
        with NVJPEG_LOCK, on_gpu(self._device):
            bind_context(self._device.index)  # for driver calls of nvJPEG
            sizes = {
                index: own
                for index, file in enumerate(files)
                if (own := self._supported_sizes(file)) is not None
            }
            if not sizes:
                return [None] * len(files)
            pixels = self._decoded([files[index] for index in sizes], list(sizes.values()))
            if pixels is None:
                return [None] * len(files)
            images = dict(zip(sizes, _images_in(pixels, sizes.values()), strict=True))
            return [images.get(index) for index in range(len(files))]

    def _supported_sizes(self, file: Tensor) -> _PlaneSizes | None:
        """Return the sizes of a JPEG's planes, or None if the hardware cannot decode the file."""
        library, handle, header = self._library, self._handle, self._header
        width, height, chroma, unsupported = c_uint(), c_uint(), c_int(), c_int(1)
        if library.parse_header(handle, file.data_ptr(), len(file), header) != _SUCCESS:
            return None
        if library.is_supported(handle, header, ctypes.byref(unsupported)) or unsupported.value:
            return None
        if library.frame_size(header, ctypes.byref(width), ctypes.byref(height)) != _SUCCESS:
            return None
        if library.subsampling(header, ctypes.byref(chroma)) or chroma.value not in _CHROMA_FACTORS:
            return None
        size, factors = (height.value, width.value), _CHROMA_FACTORS[chroma.value]
        if factors is None:
            return _PlaneSizes(*size, 0, 0)
        return _PlaneSizes(*size, -(-size[0] // factors[0]), -(-size[1] // factors[1]))

    def _decoded(self, files: Sequence[Tensor], sizes: Sequence[_PlaneSizes]) -> Tensor | None:
        """Queue the decoding of JPEGs, and the conversion of their planes to RGB.

        `sizes` holds the plane sizes of each file. Return the pixels of all images [N] uint8,
        without gaps, or None if nvJPEG reports an error.
        """
        slot = self._free_slot()
        slot.files = files
        try:
            with allocation_stream(self._device):
                samples = sum(own.samples for own in sizes)
                slot.planes = torch.empty(samples, dtype=torch.uint8, device=self._device)
            if not self._queue(slot, sizes, slot.planes):
                # The stream does not wait for those images that nvJPEG has queued before the error,
                # so wait for the whole device.
                torch.cuda.synchronize(self._device)
                slot.batch_size = 0  # initialise the state again
                return None
            return rgb_from_ycbcr(slot.planes, [side for own in sizes for side in own])
        finally:
            slot.converted.record(torch.cuda.current_stream(self._device))

    def _queue(self, slot: _Slot, sizes: Sequence[_PlaneSizes], planes: Tensor) -> bool:
        """Queue the decoding of `slot.files` into `planes`, a GPU tensor [N] without gaps.

        `sizes` holds the plane sizes of each file. Return False if nvJPEG reports an error.
        """
        library, files, count = self._library, slot.files, len(slot.files)
        if slot.batch_size != count:
            if library.set_batch_size(self._handle, slot.state, count, 1, _OUTPUT_YUV):
                return False
            slot.batch_size = count
        samples = (own.samples for own in sizes)
        addresses = itertools.accumulate(samples, initial=planes.data_ptr())
        status = library.decode(
            self._handle,
            slot.state,
            (c_void_p * count)(*[file.data_ptr() for file in files]),
            (c_size_t * count)(*[len(file) for file in files]),
            (_NvjpegImage * count)(*map(_PlaneSizes.image_at, sizes, addresses)),
            current_stream_handle(self._device),
        )
        if status != _SUCCESS:
            _log.debug("nvJPEG failed with status %d on a batch of %d files", status, count)
        return bool(status == _SUCCESS)

    def _free_slot(self) -> _Slot:
        """Return a slot (nvJPEG state) that is not decoding a batch.

        If all are busy, add one. If there are already `_MAX_SLOTS`, wait for one.
        """
        free = [slot for slot in self._slots if slot.converted.query()]
        if not free and len(self._slots) == _MAX_SLOTS:
            free = self._slots[:1]
            free[0].converted.synchronize()
        for slot in free:
            slot.files, slot.planes = (), None
        if free:
            self._slots.remove(free[0])
        else:
            state = c_void_p()
            _check(self._library.create_state(self._handle, ctypes.byref(state)))
            free = [_Slot(state)]
        self._slots.append(free[0])
        return free[0]


@functools.cache
def allocation_stream(device: torch.device) -> Any:
    """Return the CUDA stream in which to allocate memory that nvJPEG writes.

    Free this memory only when the GPU no longer uses it. `device` is a GPU, with its index. Hold
    `NVJPEG_LOCK` while this stream is the current one.
    """
    # The lock is needed because two threads must not enter a stream object at once.
    #
    # nvJPEG's hardware writes as soon as it is free, even before earlier work in the stream
    # (https://github.com/pytorch/vision/pull/9606). So such work must not use the written memory.
    # torch's allocator reuses memory only within a stream, and no kernel is queued in this one. It
    # is not a `torch.cuda.Stream`, because torch hands out the same 32 streams again and again.
    with torch.cuda.device(device):
        bind_context(device.index)
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = checked(driver.cuStreamCreate(flags), f"cannot create a CUDA stream on {device}")
    return torch.cuda.ExternalStream(int(stream), device)  # type: ignore[no-untyped-call]


def hardware_jpeg_decoder(device: torch.device) -> HardwareJpegDecoder | None:
    """Return the JPEG decoder of a GPU, which all callers in this process share.

    Return None if the GPU has no decoder hardware, or if this process has not loaded nvJPEG.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with NVJPEG_LOCK:
        return _decoder_of(torch.device("cuda", index))


@functools.cache
def _decoder_of(device: torch.device) -> HardwareJpegDecoder | None:
    path = _path_of_nvjpeg()
    if path is None:
        return None
    library, handle = _Library(path), c_void_p()
    with torch.cuda.device(device):
        status = library.create(_BACKEND_HARDWARE, None, None, 0, ctypes.byref(handle))
    return HardwareJpegDecoder(library, handle, device) if status == _SUCCESS else None


def _path_of_nvjpeg() -> str | None:
    """Return the path of the nvJPEG library that this process has loaded. None: not loaded."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return next((line.split(maxsplit=5)[-1] for line in lines if "/libnvjpeg" in line), None)


def _images_in(pixels: Tensor, sizes: Iterable[_PlaneSizes]) -> Iterator[Tensor]:
    """Yield views [3, h, w] of images that lie one after the other in a tensor [N]."""
    start = 0
    for height, width, *_ in sizes:
        # Slicing and then reshaping would create two tensors per image, and freeing takes time.
        yield pixels.as_strided((3, height, width), (height * width, width, 1), start)
        start += 3 * height * width


def _check(status: int) -> None:
    if status != _SUCCESS:
        raise RuntimeError(f"nvJPEG failed with status {status}; see nvjpegStatus_t in nvjpeg.h")
