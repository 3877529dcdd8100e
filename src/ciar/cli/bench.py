"""``ciar bench``: how fast the strategies are on this machine, as ratios from one run."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from ciar.cli.output import note, say
from ciar.cli.parser import Command, whole
from ciar.errors import InputError

if TYPE_CHECKING:
    from ciar.bench import BenchResult
    from ciar.footprint import Footprint

DESCRIPTION = """\
Measures the strategies side by side: same machine, same weights, same seeds, warm, medians of
several repeats. Prints a table that says where each millisecond goes, and one JSON line last.

With --once, for backbones of full size: a picture each by base and ciar, the time of a pass beside that
of a plain copy of the weights, and the peak of memory."""

EPILOG = """\
examples:
  ciar bench --threads 2
  ciar convert --random llamagen-xl-256 --out xl-random
  ciar bench --once --backbone xl-random
  ciar bench --once --backbone anole-random --tokens 128
"""

_PICTURES = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``ciar bench``."""
    parser.add_argument(
        "--backbone", default="emoji", metavar="NAME", help="a name or a folder (default: emoji)"
    )
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:1, mps (default: cpu)"
    )
    parser.add_argument("--pictures", type=whole(1, 1000), metavar="N", help="pictures a repeat (default: 4)")
    parser.add_argument("--repeats", type=whole(1, 100), default=3, metavar="N", help="repeats (default: 3)")
    parser.add_argument(
        "--seed", type=whole(0, 2**64 - 1), default=0, metavar="N", help="of the first picture"
    )
    parser.add_argument(
        "--threads", type=whole(1, 1024), metavar="N", help="processor threads (default: torch's)"
    )
    parser.add_argument("--once", action="store_true", help="one picture by base and one by ciar")
    parser.add_argument(
        "--tokens", type=whole(1), metavar="N", help="with --once: break pictures off after N tokens"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark. Returns 0.

    Raises:
        InputError: ``--tokens`` without ``--once``, or ``--pictures`` with it.
    """
    if options.once:
        if options.pictures is not None:
            raise InputError("--once makes one picture a strategy. Leave --pictures out, or --once.")
        return _once(options)
    if options.tokens is not None:
        raise InputError("--tokens is for --once: a benchmark with repeats makes whole pictures.")
    from ciar.bench import bench

    result = bench(
        options.backbone,
        device=options.device,
        pictures=_PICTURES if options.pictures is None else options.pictures,
        repeats=options.repeats,
        seed=options.seed,
        threads=options.threads,
        note=note,
    )
    return _show(result)


def _once(options: argparse.Namespace) -> int:
    from ciar.footprint import footprint

    result = footprint(
        options.backbone,
        device=options.device,
        tokens=options.tokens,
        repeats=options.repeats,
        seed=options.seed,
        threads=options.threads,
        note=note,
    )
    return _show(result)


def _show(result: BenchResult | Footprint) -> int:
    """Prints a result as a table and as one JSON line. Returns 0."""
    say(result.table())
    say(json.dumps(result.to_dict(), allow_nan=False))
    return 0


COMMAND = Command(
    help="measure speed on this machine",
    add_arguments=add_arguments,
    run=run,
    description=DESCRIPTION,
    epilog=EPILOG,
)
