"""Local paths of weights files that are given by path, URL or name of a published model.

Downloaded files are kept in the user's cache folder. This module does not import torch.
"""

import functools
import hashlib
import os
import re
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from ...plugins.runtime.user_cache import cache_folder
from ..download.checksums import Checksum, read_checksums
from ..download.local_files import DownloadError
from ..download.progress import ByteProgress, no_progress
from ..download.urls import without_credentials
from .zoo import HOSTS, is_zoo_name, zoo_model

# Name of detectron2's configuration file, which its training writes beside the weights.
CONFIG_NAME: Final = "config.yaml"
# Environment variable with the URL of a mirror, such as `http://localhost:8000`. The mirror
# replaces the hosts of the model zoos, and has the files at the same paths.
MIRROR_VARIABLE: Final = "MASKRCNN_ZOO_MIRROR"
# Environment variable with the path of a file in the format of `sha256sum` or `md5sum`. For a
# mirror with other files, the checksums in this file replace those of the published files.
CHECKSUMS_VARIABLE: Final = "MASKRCNN_ZOO_CHECKSUMS"
# Number of retries, after pauses of 1, 2 and 4 s. It is low, so that a missing network is reported
# soon.
_RETRIES: Final = 3


def is_url(reference: str | Path) -> bool:
    """Whether a model reference is an http(s) URL."""
    return re.match("https?://", str(reference)) is not None


def base_config(path: Path, content: object) -> Path | None:
    """Return the base file (key `_BASE_`) of a detectron2 configuration. None: it has no base file.

    Args:
        path: The configuration file.
        content: The parsed content of this file.
    """
    base = content.get("_BASE_") if isinstance(content, Mapping) else None
    return path.parent / base if isinstance(base, str) else None


def weights_path(reference: str | Path) -> Path:
    """Return the path of a weights file. Download it into the cache folder if necessary.

    Args:
        reference: Path, http(s) URL, or name of a published model such as
            `detectron2:mask_rcnn_R_50_FPN_3x`.

    Raises:
        ZooError: No published model has this name, or this program does not support the model.
        DownloadError: The URL is invalid, the download failed, or the file has another checksum.
    """
    if is_zoo_name(reference):
        model = zoo_model(str(reference))
        path = _cached(model.file_name)
        if not path.exists():
            sizes = f"test size {model.min_size} pixels, longer side at most {model.max_size}"
            _print(f"{model}: {model.dataset}, {sizes}; licence: {model.licence}")
        _download(model.url, path, model.checksum)
        return path
    if is_url(reference):
        url = str(reference)
        try:
            name = PurePosixPath(urlsplit(url).path).name
        except ValueError as error:
            raise DownloadError(
                f"{without_credentials(url)} is not a valid URL ({error}); correct it, as in "
                "https://HOST/model.pth"
            ) from None
        # The name may contain the first digits of the SHA-256, as in `resnet50-0676ba61.pth`.
        # Eight digits are not a checksum if they are a date, as in `model-20260131.pth`.
        digits = re.search(r"-(?!20\d\d[01]\d[0-3]\d\.)([0-9a-f]{8,64})\.", name)
        checksum = Checksum("sha256", digits[1]) if digits else None
        if checksum is None:
            # Many URLs end in model_final.pth, so the hash of the URL makes the name unique.
            name = f"{hashlib.sha256(url.encode()).hexdigest()[:8]}-{name}"
        _download(url, _cached(name), checksum)
        return _cached(name)
    return Path(reference)


def mirror_checksums() -> dict[str, Checksum]:
    """Return the user's checksums of weights files, by file name.

    They take precedence over the checksums of published models. The environment variable
    `MASKRCNN_ZOO_CHECKSUMS` is the path of the file that lists them. If the variable is not set,
    the dictionary is empty.

    Raises:
        DownloadError: The file with the checksums cannot be read, or is not in the format of
            `sha256sum` or `md5sum`.
    """
    path = os.environ.get(CHECKSUMS_VARIABLE)
    try:
        return read_checksums(Path(path)) if path else {}
    except (OSError, ValueError) as error:
        raise DownloadError(f"{CHECKSUMS_VARIABLE}: {error}") from None


def _cached(name: str) -> Path:
    return cache_folder("weights") / name


def _download(url: str, path: Path, checksum: Checksum | None) -> None:
    """Download `url` to `path` in the cache, unless the file exists. Check the file's checksum.

    A checksum that the user gives (`mirror_checksums`) takes precedence over `checksum`. If there
    is neither, the content is not checked.
    """
    # Imported here because most commands do not download anything.
    from ..download.http_download import Remedies, RetryPolicy, download_file

    address = _mirrored(url)
    checksum = mirror_checksums().get(PurePosixPath(urlsplit(url).path).name, checksum)
    remedies = Remedies(
        other_source=f"download {without_credentials(url)} yourself and save it as {path}, or set "
        f"{MIRROR_VARIABLE} to the URL of a mirror",
        trust=f"list its checksum in a file in the format of sha256sum, and set "
        f"{CHECKSUMS_VARIABLE} to the path of that file",
    )
    exists = path.exists()
    if not exists:
        path.parent.mkdir(parents=True, exist_ok=True)
        _print(f"downloading {without_credentials(address)} to {path}")
    elif checksum is None:
        _print_once(
            f"using {path}, an earlier download of {without_credentials(address)}; delete it to "
            "download the file again"
        )
    with nullcontext(no_progress) if exists else _bars() as show:
        download_file(
            address,
            path,
            checksum=checksum,
            remedies=remedies,
            policy=RetryPolicy(retries=_RETRIES),
            # All ranks of a training start at the same time: one downloads, the others wait.
            wait=True,
            on_progress=show,
        )


def _mirrored(url: str) -> str:
    """Replace the host of a model zoo's URL with the mirror in `MASKRCNN_ZOO_MIRROR`.

    If this environment variable is not set, or `url` is on another host, return `url` unchanged.

    Raises:
        DownloadError: The value of the environment variable is not an http(s) URL.
    """
    mirror = os.environ.get(MIRROR_VARIABLE)
    parts = urlsplit(url)
    if not mirror or f"{parts.scheme}://{parts.netloc}" not in HOSTS.values():
        return url
    if not is_url(mirror):
        raise DownloadError(
            f"{MIRROR_VARIABLE}={mirror} does not begin with http:// or https://; set it to a URL "
            "such as http://localhost:8000"
        )
    return mirror.rstrip("/") + urlunsplit(parts._replace(scheme="", netloc=""))


def _bars() -> AbstractContextManager[ByteProgress]:
    """Return a context manager that yields a progress callback.

    The callback draws progress bars on standard error. If standard error is not a terminal, the
    callback does nothing.
    """
    if not sys.stderr.isatty():
        return nullcontext(no_progress)
    from ..download.progress_bars import progress_bars

    return progress_bars()


# Some commands read the same weights twice.
@functools.cache
def _print_once(line: str) -> None:
    """Print a line to standard error, unless this process has printed it already."""
    _print(line)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
