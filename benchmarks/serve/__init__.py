"""`maskrcnn bench serve`: throughput and latency of a server under load."""

import dataclasses
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from ...model.config.option_types import FiniteRange
from ...serving.commands.options import (
    CREDENTIAL_OPTIONS,
    bundle_for_backend,
    credentials_from_options,
    options_of,
)
from ...serving.config import DAY_S, check_address
from ...serving.detections import MaskFormat
from ..common.images import describe_images, images_option, read_images
from ..common.record import json_option, output_option, publish
from ..common.timing import SECONDS, seconds_option
from .load import Arrivals

if TYPE_CHECKING:
    from ...serving.config import ServeConfig
    from ..bulk.measure import BulkResult
    from .measure import ServeSettings

_CONCURRENCIES = (1, 4, 16)


class _ServeBenchmark(click.Command):
    """Command that rejects a server option before `--`, and says to write it after `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            # Imported here because --help does not need the server's settings.
            from ...serving.commands.serve import serve as server_command

            if any(error.option_name in option.opts for option in server_command.params):
                raise click.UsageError(
                    f"{error.option_name} is an option of `maskrcnn serve`; write it after --", ctx
                ) from None
            raise


@click.command(cls=_ServeBenchmark, context_settings={"show_default": True})
@click.argument("server")
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[-- OPTIONS]...")
@click.option(
    "--concurrency", "concurrencies", multiple=True, type=click.IntRange(min=1),
    help="Number of clients. Each sends its next image when its previous one is answered. "
    f"Repeatable. Default: {', '.join(map(str, _CONCURRENCIES))}; none if only --streamed, --http "
    "or --rate is given.",
)  # fmt: skip
@click.option(
    "--streamed", multiple=True, type=click.IntRange(min=1),
    help="Number of clients whose requests share one gRPC stream per client process, instead of "
    "being unary calls. Repeatable.",
)  # fmt: skip
@click.option(
    "--http", multiple=True, type=click.IntRange(min=1),
    help="Number of clients over HTTP, each with its own connection. The same number of clients "
    "over gRPC is measured just before. Repeatable. Needs a model as SERVER.",
)  # fmt: skip
@click.option(
    "--rate", "rates", multiple=True, type=FiniteRange(min=0, min_open=True, max=100_000),
    help="Images per second, sent whether or not previous ones are answered. Repeatable.",
)  # fmt: skip
@click.option(
    "--load", "loads", multiple=True, type=FiniteRange(min=0, min_open=True, max=100),
    help="Rate as a fraction of the highest throughput at --concurrency. Repeatable.",
)  # fmt: skip
@click.option(
    "--arrivals", type=click.Choice(get_args(Arrivals)), default="poisson",
    help="Arrival times at --rate and --load: random, or at equal intervals.",
)  # fmt: skip
@images_option("noise")
@click.option(
    "--masks", type=click.Choice([form.value for form in MaskFormat]), default="rle",
    help="Requested format of the masks.",
)  # fmt: skip
@seconds_option
@click.option(
    "--warmup", "warmup_seconds", type=FiniteRange(min=0, max=DAY_S), default=1.0,
    help="Seconds before each measurement in which requests are sent but not counted.",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", type=SECONDS, default=30.0, help="Deadline of a request in seconds."
)
@click.option(
    "--processes", type=click.IntRange(min=1), default=1,
    help="Number of client processes, each with its own connection.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, help="Seed of the random arrival times."
)
@click.option("--engine-rate", is_flag=True, help="First measure the bundle without a server.")
@click.option(
    "--peer", type=click.Choice(["unbatched"]),
    help="Baseline: also measure a server without batching (--max-batch 1), with the same numbers "
    "of gRPC clients.",
)  # fmt: skip
@json_option
@output_option("a page, plots")
@options_of(*CREDENTIAL_OPTIONS)
def serve(
    server: str,
    options: tuple[str, ...],
    sources: tuple[Path, ...],
    masks: str,
    engine_rate: bool,
    peer: str | None,
    json_path: Path | None,
    output: Path | None,
    tls: bool | None,
    root_certificate: Path | None,
    certificate: Path | None,
    key: Path | None,
    token_file: Path | None,
    **values: Any,
) -> None:
    """Measure a server at given numbers of requests in flight, or at given rates.

    SERVER is the host:port of a running server, or a model: a bundle, a checkpoint or a name that
    `maskrcnn weights list` prints. For a model, a server is started. OPTIONS, after `--`, are
    options of `maskrcnn serve` for this server. If the server has TLS or tokens, give the clients'
    certificates and token before `--`.
    """
    from ...model.weights.zoo import is_zoo_name
    from .measure import NOISE, ServeSettings, measure_bundle, measure_server
    from .record import describe_result, serve_record

    images = read_images(sources)
    credentials = credentials_from_options(
        tls=tls,
        root_certificate=root_certificate,
        certificate=certificate,
        key=key,
        token_file=token_file,
    )
    settings = ServeSettings(
        images=images,
        masks=MaskFormat(masks),
        credentials=credentials,
        **_with_defaults(values),
    )
    if settings.http and (credentials.tls or credentials.token):
        raise click.UsageError(
            "--http supports neither TLS nor tokens; leave out --http, or the certificates and the "
            "token"
        )
    if settings.http and settings.masks is MaskFormat.PROBABILITIES:
        raise click.UsageError(
            "the HTTP API does not support --masks probabilities; choose another mask format, or "
            "leave out --http"
        )
    max_delay_ms, bulk = None, None
    if is_zoo_name(server) or Path(server).exists():
        config = _parse_serve_options(server, options)
        bundle = bundle_for_backend(server, config.backend, config.precision)
        bulk = _measure_bulk(bundle, config, settings) if engine_rate else None
        if peer and config.max_batch == 1:
            raise click.UsageError(
                "--peer unbatched compares the server with one of --max-batch 1, but the server "
                "has --max-batch 1 itself; raise --max-batch"
            )
        measured = measure_bundle(bundle, settings, options)
        if peer:
            closed = dataclasses.replace(
                settings, concurrencies=settings.grpc_clients(), http=(), rates=(), loads=()
            )
            unbatched = (*options, "--max-batch", "1")
            measured = chain(measured, measure_bundle(bundle, closed, unbatched))
        max_delay_ms = config.max_delay_ms
    elif options or engine_rate or peer or settings.http:
        raise click.UsageError(
            "OPTIONS, --engine-rate, --http and --peer need a model as SERVER; "
            f"{server} is not a bundle, a checkpoint or a name of `maskrcnn weights list`"
        )
    else:
        try:
            check_address(server)
        except ValueError as error:
            raise click.UsageError(f"{server} is not a bundle, and {error}") from None
        measured = measure_server(server, settings)
    results = []
    try:
        for result in measured:
            click.echo(describe_result(result), err=True)
            results.append(result)
    finally:  # if an error or Ctrl+C ends the benchmark, keep the results so far
        if results:
            description = describe_images(images, sources, NOISE)
            publish(serve_record(results, description, max_delay_ms, bulk), json_path, output)


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Return option values, with a default for --concurrency if it is needed but not given.

    --concurrency is needed in two cases:

    - --load is given, because --load is a fraction of the throughput at --concurrency.
    - --rate, --streamed and --http are all missing, because then no other option sets the load.
    """
    others = values["rates"] or values["streamed"] or values["http"]
    if not values["concurrencies"] and (values["loads"] or not others):
        return values | {"concurrencies": _CONCURRENCIES}
    return values


def _parse_serve_options(model: str, options: Sequence[str]) -> "ServeConfig":
    """Parse options of `maskrcnn serve`, and return the server configuration.

    Raises:
        click.UsageError: an option is invalid.
    """
    from ...serving.commands.serve import config_from_options, serve
    from ...serving.config import ServeConfig

    with serve.make_context("maskrcnn serve", [model, *options]) as context:
        return config_from_options(
            {name: context.params[name] for name in ServeConfig.model_fields}
        )


def _measure_bulk(bundle: Path, config: "ServeConfig", settings: "ServeSettings") -> "BulkResult":
    """Measure bulk prediction with a bundle, without a server, in a new process.

    Precision, backend and maximum batch size are those of the server configuration `config`.
    """
    from ..bulk.measure import BulkSettings, measure_bulk
    from ..common.processes import iterate_in_process

    bulk_settings = BulkSettings(
        precision=next(iter(config.precision), None),
        backend=config.backend,
        batches=(config.max_batch,),
        images=settings.encoded_images(),
        seconds=settings.seconds,
    )
    (result,) = iterate_in_process(measure_bulk, bundle, bulk_settings)
    click.echo(
        "without a server, bulk prediction from encoded images to masks processes "
        f"{result.images_per_second:.1f} images/s, and the engine alone processes "
        f"{result.engine_images_per_second:.1f} images/s",
        err=True,
    )
    return result
