"""Weights files on disk, read so that nothing in them can run code."""

import argparse
import codecs
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
import torch

from ..checkpoint import CheckpointError

# A zip archive, or the magic number with which torch began its files before 1.6.
_TORCH_SIGNATURES = (b"PK\x03\x04", b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19")
_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMERIC = ("numpy.core.numeric", "numpy._core.numeric")
_REBUILDERS: dict[tuple[str, str], Any] = {
    **{(module, "_reconstruct"): np.empty(0).__reduce__()[0] for module in _MULTIARRAY},
    **{(module, "scalar"): np.float64().__reduce__()[0] for module in _MULTIARRAY},
    **{(module, "_frombuffer"): np.empty(1).__reduce_ex__(5)[0] for module in _NUMERIC},
}
"""Functions of numpy that rebuild arrays and scalars, under the names of version 1 and 2."""

_HARMLESS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    *((function, ".".join(name)) for name, function in _REBUILDERS.items()),
    np.ndarray,
    np.dtype,
    *(type(np.dtype(kind)) for kind in ("f2", "f4", "f8", "i4", "i8", "bool")),
    # torchvision's training scripts keep their command line beside the weights.
    argparse.Namespace,
]
"""What torch reads beside its own tensors and plain values."""


class WeightsError(CheckpointError):
    """Weights cannot be read, or not be turned into a model of ours."""


def read_file(path: Path) -> Any:
    """What a torch file or a pickle of arrays holds.

    Raises:
        WeightsError: no such file, damaged, or asking for more than arrays and plain values.
    """
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise WeightsError(f"{path} {kind}; give a .pth or .pkl file of weights")
    try:
        with path.open("rb") as file:
            if file.read(16).startswith(_TORCH_SIGNATURES):
                with torch.serialization.safe_globals(_HARMLESS):
                    return torch.load(path, map_location="cpu", weights_only=True)
            file.seek(0)
            return _ArrayUnpickler(file).load()
    except _ForbiddenGlobalError as error:
        _refuse(path, str(error))
    except Exception as error:
        # torch names the class or function only in its advice on how to allow it.
        forbidden = re.search(r"GLOBAL (\S+) (?:was not an allowed|whose module)", str(error))
        if forbidden:
            _refuse(path, forbidden[1])
        raise WeightsError(
            f"{path} is damaged or holds no weights; give a .pth or .pkl file of torchvision, "
            "detectron2, maskrcnn-benchmark, Caffe2 or this program"
        ) from error


def _refuse(path: Path, name: str) -> NoReturn:
    raise WeightsError(
        f"{path} asks for {name}, which is not part of weights and could run code; save the "
        "tensors alone, as in torch.save(model.state_dict(), FILE)"
    ) from None


class _ForbiddenGlobalError(Exception):
    """A pickle names a class or function that arrays do not need."""


def _bytes_from_text(text: str, encoding: str) -> bytes:
    """What Python 2's pickles of arrays call under the name of `_codecs.encode`."""
    if codecs.lookup(encoding).name != "iso8859-1":
        raise ValueError(f"bytes encoded as {encoding}")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    **_REBUILDERS,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("collections", "OrderedDict"): OrderedDict,
    ("_codecs", "encode"): _bytes_from_text,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Reads numpy arrays and plain values, of Python 2 too, and nothing else."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="latin1")

    def find_class(self, module: str, name: str) -> Any:
        """The few functions that rebuild an array; asking for anything else is an error."""
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise _ForbiddenGlobalError(f"{module}.{name}") from None
