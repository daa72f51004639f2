"""Plots of the serving benchmark."""

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..bulk.measure import BulkResult
from ..common.record import PlotGrid
from .load import ClosedLoop, OpenLoop
from .results import STAGES, ServeResult, closed_loops, load_name, own_results

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def serve_plots(results: Sequence[ServeResult], bulk: BulkResult | None) -> PlotGrid:
    """Return the plots of throughput, latency and stages. `bulk` is that of `serve_record`."""
    own = own_results(results)
    closed, streamed = (closed_loops(own, streamed=streamed) for streamed in (False, True))
    opened = [r for r in own if isinstance(r.load, OpenLoop)]
    plots = []
    if closed or streamed:
        plots.append(partial(_plot_throughput, results=results, bulk=bulk))
    plots += [partial(_plot_latency, results=rows) for rows in (closed, opened) if rows]
    plots.append(partial(_plot_times, results=own))
    return PlotGrid(alt="Throughput, latency and stages", plots=plots, columns=2, size=(6, 4.5))


def _plot_throughput(axes: "Axes", results: Sequence[ServeResult], bulk: BulkResult | None) -> None:
    for size in dict.fromkeys(r.max_batch for r in results):
        same_size = [r for r in results if r.max_batch == size]
        for streamed in (False, True):
            if curve := closed_loops(same_size, streamed=streamed):
                rates = [r.images_per_second for r in curve]
                label = f"batches up to {size}{', over streams' if streamed else ''}"
                axes.plot(_ticks(curve), rates, "o-", label=label)
    if bulk is not None:
        axes.axhline(bulk.engine_images_per_second, color="black", label="the engine, alone")
    axes.set(xlabel="clients", ylabel="images per second", title="Throughput", ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3)


def _plot_latency(axes: "Axes", results: Sequence[ServeResult]) -> None:
    closed = isinstance(results[0].load, ClosedLoop)
    loads = _ticks(results)
    for name in ("p50", "p90", "p95", "p99"):
        axes.plot(loads, [getattr(r.latency, name) for r in results], "o-", label=name)
    if any(r.refusals for r in results):
        slowest = [max((f.latency.p99 for f in r.refusals), default=math.nan) for r in results]
        axes.plot(loads, slowest, "kx", label="p99 of refusals")
    axes.set_yscale("log")
    axes.set(xlabel="clients" if closed else "images per second, offered", ylabel="ms")
    axes.set_title("Latency of clients" if closed else "Latency at a given rate")
    axes.legend()
    axes.grid(alpha=0.3, which="both")


def _plot_times(axes: "Axes", results: Sequence[ServeResult]) -> None:
    labels = [load_name(r.load) for r in results]
    ends = [0.0] * len(results)
    for name in STAGES:
        shares = [getattr(r.times, name) / r.latency.mean for r in results]
        axes.barh(labels, shares, left=ends, height=0.6, label=name)
        ends = [end + share for end, share in zip(ends, shares, strict=True)]
    axes.invert_yaxis()  # the first load on top
    axes.set(xlabel="fraction of the mean latency", title="Time of a request", xlim=(0, 1))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=5)


def _ticks(results: Sequence[ServeResult]) -> list[str]:
    """Return one tick label per result: the load's number of clients or images per second."""
    loads = [r.load for r in results]
    return [f"{o.rate:.1f}" if isinstance(o, OpenLoop) else f"{o.clients}" for o in loads]
