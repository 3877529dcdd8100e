"""``ciar strategies``: every strategy that ``--strategy`` takes, with what it promises."""

from __future__ import annotations

import argparse

from ciar.cli.output import say, say_json, table
from ciar.cli.parser import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``ciar strategies``."""
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output, no table")


def run(options: argparse.Namespace) -> int:
    """Lists the strategies. Returns 0."""
    from ciar.decoding.strategy import all_strategies

    known = all_strategies()
    if options.json:
        fields = ("name", "summary", "source", "exact", "uses_device", "uses_cloud")
        say_json({"strategies": [{field: getattr(one, field) for field in fields} for one in known]})
        return 0
    rows = [["strategy", "runs on", "law", "summary", "source"]]
    for one in known:
        places = [place for place, used in (("device", one.uses_device), ("cloud", one.uses_cloud)) if used]
        law = "the cloud's" if one.exact else "its own"
        rows.append([one.name, " + ".join(places), law, one.summary, one.source])
    say(table(rows, "<<<<<"))
    return 0


COMMAND = Command(
    help="list the ways to make a picture",
    add_arguments=add_arguments,
    run=run,
    description='The strategies that "ciar generate --strategy" takes. Where the law is the cloud\'s, the\n'
    "pictures are distributed exactly as the cloud model alone would draw them.",
)
