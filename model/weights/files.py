"""Reading of weights files, without running code from them."""

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
from torchvision.models import get_weight

from ..checkpoint import CheckpointError, load_tensors, unreadable_file_message
from .downloads import weights_path

# First bytes of torch files: those of a zip archive, or the magic number before torch 1.6.
_TORCH_SIGNATURES = (b"PK\x03\x04", b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19")
_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMERIC = ("numpy.core.numeric", "numpy._core.numeric")
# Functions that rebuild NumPy arrays and scalars, under their names in NumPy 1 and 2.
_REBUILDERS: dict[tuple[str, str], Any] = {
    **{(module, "_reconstruct"): np.empty(0).__reduce__()[0] for module in _MULTIARRAY},
    **{(module, "scalar"): np.float64().__reduce__()[0] for module in _MULTIARRAY},
    **{(module, "_frombuffer"): np.empty(1).__reduce_ex__(5)[0] for module in _NUMERIC},
}

# Types that `torch.load` may construct, in addition to tensors and plain values.
_SAFE_GLOBALS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    *((function, ".".join(name)) for name, function in _REBUILDERS.items()),
    np.ndarray,
    np.dtype,
    *(type(np.dtype(kind)) for kind in ("f2", "f4", "f8", "i4", "i8", "bool")),
    # torchvision's training scripts save their command line beside the weights.
    argparse.Namespace,
]


class WeightsError(CheckpointError):
    """Weights cannot be read or converted, or do not fit the model."""


def local_path(source: str | Path) -> Path:
    """Return the path of a weights file. Download it into the cache folder if necessary.

    Args:
        source: path, http(s) URL, name of a published model such as
            `detectron2:mask_rcnn_R_50_FPN_3x`, or torchvision's name of its weights, such as
            `ResNet50_Weights.IMAGENET1K_V1`.

    Raises:
        WeightsError: torchvision has no weights of this name.
        ZooError: no published model has this name, or this program does not support the model.
        DownloadError: the download failed, or the file has another checksum.
    """
    text = str(source)
    # A local file may have such a name too, as in `My_Weights.pth`.
    if not re.fullmatch(r"\w+_Weights\.\w+", text) or Path(text).is_file():
        return weights_path(source)
    try:
        return weights_path(get_weight(text).url)
    except (KeyError, ValueError, AttributeError):
        raise WeightsError(
            f"torchvision has no weights {text}; use a name from its documentation, such as "
            "ResNet50_Weights.IMAGENET1K_V1"
        ) from None


def read_file(path: Path) -> Any:
    """Read a torch file or a pickle of arrays without running code from it.

    Raises:
        WeightsError: the file is missing, unreadable or damaged, or holds other objects than arrays
            and plain values.
    """
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise WeightsError(
            f"{path} {kind}; give a .pth or .pkl file of weights, or a name of "
            "`maskrcnn weights list`"
        )
    try:
        with path.open("rb") as file:
            if file.read(16).startswith(_TORCH_SIGNATURES):
                with torch.serialization.safe_globals(_SAFE_GLOBALS):
                    return load_tensors(path)
            file.seek(0)
            return _ArrayUnpickler(file).load()
    except _ForbiddenGlobalError as error:
        _reject(path, str(error))
    except CheckpointError as error:
        raise WeightsError(str(error)) from None
    except OSError as error:
        raise WeightsError(unreadable_file_message(path, error)) from error
    except Exception as error:
        # torch reports the name of a forbidden global only inside its advice on how to allow it.
        forbidden = re.search(r"GLOBAL (\S+) (?:was not an allowed|whose module)", str(error))
        if forbidden:
            _reject(path, forbidden[1])
        raise WeightsError(
            f"{path} is damaged or holds no weights; give a .pth or .pkl file of torchvision, "
            "detectron2, maskrcnn-benchmark, Caffe2 or this program"
        ) from error


def _reject(path: Path, name: str) -> NoReturn:
    raise WeightsError(
        f"loading {path} would call {name}, a function that weights do not need and that could run "
        "any code; save the tensors alone, as in torch.save(model.state_dict(), FILE)"
    ) from None


class _ForbiddenGlobalError(Exception):
    """A pickle refers to a class or function that is not needed to rebuild arrays."""


def _encode_latin1(text: str, encoding: str) -> bytes:
    """Encode text as Latin-1, in place of `_codecs.encode`.

    Pickles of arrays with protocol 2 or lower call `_codecs.encode` to restore bytes.

    Raises:
        ValueError: the encoding is not Latin-1, the only one that pickled arrays use.
    """
    if codecs.lookup(encoding).name != "iso8859-1":
        raise ValueError(f"the pickle encodes bytes as {encoding}, not as Latin-1")
    return text.encode("latin1")


_ALLOWED_GLOBALS: dict[tuple[str, str], Any] = {
    **_REBUILDERS,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("collections", "OrderedDict"): OrderedDict,
    ("_codecs", "encode"): _encode_latin1,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler limited to NumPy arrays and plain values. Pickles of Python 2 can be read, too."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="latin1")

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class or function. Any other raises `_ForbiddenGlobalError`."""
        try:
            return _ALLOWED_GLOBALS[module, name]
        except KeyError:
            raise _ForbiddenGlobalError(f"{module}.{name}") from None
