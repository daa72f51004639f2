"""URLs in messages."""

import re
from pathlib import Path


def without_credentials(reference: str | Path) -> str:
    """Return a URL without `user:password@`. Other references, such as paths, do not change."""
    return re.sub(r"^(https?://)[^/?#]*@", r"\1", str(reference))
