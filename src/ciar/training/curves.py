"""Draws the curves of training runs from their logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ciar.errors import DataError
from ciar.training.loop import read_log


def draw_curves(runs: Mapping[str, Path], out: Path, figures: Sequence[str] = ("loss", "held_loss")) -> None:
    """One panel a run: the chosen figures against the step, as PNG.

    Args:
        runs: title and run folder of each panel.
        out: the picture to write.
        figures: which figures; those that a log lacks are left out.

    Raises:
        DataError: matplotlib is not installed, or a run has no log.
    """
    try:
        import matplotlib
    except ImportError:
        raise DataError("Curves need matplotlib. Install it with: pip install 'ciar[train]'.") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(runs), figsize=(4.5 * len(runs), 3.5), squeeze=False)
    for panel, (title, folder) in zip(panels[0], runs.items(), strict=True):
        if not (folder / "log.jsonl").is_file():
            raise DataError(f"{folder} has no log.jsonl. Pass the folder of a training run.")
        lines = list(read_log(folder))
        for name in figures:
            points = [(line["step"], line[name]) for line in lines if name in line]
            if points:
                panel.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 20 else "")
        panel.set(title=title, xlabel="step")
        panel.legend()
        panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, dpi=100)
    pyplot.close(figure)
