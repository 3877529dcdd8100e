"""``ciar compare``: every strategy side by side."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ciar.cli.output import note, say
from ciar.cli.parser import Command, whole
from ciar.cli.train.stage import needed

DESCRIPTION = """\
Makes the same prompts with the same seeds by several strategies and settings, and prints what each
costs, how fast it is here, and how its pictures compare with plain AR's. With --out the table is
written as compare.json, compare.md and compare.png as well."""

EPILOG = """\
examples:
  ciar compare --strategies all --images 500 --work runs/emoji --out out/compare
  ciar compare --strategies "lossless scd slack:allowance=2,window=32 ciar:score=entropy,share=0.3"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``ciar compare``."""
    parser.add_argument(
        "--strategies",
        default="all",
        metavar="LIST",
        help='rows, separated by blanks: names, names with settings ("slack:allowance=2"), or all '
        "(default: all)",
    )
    parser.add_argument("--backbone", default="emoji", metavar="NAME", help="a name or a folder")
    parser.add_argument(
        "--images", type=whole(2, 100_000), default=500, metavar="N", help="pictures a row (default: 500)"
    )
    parser.add_argument(
        "--timed", type=whole(1, 1000), default=4, metavar="N", help="pictures timed one by one (default: 4)"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/emoji"), metavar="DIR", help="run folder")
    parser.add_argument("--batch", type=whole(1, 4096), default=64, metavar="N", help="at once (default: 64)")
    parser.add_argument(
        "--seed", type=whole(0, 2**31 - 1), default=2_000_000, metavar="N", help="of picture 0"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write the table here")


def run(options: argparse.Namespace) -> int:
    """Compares. Returns 0."""
    from ciar.compare import compare, markdown, runs_of
    from ciar.evaluation.frontier import Point, draw_frontier
    from ciar.models.bundle import load_bundle
    from ciar.models.text import StaticTextEncoder
    from ciar.quality import Judge, evaluation_prompts
    from ciar.version import __version__

    bundle = load_bundle(options.backbone)
    runs = runs_of(options.strategies, bundle)
    data = needed(options.work / "data", "captions.json", "data")
    text = StaticTextEncoder.load(needed(options.work / "text", "text.json", "text"))
    the_judge = Judge.from_data(options.work / "dual-encoder", text, data)
    prompts, names = evaluation_prompts(data, options.images, text)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    rows = compare(
        bundle,
        the_judge,
        prompts,
        names,
        runs,
        seed=options.seed,
        batch=options.batch,
        timed=options.timed,
        note=note,
    )
    shown = markdown(rows)
    say(shown.rstrip("\n"))
    if options.out is not None:
        document = {
            "version": __version__,
            "backbone": bundle.name,
            "weights": bundle.weights,
            "images": options.images,
            "timed": options.timed,
            "seed": options.seed,
            "rows": [row.to_dict(rows[0]) for row in rows],
        }
        (options.out / "compare.json").write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
        (options.out / "compare.md").write_text(shown)
        points = [Point("base", rows[0].judged.passes, 0.0, 0.0, 0.0)]
        for row in rows[1:]:
            change = row.judged.frechet_change
            assert change is not None
            points.append(Point(row.judged.label, row.judged.passes, change.value, change.low, change.high))
        title = f"{bundle.name}, {options.images} pictures"
        draw_frontier(points, options.out / "compare.png", title)
    return 0


COMMAND = Command(
    help="compare the strategies: quality, cost, speed",
    add_arguments=add_arguments,
    run=run,
    description=DESCRIPTION,
    epilog=EPILOG,
)
