"""Options of commands that connect to a server: address, TLS and token."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..config import check_address

if TYPE_CHECKING:
    from ..client import Credentials

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

TLS_OPTIONS = (
    click.option(
        "--tls/--no-tls", default=None,
        help="Use TLS. The options below imply --tls. With --no-tls the token is sent in plain "
        "text; use it if something else encrypts the connection, such as a service mesh.",
    ),
    click.option(
        "--root-certificate", type=_FILE,
        help="PEM of the CA that signed the server's certificate. Not needed for public CAs.",
    ),
    click.option("--certificate", type=_FILE, help="PEM of the client certificate."),
    click.option("--key", type=_FILE, help="PEM of the private key of --certificate."),
)  # fmt: skip
CREDENTIAL_OPTIONS = (
    *TLS_OPTIONS,
    click.option(
        "--token-file", type=_FILE,
        help="File with the bearer token for the server; # begins a comment.",
    ),
)  # fmt: skip


def checked_address(_: click.Context, __: click.Parameter, value: str) -> str:
    """Validate and return the address of a server. Callback of a click argument.

    Raises:
        click.BadParameter: the address is not valid.
    """
    try:
        check_address(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return value


def credentials_from_options(
    *,
    tls: bool | None,
    root_certificate: Path | None,
    certificate: Path | None,
    key: Path | None,
    token_file: Path | None = None,
) -> "Credentials":
    """Return the credentials that the command's options describe.

    `tls` states whether to use TLS. None: use it if a certificate, key or token file is given.

    Raises:
        click.UsageError: the options contradict each other, or the token file is not valid.
    """
    from ..client import Credentials

    files = (root_certificate, certificate, key)
    # Credentials imply TLS unless --no-tls is given.
    uses_tls = bool(token_file or any(files)) if tls is None else tls
    if (certificate is None) != (key is None):
        raise click.UsageError("--certificate and --key go together; give both or none")
    if any(files) and not uses_tls:
        raise click.UsageError("certificates require TLS; omit the certificates or --no-tls")
    root, own, private = (None if path is None else path.read_bytes() for path in files)
    token = None if token_file is None else _read_token(token_file)
    return Credentials(
        root_certificate=root, certificate=own, key=private, token=token, tls=uses_tls
    )


def _read_token(path: Path) -> str:
    from ..credential_files import read_tokens
    from ..errors import ServingError

    try:
        tokens = read_tokens(path)
    except ServingError as error:
        raise click.UsageError(str(error)) from None
    if len(tokens) > 1:
        raise click.UsageError(f"{path} holds {len(tokens)} tokens; keep only your own in the file")
    return tokens[0]
