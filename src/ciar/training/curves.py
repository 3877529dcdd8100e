"""Draws the curves of training runs from their logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ciar.errors import DataError
from ciar.training.loop import read_log


def draw_curves(runs: Mapping[str, Path], out: Path, figures: Sequence[str] = ("loss", "held_loss")) -> None:
    """One panel a run: the chosen figures against the step, as PNG.

    Args:
        runs: title and run folder of each panel.
        out: the picture to write; its folder is made where it does not exist.
        figures: which figures; those that a log lacks are left out.

    Raises:
        DataError: matplotlib is not installed, or a run has no log or a damaged one.
    """
    try:
        import matplotlib
    except ImportError:
        raise DataError("Curves need matplotlib. Install it with: pip install 'ciar[train]'.") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    logs = [_lines_of(folder) for folder in runs.values()]
    figure, panels = pyplot.subplots(1, len(runs), figsize=(4.5 * len(runs), 3.5), squeeze=False)
    for panel, title, lines in zip(panels[0], runs, logs, strict=True):
        for name in figures:
            points = [(line["step"], line[name]) for line in lines if name in line]
            if points:
                panel.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 20 else "")
        panel.set(title=title, xlabel="step")
        if panel.lines:  # a legend of nothing is a warning
            panel.legend()
        panel.grid(alpha=0.3)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=100, format="png")
    pyplot.close(figure)


def _lines_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "log.jsonl"
    try:
        return list(read_log(folder))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path} does not exist. Pass the folder of a training run.") from None
    except ValueError as error:
        raise DataError(f"{path} has a line that is no JSON ({error}). Remove that line.") from None
