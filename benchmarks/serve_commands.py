"""The verb `maskrcnn bench serve`."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from ..model.option_types import FiniteRange
from ..serving.addresses import check_address
from ..serving.config import DAY_S
from ..serving.detections import MaskFormat
from .options import (
    POSITIVE,
    SECONDS,
    images_in_words,
    images_option,
    json_option,
    output_option,
    read_images,
    seconds_option,
)
from .serve_load import Arrivals

if TYPE_CHECKING:
    from ..serving.config import ServeConfig
    from .bulk import BulkResult
    from .serve import ServeSettings
    from .serve_results import ServeResult

_CONCURRENCIES = (1, 4, 16)


@click.command(context_settings={"show_default": True})
@click.argument("server")
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[-- OPTIONS]...")
@click.option(
    "--concurrency", "concurrencies", multiple=True, type=click.IntRange(min=1),
    help="Requests in flight, each followed by the next when it is answered; may be given several "
    f"times. The default is {', '.join(map(str, _CONCURRENCIES))}, but with --streamed or --rate "
    "alone none.",
)  # fmt: skip
@click.option(
    "--streamed", multiple=True, type=click.IntRange(min=1),
    help="Requests in flight over streams, one of each process, in place of a call for each image; "
    "may be given several times.",
)  # fmt: skip
@click.option(
    "--rate", "rates", multiple=True, type=POSITIVE,
    help="Images a second that come whether or not those before are answered; may be given "
    "several times.",
)  # fmt: skip
@click.option(
    "--load", "loads", multiple=True, type=POSITIVE,
    help="Such a rate as a share of the highest that --concurrency reached; may be given several "
    "times.",
)  # fmt: skip
@click.option(
    "--arrivals", type=click.Choice(get_args(Arrivals)), default="poisson",
    help="Whether images at a rate come at random or at equal distances.",
)  # fmt: skip
@images_option("noise")
@click.option(
    "--masks", type=click.Choice([form.value for form in MaskFormat]), default="rle",
    help="Form of the masks that are asked for.",
)  # fmt: skip
@seconds_option
@click.option(
    "--warmup", "warmup_seconds", type=FiniteRange(min=0, max=DAY_S), default=1.0,
    help="Seconds before each that are not counted.",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", type=SECONDS, default=30.0, help="Seconds to wait for an answer."
)
@click.option(
    "--processes", type=click.IntRange(min=1), default=1,
    help="Processes that send, each over a connection of its own.",
)  # fmt: skip
@click.option("--seed", type=int, default=0, help="Of the times at which images come.")
@click.option("--engine-rate", is_flag=True, help="Measure BUNDLE without a server first.")
@click.option(
    "--peer", type=click.Choice(["unbatched"]),
    help="Measure at --concurrency a server with batches of one, too.",
)  # fmt: skip
@json_option
@output_option("a page, pictures")
def serve(
    server: str,
    options: tuple[str, ...],
    sources: tuple[Path, ...],
    masks: str,
    engine_rate: bool,
    peer: str | None,
    json_path: Path | None,
    output: Path | None,
    **values: Any,
) -> None:
    """Measure a server with so many requests in flight, or at so many images a second.

    SERVER is the host:port of one that runs, or a bundle, for which one is started with OPTIONS,
    which are those of `maskrcnn serve` and stand behind `--`.
    """
    from .report import show
    from .serve import NOISE, ServeSettings, measure_server
    from .serve_report import ServeReport, serve_table

    images = read_images(sources)
    settings = ServeSettings(
        images=images,
        masks=MaskFormat(masks),
        **_with_levels(values),
    )
    bundle = Path(server)
    if bundle.is_dir():
        config = _config_from_words(bundle, options)
        bulk = _measure_bulk(bundle, config, settings) if engine_rate else None
        if peer and config.max_batch == 1:
            raise click.UsageError("--peer unbatched needs a server with larger batches")
        results = _measure_servers(bundle, settings, options, with_unbatched=peer is not None)
        report = ServeReport(results, max_delay_ms=config.max_delay_ms, bulk=bulk)
    elif options or engine_rate or peer:
        raise click.UsageError(f"{server} is no bundle, of which a server could be started")
    else:
        _check_server(server)
        report = ServeReport(_told(measure_server(server, settings)))
    show(report, serve_table(report.results), json_path)
    if output is not None:
        from .serve_record import write_record

        what = images_in_words(images, sources, NOISE)
        click.echo(f"the record is {write_record(report, what, output)}")


def _check_server(server: str) -> None:
    try:
        check_address(server)
    except ValueError as error:
        raise click.UsageError(f"{server} is no bundle, and {error}") from None


def _with_levels(values: dict[str, Any]) -> dict[str, Any]:
    """Values with the default concurrencies where these are wanted and none are given."""
    others = values["rates"] or values["streamed"]
    if not values["concurrencies"] and (values["loads"] or not others):
        return values | {"concurrencies": _CONCURRENCIES}
    return values


def _config_from_words(bundle: Path, words: Sequence[str]) -> "ServeConfig":
    """The configuration of a server that is started with words.

    Raises:
        click.UsageError: there is no such option, or a value is not allowed.
    """
    from ..serving.config import ServeConfig
    from ..serving.serve_command import serve as command
    from ..serving.serve_options import config_from_options

    with command.make_context("maskrcnn serve", [str(bundle), *words]) as context:
        return config_from_options(
            {name: context.params[name] for name in ServeConfig.model_fields}
        )


def _measure_bulk(bundle: Path, config: "ServeConfig", settings: "ServeSettings") -> "BulkResult":
    """What the backend computes without a server, in a process that then gives its memory back."""
    from .bulk import BulkSettings, measure_bulk
    from .processes import answers_from_process

    bulk_settings = BulkSettings(
        precision=next(iter(config.precision), None),
        backend=config.backend,
        batches=(config.max_batch,),
        images=settings.encoded_images(),
        seconds=settings.seconds,
    )
    (result,) = answers_from_process(measure_bulk, bundle, bulk_settings)
    click.echo(
        f"without a server: {result.images_per_second:.1f} images/s, the engine alone "
        f"{result.engine_images_per_second:.1f}",
        err=True,
    )
    return result


def _measure_servers(
    bundle: Path, settings: "ServeSettings", options: Sequence[str], *, with_unbatched: bool
) -> "list[ServeResult]":
    from .serve import measure_bundle

    results = _told(measure_bundle(bundle, settings, options))
    if with_unbatched:
        closed = dataclasses.replace(settings, rates=(), loads=())
        results += _told(measure_bundle(bundle, closed, (*options, "--max-batch", "1")))
    return results


def _told(results: "Iterable[ServeResult]") -> "list[ServeResult]":
    """All results, each said when it comes."""
    from .serve_report import result_sentence

    told = []
    for result in results:
        click.echo(result_sentence(result), err=True)
        told.append(result)
    return told
