"""``ciar compare``: every strategy side by side."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ciar.cli.judging import Bench, add_judging, origin
from ciar.cli.output import note, say, table
from ciar.cli.parser import Command, real, whole
from ciar.errors import DataError, InputError
from ciar.files import read_json, write_json

if TYPE_CHECKING:
    from ciar.models.bundle import Bundle

DESCRIPTION = """\
Makes the same prompts with the same seeds by several strategies and settings, and prints what each
costs, how fast it is here, and how its pictures compare with plain AR's. With --out the table is
written as compare.json, compare.md and compare.png as well.

With --tune nothing is compared: for each strategy the settings that it declares are tried on prompts of
their own, and the cheapest that keeps the quality is written down, for --settings. Each strategy is
written as soon as it is tried, and the same command goes on from there."""

EPILOG = """\
examples:
  ciar compare --strategies all --images 500 --work runs/emoji --out out/compare
  ciar compare --strategies "lossless scd slack:allowance=2,window=32 ciar:score=entropy,share=0.3"
  ciar compare --tune tuned.json --images 500 --loss 0.05
  ciar compare --settings tuned.json --images 500 --out out/compare
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
    add_judging(parser, seed=2_000_000)
    parser.add_argument(
        "--images", type=whole(2, 100_000), default=500, metavar="N", help="pictures a row (default: 500)"
    )
    parser.add_argument(
        "--timed", type=whole(1, 1000), default=4, metavar="N", help="pictures timed one by one (default: 4)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write the table here")
    tuned = parser.add_mutually_exclusive_group()
    tuned.add_argument(
        "--settings", type=Path, metavar="FILE", help="names alone take the settings that --tune wrote here"
    )
    tuned.add_argument(
        "--tune", type=Path, metavar="FILE", help="choose each strategy's settings and write them here"
    )
    parser.add_argument(
        "--loss",
        type=real(0.0, 10.0),
        default=0.05,
        metavar="SHARE",
        help="with --tune: largest change of the Frechet distance (default: 0.05)",
    )
    parser.add_argument(
        "--row-cost",
        type=real(0.0, 1.0),
        default=0.0135,
        metavar="PASSES",
        help="with --tune: what a token row costs beside a pass (default: 0.0135, a processor's)",
    )


def run(options: argparse.Namespace) -> int:
    """Compares, or tunes. Returns 0."""
    from ciar.compare import compare, markdown, runs_of
    from ciar.evaluation.frontier import Point, draw_frontier
    from ciar.models.bundle import load_bundle
    from ciar.tuning import load_settings

    bundle = load_bundle(options.backbone)
    if options.tune is not None:
        return _tune(options, bundle)
    runs_of(options.strategies, bundle)  # says what is wrong before the judge is made
    bench = Bench.of(options.work)
    prompts, names = bench.prompts(options.images)
    tuned = (
        None
        if options.settings is None
        else load_settings(options.settings, weights=bundle.weights, names=names)
    )
    runs = runs_of(options.strategies, bundle, tuned)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    rows = compare(
        bundle,
        bench.judge,
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
        document = origin(bundle, prompts, options.seed) | {
            "images": options.images,
            "timed": options.timed,
            "tuned": tuned,
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


def _tune(options: argparse.Namespace, bundle: Bundle) -> int:
    """Tunes and writes the settings. Returns 0."""
    from ciar.compare import runs_of
    from ciar.tuning import tune
    from ciar.version import __version__

    runs = runs_of(options.strategies, bundle)
    if given := [run.label for run in runs if ":" in run.label]:
        raise InputError(f"--tune chooses settings itself; give names alone, not {given[0]!r}.")
    if options.tune.is_dir():
        raise DataError(f"{options.tune} is a folder. Name a file with --tune.")
    bench = Bench.of(options.work)
    prompts, names = bench.prompts(options.images, calibration=True)

    def keep(found: dict[str, Any]) -> None:
        _write(options.tune, {"version": __version__} | found)

    document = tune(
        bundle,
        bench.judge,
        prompts,
        names,
        [run.label for run in runs],
        bound=options.loss,
        row_cost=options.row_cost,
        seed=options.seed,
        batch=options.batch,
        note=note,
        before=read_json(options.tune),
        keep=keep,
    )
    keep(document)
    rows = [["strategy", "setting", "cost", "loss"]]
    for name, one in document["strategies"].items():
        (best,) = [trial for trial in one["trials"] if trial["label"] == one["setting"]]
        loss = f"{best['loss']:+.1%}" + ("" if one["within"] else " beyond the bound")
        rows.append([name, one["setting"], f"{best['cost']:.3f}", loss])
    say(table(rows, "<<><"))
    return 0


def _write(path: Path, document: dict[str, Any]) -> None:
    """Writes the document whole or not at all.

    Raises:
        DataError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, document, indent=2)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error.strerror}). Name another file with --tune."
        ) from None


COMMAND = Command(
    help="compare the strategies: quality, cost, speed",
    add_arguments=add_arguments,
    run=run,
    description=DESCRIPTION,
    epilog=EPILOG,
)
