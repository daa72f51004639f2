"""Console for the tables that commands print."""

import os
import sys

from rich.console import Console

# Size in characters of the console if stdout is not a terminal. Rich can assume 80 columns then,
# and cut off the cells of wider tables. The height has no effect, but without it, Rich ignores the
# width if the environment variable TERM is "dumb".
_FILE_WIDTH, _FILE_HEIGHT = 240, 25


def table_console() -> Console:
    """Return a console that prints to stdout.

    On a terminal, lines are as wide as the terminal. Otherwise, they have up to 240 characters. The
    environment variable COLUMNS overrides both. Square brackets are printed as they are, because
    names of classes and files may contain them.
    """
    # stdout is None if the caller has closed it.
    if (sys.stdout and sys.stdout.isatty()) or os.environ.get("COLUMNS", "").isdigit():
        return Console(markup=False, emoji=False)
    return Console(markup=False, emoji=False, width=_FILE_WIDTH, height=_FILE_HEIGHT)
