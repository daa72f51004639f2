"""The verb `serve`."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from .serve_options import config_from_options, config_options, setting_sources


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@config_options
@click.option(
    "--doctor",
    is_flag=True,
    help="Tell what would be served here, with what and why, in place of serving; the exit code is "
    "1 where nothing would.",
)
def serve(bundle: Path, doctor: bool, **values: Any) -> None:
    """Serve BUNDLE over gRPC until SIGTERM or Ctrl+C, then finish the requests in progress.

    On SIGHUP the server loads BUNDLE anew, and serves it once it is warm.
    """
    import asyncio

    # Else gRPC writes lines of its own form for clients that break its rules.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from .monitoring.logs import configure_logs
    from .server import serve as serve_bundle

    config = config_from_options(values)
    if doctor:
        from .doctor import diagnose, show

        healthy = show(diagnose(bundle, config, setting_sources()))
        click.get_current_context().exit(0 if healthy else 1)
    configure_logs(config.log_format, config.log_level)
    asyncio.run(
        serve_bundle(bundle, config, lambda address: _say(f"Ready at {address}, serving {bundle}"))
    )


def _say(line: str) -> None:
    """Print a line; that nobody can read it is no reason to stop."""
    try:
        click.echo(line)
    except OSError:
        # What is left of it would fail again when the process exits, and make that a failure.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
