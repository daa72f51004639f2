"""URLs in messages."""

import re
from pathlib import Path


def without_credentials(reference: str | Path) -> str:
    """Return a text with its URLs without `user:password@`, for example `weights=URL`."""
    return re.sub(r"(https?://)[^/?#\s]*@", r"\1", str(reference))
