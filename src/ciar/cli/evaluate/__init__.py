"""``ciar eval``: what was measured, and what it means beside another run."""

from __future__ import annotations

import argparse

from ciar.cli.evaluate import ledgers, quality, results, sheets
from ciar.cli.parser import Command, add_commands

#: A new evaluation is one file and one line here.
EVALUATIONS: dict[str, Command] = {
    "ledgers": ledgers.EVALUATION,
    "quality": quality.EVALUATION,
    "sheets": sheets.EVALUATION,
    "show": results.SHOW,
    "compare": results.COMPARE,
}

EPILOG = """\
examples:
  ciar generate - --n 8 --seed 1 --strategy base --json --out out/ < prompts.txt > base.json
  ciar generate - --n 8 --seed 1 --strategy ciar --json --out out/ --force < prompts.txt > ciar.json
  ciar eval ledgers base.json ciar.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-command an evaluation."""
    add_commands(parser, EVALUATIONS, "evaluation")


COMMAND = Command(help="measure and compare runs", add_arguments=add_arguments, epilog=EPILOG)
