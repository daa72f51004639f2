"""Removal of user names and passwords from URLs in messages."""

import re
from pathlib import Path


def without_credentials(text: str | Path) -> str:
    """Return a text without the `user:password@` of its HTTP URLs.

    For example, `weights=https://user:password@host/x` becomes `weights=https://host/x`.
    """
    return re.sub(r"(https?://)[^/?#\s]*@", r"\1", str(text), flags=re.IGNORECASE)
