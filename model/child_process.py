"""Command lines of child processes that run a Python module."""

import sys
from pathlib import Path


def module_command(module: str) -> list[str]:
    """Return the command line `python -m MODULE`. The caller appends the module's arguments.

    The child process imports from the current folder only if this process does.
    """
    # `python -m` puts the current folder first on the module search path, but the command
    # `maskrcnn` does not. If the folder is on that path, a user's file such as `profile.py`
    # replaces the standard library's module of the same name.
    imports_from_here = sys.path[0] in ("", str(Path.cwd()))
    return [sys.executable, *([] if imports_from_here else ["-P"]), "-m", module]
