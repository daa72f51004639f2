"""Plot the losses, learning rate and average precision of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from ..model.losses import LOSS_NAMES
from .reporting import METRICS_FILE, metrics_from_line

CURVES_FILE = "curves.png"
# Names of the metrics in each plot, by title of the plot.
_PLOTS: Mapping[str, Sequence[str]] = {
    "losses": ("loss", *LOSS_NAMES, "val/loss"),
    "learning rate": ("lr",),
    "average precision": ("bbox/AP", "bbox/AP50", "segm/AP", "segm/AP50"),
}


def draw_curves(folder: Path) -> Path:
    """Plot losses, learning rate and AP from `folder/metrics.jsonl` over the iterations.

    Return the path of the PNG file, `folder/curves.png`.
    """
    metrics = folder / METRICS_FILE
    # The file is missing if only the final checkpoint of a run was copied.
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    # Skip damaged lines, which a run writes if the disk is full.
    entries = [values for line in lines if (values := metrics_from_line(line))]
    figure = Figure(figsize=(5 * len(_PLOTS), 4), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(1, len(_PLOTS)), _PLOTS.items(), strict=True):
        for name in names:
            points = [(entry["iteration"], entry[name]) for entry in entries if name in entry]
            if points:
                # Draw markers too, because a line through a single evaluation is invisible.
                axes.plot(*zip(*points, strict=True), marker=".", label=name)
        axes.set(title=title, xlabel="iteration", ylim=(0, None))
        if axes.lines:
            axes.legend(fontsize=7)
    figure.savefig(folder / CURVES_FILE, format="png", dpi=100)
    return folder / CURVES_FILE
