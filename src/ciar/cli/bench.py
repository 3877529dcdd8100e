"""``ciar bench``: how fast the strategies are on this machine, as ratios from one run."""

from __future__ import annotations

import argparse
import json

from ciar.cli.output import note, say
from ciar.cli.parser import Command, whole

DESCRIPTION = """\
Measures the strategies side by side: same machine, same weights, same seeds, warm, medians of
several repeats. Prints a table that says where each millisecond goes, and one JSON line last."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``ciar bench``."""
    parser.add_argument(
        "--backbone", default="emoji", metavar="NAME", help="a name or a folder (default: emoji)"
    )
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:1, mps (default: cpu)"
    )
    parser.add_argument(
        "--pictures", type=whole(1, 1000), default=4, metavar="N", help="pictures a repeat (default: 4)"
    )
    parser.add_argument("--repeats", type=whole(1, 100), default=3, metavar="N", help="repeats (default: 3)")
    parser.add_argument(
        "--seed", type=whole(0, 2**64 - 1), default=0, metavar="N", help="of the first picture"
    )
    parser.add_argument(
        "--threads", type=whole(1, 1024), metavar="N", help="processor threads (default: torch's)"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark. Returns 0."""
    from ciar.bench import bench

    result = bench(
        options.backbone,
        device=options.device,
        pictures=options.pictures,
        repeats=options.repeats,
        seed=options.seed,
        threads=options.threads,
        note=note,
    )
    say(result.table())
    say(json.dumps(result.to_dict(), allow_nan=False))
    return 0


COMMAND = Command(
    help="measure speed on this machine", add_arguments=add_arguments, run=run, description=DESCRIPTION
)
