"""What people and programs read of a run: a Markdown table, a JSON document, a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ciar.bench_stream.figures import Figures
from ciar.bench_stream.records import Records
from ciar.errors import DataError

_HEAD = (
    "setting", "ms to image", "quartiles", "x base", "x without drafter", "passes / T", "rows / T",
    "critical trips", "bytes up", "bytes down", "cloud ms", "device ms", "base's picture", "overrun",
)  # fmt: skip


def markdown(found: Sequence[Figures], records: Records) -> str:
    """One table a round-trip time, under a paragraph that says how it was measured."""
    parts = [_how(records.settings)]
    for rtt_ms in dict.fromkeys(one.rtt_ms for one in found):
        here = [one for one in found if one.rtt_ms == rtt_ms]
        echoes = ", ".join(f"{ms:.1f}" for ms in records.echoes.get(rtt_ms, ()))
        parts.append(f"## RTT {rtt_ms:g} ms\n\n{here[0].pictures} pictures a row; measured: {echoes} ms.")
        lines = ["| " + " | ".join(_HEAD) + " |", "|---" * len(_HEAD) + "|"]
        lines += ["| " + " | ".join(_cells(one)) + " |" for one in here]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _cells(one: Figures) -> tuple[str, ...]:
    low, high = one.quartiles_ms
    return (
        one.row if one.row == one.label else f"{one.row} (`{one.label}`)",
        f"{one.total_ms:.0f}",
        f"{low:.0f} to {high:.0f}",
        f"{one.speed_up:.2f}",
        "" if one.over_without is None else f"{one.over_without:.2f}",
        f"{one.passes:.1%}",
        f"{one.rows:.2f}",
        f"{one.critical:g}",
        f"{one.bytes_up:.0f}",
        f"{one.bytes_down:.0f}",
        f"{one.cloud_ms:.0f}",
        f"{one.device_ms:.0f}",
        f"{one.same:.0%}",
        "" if one.overrun is None else f"{one.overrun:+.1%}",
    )


def _how(settings: dict[str, Any]) -> str:
    """The paragraph above the tables."""
    shape, tempo = settings["network"], settings["tempo"]
    network = [
        f"{shape['megabits_per_s']:g} Mbit/s" if shape["megabits_per_s"] else "no limit of bandwidth",
        f"jitter {shape['jitter_ms']:g} ms",
        f"loss {100 * shape['loss']:g} %",
    ]
    threads = settings["threads"] or "the usual number of"
    words = [
        f"Backbone {settings['backbone']} on {settings['device']}, ciar {settings['version']}, torch "
        f"{settings['torch']}, {settings['machine']}, {threads} threads a side.",
        f"Network: {settings['shaping']} ({settings['shaping_detail'].rstrip('.')}); {', '.join(network)}.",
    ]
    if tempo:
        words.append(
            f"Passes last {tempo['pass_ms']:g} ms and {tempo['row_ms']:g} ms a position, by sleeping: the "
            "decisions are this backbone's, the times another's."
        )
    if settings["step_ms"] is not None:
        words.append(f"A proposal of the device lasts {settings['step_ms']:g} ms.")
    return " ".join(words)


def document(found: Sequence[Figures], records: Records) -> dict[str, Any]:
    """Everything: settings, measured round trips, figures, and each picture's seed and ledger."""
    return {
        "settings": records.settings,
        "echo_ms": [{"rtt_ms": rtt, "measured": times} for rtt, times in sorted(records.echoes.items())],
        "figures": [one.to_dict() for one in found],
        "pictures": list(records.pictures.values()),
    }


def write(found: Sequence[Figures], records: Records, folder: Path) -> list[Path]:
    """Writes ``bench-stream.md``, ``.json`` and, where matplotlib is there, ``.png``; returns the paths.

    Raises:
        DataError: a file cannot be written.
    """
    paths = [folder / "bench-stream.md", folder / "bench-stream.json"]
    try:
        paths[0].write_text(markdown(found, records), encoding="utf-8")
        text = json.dumps(document(found, records), indent=1, allow_nan=False)
        paths[1].write_text(text + "\n", encoding="utf-8")
        if can_draw() and found:
            paths.append(folder / "bench-stream.png")
            draw(found, paths[-1], str(records.settings["backbone"]))
    except OSError as error:
        raise DataError(f"{folder} cannot be written to ({error.strerror}).") from error
    return paths


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(found: Sequence[Figures], out: Path, title: str) -> None:
    """Writes the plot as PNG: time to image against round-trip time, dashed without a drafter.

    Raises:
        DataError: matplotlib is not installed.
    """
    if not can_draw():
        raise DataError("A plot needs matplotlib. Install it with: pip install 'ciar[train]'.")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(9, 6))
    partners = {one.without for one in found if one.without}
    for name in dict.fromkeys(one.row for one in found):
        line = [one for one in found if one.row == name]
        times = [one.total_ms / 1e3 for one in line]
        low = [max(0.0, t - one.quartiles_ms[0] / 1e3) for t, one in zip(times, line, strict=True)]
        high = [max(0.0, one.quartiles_ms[1] / 1e3 - t) for t, one in zip(times, line, strict=True)]
        style = "--" if name in partners else "-"
        panel.errorbar(
            [one.rtt_ms for one in line], times, yerr=[low, high], marker="o", capsize=2, label=name, ls=style
        )
    panel.set(title=title, xlabel="round-trip time, ms", ylabel="time to image, s (median, quartiles)")
    panel.set_yscale("log")
    panel.grid(alpha=0.3, which="both")
    panel.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(out, dpi=100, format="png")
    pyplot.close(figure)
