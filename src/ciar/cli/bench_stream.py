"""``ciar bench-stream``: time to image over shaped real sockets, every strategy at every round-trip time."""

from __future__ import annotations

import argparse
import platform
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ciar.cli.output import note, say
from ciar.cli.parser import Command, real, whole
from ciar.errors import CiarError, InputError

DESCRIPTION = """\
Makes the same pictures by several strategies over real sockets that are slowed down, and says how long
each takes at each round-trip time, beside the same without a drafter. Cloud and device run in processes
of their own on this machine. Every picture is written down as soon as it is made: run the same command
again to go on where it was left. Prints a table; the folder gets it as .md, .json and .png."""

EPILOG = """\
examples:
  ciar bench-stream --pictures 8 --out out/bench-stream
  ciar bench-stream --rtt 0,80 --rows "scd:window=32 balanced" --pictures 2
  sudo ciar bench-stream --shaping netem --loss 1 --megabits 10
  ciar bench-stream --pass-ms 40 --row-ms 0.5 --step-ms 2 --out out/replay

"exact", "balanced" and "cheapest" are settings of ciar-stream; other rows are written as for
"ciar compare". --pass-ms, --row-ms and --step-ms make passes and steps last as long as those of another
model: measure them there, and replay this model's decisions at that one's speed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``ciar bench-stream``."""
    parser.add_argument("--backbone", default="emoji", metavar="NAME", help="a name or a folder")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="of the cloud model (default: cpu)")
    parser.add_argument("--rows", metavar="LIST", help="what is compared, separated by blanks")
    parser.add_argument(
        "--rtt",
        type=milliseconds,
        default=(0.0, 10.0, 30.0, 80.0, 200.0),
        metavar="LIST",
        help="round-trip times in ms, separated by commas (default: 0,10,30,80,200)",
    )
    parser.add_argument(
        "--pictures", type=whole(1, 10_000), default=8, metavar="N", help="a row and RTT (default: 8)"
    )
    parser.add_argument("--seed", type=whole(0, 2**31 - 1), default=0, metavar="N", help="of picture 0")
    parser.add_argument(
        "--shaping",
        choices=("auto", "netem", "relay"),
        default="auto",
        help="netem needs Linux and root; auto takes it where it works (default: auto)",
    )
    parser.add_argument(
        "--megabits", type=real(0.0, 1e6, above=True), metavar="X", help="bandwidth each way, in Mbit/s"
    )
    parser.add_argument(
        "--jitter-ms", type=real(0.0, 60_000.0), default=0.0, metavar="X", help="of the one-way delay"
    )
    parser.add_argument(
        "--loss", type=real(0.0, 50.0), default=0.0, metavar="X", help="per cent of the packets"
    )
    parser.add_argument("--pass-ms", type=real(0.0, 60_000.0), metavar="X", help="let each pass last so long")
    parser.add_argument("--row-ms", type=real(0.0, 60_000.0), metavar="X", help="and so long a position")
    parser.add_argument("--step-ms", type=real(0.0, 60_000.0), metavar="X", help="let proposals last so long")
    parser.add_argument(
        "--threads", type=whole(1, 1024), metavar="N", help="threads of each side (default: torch's)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/bench-stream"),
        metavar="DIR",
        help="folder of the results (default: out/bench-stream)",
    )


def milliseconds(text: str) -> tuple[float, ...]:
    """An argparse type: times separated by commas, each once."""
    return tuple(dict.fromkeys(real(0.0, 10_000.0)(part) for part in text.split(",")))


def run(options: argparse.Namespace) -> int:
    """Measures and writes the report, also of what there is when it is interrupted. Returns 0.

    Raises:
        InputError: something that it needs is not installed, or the folder holds another run.
    """
    lacking = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if lacking:
        raise InputError(f"This needs {' and '.join(lacking)}. Install: pip install 'ciar[serve]'.")
    import torch

    from ciar.bench_stream.figures import figures
    from ciar.bench_stream.lines import lines_of
    from ciar.bench_stream.measure import Plan, measure
    from ciar.bench_stream.records import Records
    from ciar.bench_stream.report import can_draw, markdown, write
    from ciar.bench_stream.rows import rows_of
    from ciar.models.bundle import load_bundle
    from ciar.network.shape import Shape

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    tempo = tempo_of(options)
    bundle = load_bundle(options.backbone)
    paced = tempo is not None or options.step_ms is not None
    rows = rows_of(options.rows, step=bool(bundle.config.get("devices")), paced=paced)
    shape = Shape(jitter_ms=options.jitter_ms, megabits_per_s=options.megabits, loss=options.loss / 100)
    order = {
        "backbone": options.backbone,
        "device": options.device,
        "threads": options.threads,
        "tempo": tempo,
    }
    lines = lines_of(options.shaping, order, options.seed)
    note(f"shaping: {lines.kind}. {lines.detail}")
    if not can_draw():
        note("no plot will be drawn: matplotlib is missing. Install: pip install 'ciar[train]'")
    settings = {
        "weights": bundle.weights,
        "network": {name: value for name, value in shape.to_dict().items() if name != "rtt_ms"},
        "shaping": lines.kind,
        "shaping_detail": lines.detail,
        "step_ms": options.step_ms,
        "seed": options.seed,
        **(order | {"backbone": bundle.name}),
        **_versions(),
    }
    records = Records.open(options.out / "records.jsonl", settings)
    plan = Plan(rows, options.rtt, shape, options.pictures, options.seed, options.step_ms)

    def report() -> str:
        beat = None if tempo is None else (tempo["pass_ms"], tempo["row_ms"])
        measured = {rtt_ms for rtt_ms, _, _ in records.pictures}  # by earlier calls too
        found = figures(records, rows, sorted({*options.rtt, *measured}), beat)
        for path in write(found, records, options.out):
            note(f"wrote {path}")
        return markdown(found, records)

    try:
        note(f"starting a cloud of {bundle.name} ...")
        with lines:
            measure(plan, lines, bundle, records, note)
    except BaseException:
        with suppress(CiarError):  # what went wrong first is what to say
            report()
        note("not finished: the same command goes on from here")
        raise
    say(report().rstrip("\n"))
    return 0


def tempo_of(options: argparse.Namespace) -> dict[str, float] | None:
    """How long passes last, or None for the model's own speed."""
    if options.pass_ms is None and options.row_ms is None:
        return None
    return {"pass_ms": options.pass_ms or 0.0, "row_ms": options.row_ms or 0.0}


def _versions() -> dict[str, Any]:
    import torch

    from ciar.version import __version__

    return {"version": __version__, "torch": torch.__version__, "machine": platform.machine()}


COMMAND = Command(
    help="measure time to image over slow networks",
    add_arguments=add_arguments,
    run=run,
    description=DESCRIPTION,
    epilog=EPILOG,
)
