"""Where weights come from: files, addresses that are downloaded once, and torchvision's names."""

import hashlib
import re
import sys
from pathlib import Path
from urllib.parse import urlparse

import torch
from filelock import FileLock
from torchvision.models import get_weight

from .files import WeightsError


def local_path(source: str | Path) -> Path:
    """Path of a file, or of the copy in torch.hub's cache of what is to be downloaded.

    Args:
        source: a file, an http(s) address, or a name that torchvision has for weights of its own,
            as in `ResNet50_Weights.IMAGENET1K_V1`.

    Raises:
        WeightsError: torchvision has no such weights, or the download failed.
    """
    text = str(source)
    if re.match("https?://", text):
        return _downloaded(text)
    if re.fullmatch(r"\w+_Weights\.\w+", text):
        try:
            return _downloaded(get_weight(text).url)
        except (KeyError, ValueError, AttributeError):
            raise WeightsError(
                f"torchvision has no weights {text}; names are those of its documentation, as in "
                "ResNet50_Weights.IMAGENET1K_V1"
            ) from None
    return Path(source)


def _downloaded(url: str) -> Path:
    """A hash in the name, as in `resnet50-0676ba61.pth`, is checked."""
    name = Path(urlparse(url).path).name
    digest = re.search(r"-([0-9a-f]{8,})\.", name)
    if digest is None:
        # Many addresses end in model_final.pth.
        name = f"{hashlib.sha256(url.encode()).hexdigest()[:8]}-{name}"
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    # The processes of one machine start together, and one download serves them all.
    with FileLock(path.with_name(f".{name}.lock")):
        if not path.is_file():
            try:
                torch.hub.download_url_to_file(
                    url, str(path), digest and digest[1], progress=sys.stderr.isatty()
                )
            except (OSError, RuntimeError) as error:
                raise WeightsError(
                    f"{url} could not be downloaded ({error}); download it by hand and give the "
                    "file"
                ) from None
    return path
