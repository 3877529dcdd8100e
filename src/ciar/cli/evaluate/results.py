"""``ciar eval show`` and ``ciar eval compare``: result documents as Markdown tables."""

from __future__ import annotations

import argparse
from pathlib import Path

from ciar.cli.output import say
from ciar.cli.parser import Command


def add_show(parser: argparse.ArgumentParser) -> None:
    """Options of ``show``."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="result documents")


def show(options: argparse.Namespace) -> int:
    """One table, a row a result. Returns 0."""
    from ciar.evaluation.report import Result, markdown

    say(markdown([Result.load(file) for file in options.files]).rstrip("\n"))
    return 0


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Options of ``compare``."""
    parser.add_argument("before", type=Path, metavar="BEFORE", help="result document of the reference")
    parser.add_argument("after", type=Path, metavar="AFTER", help="result document to compare with it")


def compare(options: argparse.Namespace) -> int:
    """Figure by figure; refused when the two did not measure the same thing. Returns 0."""
    from ciar.evaluation.report import Result
    from ciar.evaluation.report import compare as compare_results

    say(compare_results(Result.load(options.before), Result.load(options.after)).markdown().rstrip("\n"))
    return 0


SHOW = Command(help="show result documents as one table", add_arguments=add_show, run=show)
COMPARE = Command(
    help="compare two result documents, figure by figure", add_arguments=add_compare, run=compare
)
