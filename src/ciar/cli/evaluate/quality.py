"""``ciar eval quality``: how good the pictures of each setting are, against plain AR."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ciar.cli.judging import Bench, add_judging, origin
from ciar.cli.output import note, say
from ciar.cli.parser import Command, real, whole

DESCRIPTION = """\
Makes the same prompts with the same seeds by plain AR and by other settings, and judges them with
the dual encoder: Frechet distance to the real pictures and retrieval accuracy, with paired bootstrap
intervals. The first row is plain AR. Prompts that calibrated the gate are left out."""

EPILOG = """\
examples:
  ciar eval quality --work runs/emoji --pictures 2000
  ciar eval quality --work runs/emoji --curve --pictures 500 --out curve.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the evaluation."""
    add_judging(parser, seed=1_000_000)
    parser.add_argument(
        "--pictures", type=whole(2), default=2000, metavar="N", help="pictures (default: 2000)"
    )
    parser.add_argument(
        "--strategies",
        default="base,ciar",
        metavar="LIST",
        help="strategies, comma-separated, the yard-stick first (default: base,ciar)",
    )
    parser.add_argument(
        "--curve", action="store_true", help="ciar at thresholds from uploading nothing to everything"
    )
    parser.add_argument(
        "--curve-scores", default="", metavar="LIST", help="with --curve: scores other than the backbone's"
    )
    parser.add_argument(
        "--shares",
        type=lambda text: [real(0.0, 1.0)(part) for part in text.split(",")],
        default=[0.0, 0.15, 0.3, 0.5, 1.0],
        metavar="LIST",
        help="with --curve: shares of the judged tokens to upload",
    )
    parser.add_argument("--no-injection", action="store_true", help="leave interval features out")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures as JSON")


def run(options: argparse.Namespace) -> int:
    """Judges the settings. Returns 0."""
    from ciar.intervals.thresholds import ThresholdConfig
    from ciar.models.bundle import load_bundle
    from ciar.quality import Run, check_runs, judge, markdown

    bundle = load_bundle(options.backbone)
    extra = {"injection": False} if options.no_injection else {}
    if options.curve:
        runs = [Run("base", {"strategy": "base"})]
        for score in options.curve_scores.split(",") if options.curve_scores else [bundle.defaults.score]:
            runs += [
                Run(
                    f"{score} {share:.0%}",
                    {"strategy": "ciar", **extra},
                    ThresholdConfig(kind="budget", share=share),
                    score,
                )
                for share in options.shares
            ]
    else:
        runs = [Run(name, {"strategy": name, **extra}) for name in options.strategies.split(",")]
    check_runs(runs)
    bench = Bench.of(options.work)
    prompts, names = bench.prompts(options.pictures)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    judged = judge(
        bundle, bench.judge, prompts, names, runs, seed=options.seed, batch=options.batch, note=note
    )
    say(markdown(judged).rstrip("\n"))
    if options.out is not None:
        document = origin(bundle, prompts, options.seed) | {
            "pictures": options.pictures,
            "rows": [row.to_dict() for row in judged],
        }
        options.out.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    return 0


EVALUATION = Command(
    help="quality of settings against plain AR",
    add_arguments=add_arguments,
    run=run,
    description=DESCRIPTION,
    epilog=EPILOG,
)
