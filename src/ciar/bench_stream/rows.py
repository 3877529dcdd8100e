"""What is compared: settings by name, and beside each the same without a drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ciar.compare import parse_run
from ciar.decoding.strategy import get_strategy
from ciar.errors import InputError
from ciar.planner.conditions import WISHES
from ciar.protocol.messages import Settings
from ciar.quality import Run

#: Settings of the product that a list of rows may call by name.
NAMED: Mapping[str, str] = {
    "exact": "ciar-stream:window=64,pace=auto",
    "balanced": "ciar-stream:window=64,pace=auto,policy=slack,allowance=2",
    "cheapest": "ciar-stream:window=64,pace=auto,policy=slack,allowance=4",
}
#: Rows where none are asked for.
USUAL = "base scd:window=64 ciar code exact balanced cheapest auto"
#: Leaves the choice to the planner.
AUTO = "auto"


@dataclass(frozen=True)
class Row:
    """One setting.

    Attributes:
        name: what tables call it.
        run: how its pictures are made; ``run.label`` is its description in full.
        without: label of the row that is the same without a drafter, or "".
    """

    name: str
    run: Run
    without: str = ""

    @property
    def label(self) -> str:
        return self.run.label


def rows_of(text: str | None = None, *, step: bool = True, paced: bool = False) -> list[Row]:
    """Reads a list of rows; plain AR comes first, and each drafter's row is followed by the one without it.

    Args:
        text: names of :data:`NAMED` and settings such as ``scd-slack:allowance=2``, separated by blanks;
            None is :data:`USUAL`.
        step: whether there is a device model.
        paced: whether passes or steps are given a tempo.

    Raises:
        InputError: a row cannot be read, or cannot be measured.
    """
    usual = text is None
    rows: dict[str, Row] = {}
    for word in ["base", *(USUAL if text is None else text).split()]:
        setting = NAMED.get(word, word)
        if setting.partition(":")[0] == AUTO:
            rows.setdefault(setting, Row(word, planned(setting)))
            continue
        row = Row(word, parse_run(setting))
        strategy = get_strategy(row.run.settings["strategy"])
        if strategy.uses_device and not step:
            if usual:
                continue
            raise InputError(f"{word} needs a device model, and the backbone holds none. Leave it out.")
        if strategy.uses_eagle and paced:
            raise InputError(
                f"{word} works with trees, which are given no tempo. Leave it out, or measure without "
                "--pass-ms, --row-ms and --step-ms."
            )
        partner = without_drafter(row.run)
        rows.setdefault(row.label, Row(row.name, row.run, partner or ""))
        if partner is not None:
            rows.setdefault(partner, Row(partner, parse_run(partner)))
    return list(rows.values())


def planned(text: str) -> Run:
    """A row of the planner's choice: ``auto``, or ``auto:wish=exact``.

    Raises:
        InputError: it says something else.
    """
    key, _, wish = text.partition(":")[2].partition("=")
    if (key or wish) and (key != "wish" or wish not in WISHES):
        raise InputError(f"{text!r} cannot be read. Write auto:wish=NAME, with one of: {', '.join(WISHES)}.")
    return Run(text, {"strategy": AUTO} | ({"wish": wish} if wish else {}))


def without_drafter(run: Run) -> str | None:
    """The setting in which the cloud guesses by itself what the drafter would have drafted.

    None where there is no such thing: without a drafter nothing is certain, so nothing can be trusted or
    graded; or where the setting has no drafter anyway.
    """
    strategy = get_strategy(run.settings["strategy"])
    values = strategy.values(Settings(strategy.name, options=run.settings.get("options", ())))
    if any(option.name == "fill" for option in strategy.options):
        if values.word("fill") != "device" or values.word("policy") not in ("exact", "slack", "budget"):
            return None
        return f"{run.label}{',' if ':' in run.label else ':'}fill=left"
    rest = ",".join(part for part in run.label.partition(":")[2].split(",") if part)
    if strategy.name == "lossless":
        return f"scd:{rest}" if rest else "scd"
    if strategy.name == "slack" and values.word("allowed") == "all":
        return f"scd-slack:{rest}" if rest else "scd-slack"
    return None
