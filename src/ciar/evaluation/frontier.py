"""Draws the frontier: what settings cost against what they lose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ciar.errors import DataError


class Point(NamedTuple):
    """One setting.

    Attributes:
        label: written beside the point.
        cost: cloud passes a token.
        loss: relative change of the Frechet distance against plain AR.
        low, high: interval of the loss.
    """

    label: str
    cost: float
    loss: float
    low: float
    high: float


def draw_frontier(points: Sequence[Point], out: Path, title: str) -> None:
    """Writes the plot as PNG: one point a setting, quality loss against cloud passes.

    Raises:
        DataError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise DataError("A plot needs matplotlib. Install it with: pip install 'ciar[train]'.") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(9, 6))
    for point in points:
        # An interval of a bootstrap need not hold its own figure.
        error = [[100 * max(0.0, point.loss - point.low)], [100 * max(0.0, point.high - point.loss)]]
        panel.errorbar([100 * point.cost], [100 * point.loss], yerr=error, fmt="o", capsize=2)
        panel.annotate(
            point.label, (100 * point.cost, 100 * point.loss), xytext=(5, 5), textcoords="offset points"
        )
    panel.axhline(0.0, color="grey", linewidth=0.8)
    panel.set(title=title, xlabel="cloud passes, % of the tokens", ylabel="change of the Frechet distance, %")
    panel.set_xlim(left=0)
    panel.grid(alpha=0.3)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=100, format="png")
    pyplot.close(figure)
