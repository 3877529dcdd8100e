"""``ciar eval ledgers``: what strategies cost, from the documents of ``ciar generate --json``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ciar.cli.output import say, say_json, table
from ciar.cli.parser import Command, real
from ciar.errors import DataError

#: Figure -> (unit for people, how it is read off a ledger).
FIGURES: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
    "kept_local": ("share", lambda ledger: ledger["decided"]["device"] / ledger["tokens"]),
    "asked": (
        "share",
        lambda ledger: (ledger["decided"]["accepted"] + ledger["decided"]["replaced"]) / ledger["tokens"],
    ),
    "passes_a_token": ("", lambda ledger: ledger["cloud_passes"] / ledger["tokens"]),
    "rows_a_token": ("", lambda ledger: ledger["token_rows"] / ledger["tokens"]),
    "critical_round_trips": ("", lambda ledger: ledger["critical_round_trips"]),
    "bytes_up": ("B", lambda ledger: ledger["bytes_up"]),
    "bytes_down": ("B", lambda ledger: ledger["bytes_down"]),
    "total_ms": ("ms", lambda ledger: ledger["total_ms"]),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the evaluation."""
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="documents of ciar generate --json"
    )
    parser.add_argument(
        "--level",
        type=real(0.0, 0.9999, above=True),
        default=0.95,
        metavar="P",
        help="coverage (default: 0.95)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output, no table")


def run(options: argparse.Namespace) -> int:
    """Means over pictures with bootstrap intervals, a row a strategy. Returns 0.

    Raises:
        DataError: a file is no document of ``ciar generate --json``.
    """
    from ciar.evaluation.bootstrap import Estimate, mean_estimate

    by_strategy: dict[str, list[dict[str, Any]]] = {}
    for file in options.files:
        for strategy, ledger in read_ledgers(file):
            by_strategy.setdefault(strategy, []).append(ledger)
    found: dict[str, dict[str, Estimate]] = {
        strategy: {
            name: mean_estimate([read(ledger) for ledger in ledgers], level=options.level)
            for name, (_, read) in FIGURES.items()
        }
        for strategy, ledgers in by_strategy.items()
    }
    if options.json:
        rows = [
            {"strategy": strategy, "pictures": len(by_strategy[strategy]), "level": options.level}
            | {name: [e.value, e.low, e.high] for name, e in figures.items()}
            for strategy, figures in found.items()
        ]
        say_json({"strategies": rows})
        return 0
    lines = [["strategy", "pictures", *(name.replace("_", " ") for name in FIGURES)]]
    for strategy, figures in found.items():
        cells = [_cell(figures[name], unit) for name, (unit, _) in FIGURES.items()]
        lines.append([strategy, str(len(by_strategy[strategy])), *cells])
    # Figures down, strategies across: intervals make wide cells.
    say(table([list(row) for row in zip(*lines, strict=True)], "<"))
    return 0


def read_ledgers(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Strategy and ledger of every picture of a document.

    Raises:
        DataError: the file is missing or is no such document.
    """
    try:
        images = json.loads(path.read_text(encoding="utf-8"))["images"]
        found = [(str(image["strategy"]), image["ledger"]) for image in images]
        for _, ledger in found:
            for _, read in FIGURES.values():
                read(ledger)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist.") from None
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise DataError(
            f"{path} is no document of ciar generate --json ({type(error).__name__}: {error})."
        ) from None
    if not found:
        raise DataError(f"{path} holds no pictures.")
    return found


def _cell(estimate: Any, unit: str) -> str:
    if unit == "share":
        return f"{estimate.value:.1%} [{estimate.low:.1%}, {estimate.high:.1%}]"
    return f"{estimate.value:.4g} [{estimate.low:.4g}, {estimate.high:.4g}]{' ' * bool(unit)}{unit}"


EVALUATION = Command(
    help="what strategies cost, from documents of ciar generate --json", add_arguments=add_arguments, run=run
)
