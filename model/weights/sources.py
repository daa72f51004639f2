"""Where weights come from: files, and addresses that are downloaded once."""

import re
import sys
from pathlib import Path
from urllib.parse import urlparse

import torch

from .files import WeightsError


def local_path(source: str | Path) -> Path:
    """Path of a file, or of the copy in torch.hub's cache of what is at an http(s) address.

    A hash in the name, as in `resnet50-0676ba61.pth`, is checked when the file is downloaded.

    Raises:
        WeightsError: the download failed, or the hash differs.
    """
    url = str(source)
    if not re.match("https?://", url):
        return Path(source)
    name = Path(urlparse(url).path).name
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = re.search(r"-([0-9a-f]{8,})\.", name)
    try:
        torch.hub.download_url_to_file(
            url, str(path), digest[1] if digest else None, progress=sys.stderr.isatty()
        )
    except (OSError, RuntimeError) as error:
        raise WeightsError(
            f"{url} could not be downloaded ({error}); download it by hand and give the file"
        ) from None
    return path
