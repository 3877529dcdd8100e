"""``ciar strategies``: every strategy that ``--strategy`` takes, and every gate that ``--score`` takes."""

from __future__ import annotations

import argparse
import math
from typing import Any

from ciar.cli.output import say, say_json, table
from ciar.cli.parser import Command

_FIELDS = ("name", "summary", "source", "exact", "drift", "training", "uses_device", "uses_cloud")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``ciar strategies``."""
    parser.add_argument("--gates", action="store_true", help="list the gates of --score instead")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output, no table")


def run(options: argparse.Namespace) -> int:
    """Lists the strategies, or the gates. Returns 0."""
    return _gates(as_json=options.json) if options.gates else _strategies(as_json=options.json)


def _strategies(*, as_json: bool) -> int:
    from ciar.decoding.strategy import all_strategies

    known = all_strategies()
    if as_json:
        say_json({"strategies": [{field: getattr(one, field) for field in _FIELDS} for one in known]})
        return 0
    rows = [["strategy", "runs on", "law", "needs", "summary", "source"]]
    for one in known:
        places = [place for place, used in (("device", one.uses_device), ("cloud", one.uses_cloud)) if used]
        law = "the cloud's" if one.exact else "its own"
        rows.append([one.name, " + ".join(places), law, one.training, one.summary, one.source])
    say(table(rows, "<<<<<<"))
    return 0


def _gates(*, as_json: bool) -> int:
    from ciar.intervals.gates import GATES

    if as_json:
        say_json({"gates": [_plain(gate) for gate in GATES]})
        return 0
    rows = [["gate", "cost", "needs", "summary", "source"]]
    rows += [[gate.name, gate.cost, gate.training, gate.summary, gate.source] for gate in GATES]
    say(table(rows, "<<<<<"))
    return 0


def _plain(gate: Any) -> dict[str, Any]:
    """A gate's row for JSON, which knows no infinity."""
    bounds = [bound if math.isfinite(bound) else None for bound in gate.bounds]
    return {**vars(gate), "bounds": bounds}


COMMAND = Command(
    help="list the ways to make a picture",
    add_arguments=add_arguments,
    run=run,
    description='The strategies that "ciar generate --strategy" takes, beside "auto", which lets the\n'
    "planner choose among some of them (docs/planner.md). Where the law is the cloud's, the\n"
    "pictures are distributed exactly as the cloud model alone would draw them. --gates lists the\n"
    'scores that "ciar generate --score" takes: each is the gate of the strategy ciar.',
)
