"""Bearer tokens in files, of the server as of its clients."""

import re
from pathlib import Path

from .errors import ServingError

_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")  # RFC 6750, section 2.1


def tokens_in(path: Path) -> list[str]:
    """The tokens of a file that has one a line, beside comments and empty lines.

    Raises:
        ServingError: the file cannot be read, holds something else, or no token.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ServingError(f"the tokens in {path} cannot be read: {error}") from None
    tokens = []
    for number, line in enumerate(lines, start=1):
        if not (token := line.partition("#")[0].strip()):
            continue
        if not _TOKEN.fullmatch(token):  # which is not shown, as it may be a mistyped one
            raise ServingError(
                f"line {number} of {path} is no token; one has letters, digits and -._~+/, and "
                "stands on a line of its own"
            )
        tokens.append(token)
    if not tokens:
        raise ServingError(f"{path} holds no token; write one a line, or name no such file")
    return tokens
