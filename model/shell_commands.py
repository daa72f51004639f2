"""Quoting of paths in the shell commands that messages suggest."""

import shlex
from pathlib import Path


def shell_path(path: Path) -> str:
    """Return a path quoted for a shell. If it begins with a dash, `./` precedes it."""
    # Without `./`, commands would read `-folder` as options.
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)
