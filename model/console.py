"""Console for the tables that commands print."""

import os
import sys

from rich.console import Console

# Width in characters of tables that are not written to a terminal. Rich would assume 80, and cut
# off the cells of wider tables.
_FILE_WIDTH = 240


def table_console() -> Console:
    """Return a console that prints to stdout.

    Square brackets are printed as they are, because names of classes and files may contain them.
    """
    is_file = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(markup=False, emoji=False, width=_FILE_WIDTH if is_file else None)
