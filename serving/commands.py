"""The verb `serve`."""

from pathlib import Path
from typing import Any

import click

from .serve_options import config_from_options, config_options


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@config_options
def serve(bundle: Path, **values: Any) -> None:
    """Serve BUNDLE over gRPC until SIGTERM or Ctrl+C, then finish the requests in progress.

    On SIGHUP the server loads BUNDLE anew, and serves it once it is warm.
    """
    import asyncio
    import logging

    from .server import serve as serve_bundle

    config = config_from_options(values)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger(__package__).setLevel(logging.INFO)
    asyncio.run(
        serve_bundle(
            bundle, config, lambda address: click.echo(f"Ready at {address}, serving {bundle}")
        )
    )
