"""``ciar train device``: the one-layer model that drafts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ciar.cli.parser import real, whole
from ciar.cli.train.stage import DEFAULT_WORK, Stage, add_loop, loop_of, needed, report
from ciar.errors import InputError

LOSSES = ("coverage", "inter-dro")

DESCRIPTION = """\
Distils the cloud model into a one-layer model with intervals, which drafts on the device.

Without --backbone it is a stage of the run folder --work. With --backbone it is made for a folder of
"ciar convert": it learns from the folder's cloud model on pictures of the prompts, real ones (--data,
--codes) or, where none are given, ones that the cloud draws itself; sets the gate's threshold; and goes
into that folder, which then draws by every strategy. Caches stay in --work, and a second call goes on."""

EPILOG = """\
examples:
  ciar train device
  ciar train device --backbone llamagen-256 --prompts prompts.txt
  ciar train device --backbone llamagen-256 --data photos/ --device cuda
  ciar train device --backbone anole --features features/ --width 1024
"""

#: Options that are for a folder alone.
_FOLDER_ONLY = (
    *("prompts", "features", "codes", "data", "device", "dtype", "width", "teacher_top_k", "score"),
    *("budget", "calibrate", "batch"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the stage."""
    add_loop(parser)
    parser.set_defaults(work=None)  # there are two defaults
    parser.add_argument(
        "--loss", choices=LOSSES, default="coverage", help="of the interval's radius (default: coverage)"
    )
    parser.add_argument(
        "--real", type=whole(1), metavar="N", help="most real pictures in the teacher's cache (default: 8000)"
    )
    parser.add_argument(
        "--drifted", type=whole(1), metavar="N", help="pictures continued by the device (default: 1536)"
    )
    parser.add_argument(
        "--finish-from",
        type=real(0.0, 0.99),
        metavar="P",
        help="train device-finish instead, which begins as the trained device model and learns only what "
        "follows this share of the tokens: for the strategy code",
    )
    _add_folder(parser)


def _add_folder(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("for a folder of ciar convert")
    group.add_argument("--backbone", metavar="DIR", help="the folder, which gets the device model")
    group.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt on every line")
    group.add_argument(
        "--features", type=Path, metavar="DIR", help="features of ciar encode, in place of a text encoder"
    )
    group.add_argument(
        "--codes", type=Path, metavar="FILE", help="codes of real pictures, a row a prompt (numpy.save)"
    )
    group.add_argument(
        "--data", type=Path, metavar="DIR", help="pictures with captions beside them: fox.png, fox.txt"
    )
    group.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1 (default: cpu)")
    group.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="what the cloud model runs in (default: the folder's)",
    )
    group.add_argument(
        "--width", type=whole(64, 16384), metavar="N", help="of the device model (default: the cloud's)"
    )
    group.add_argument(
        "--teacher-top-k",
        type=whole(1, 65536),
        metavar="N",
        help="codes of the teacher's law kept a position (default: the backbone's top-k, at most 1024)",
    )
    group.add_argument(
        "--score", metavar="NAME", help="the gate that a threshold is set for (default: entropy)"
    )
    group.add_argument(
        "--budget",
        type=real(0.0, 1.0),
        metavar="P",
        help="share of tokens to upload (default: 0.3)",
    )
    group.add_argument(
        "--calibrate",
        type=whole(0),
        metavar="N",
        help="pictures that the threshold is set on; 0 = none, the budget is counted (default: 8)",
    )
    group.add_argument(
        "--batch",
        type=whole(1),
        metavar="N",
        help="pictures that the cloud runs at a time (default: 8)",
    )


def run(options: argparse.Namespace) -> int:
    """Distils the guided law of the cloud model into the device model. Returns 0."""
    from dataclasses import replace

    from ciar.training.distil import DEVICE_LOOP, distil_config, train_device

    if options.backbone is not None:
        return _run_folder(options)
    for name in _FOLDER_ONLY:
        if getattr(options, name) is not None:
            option = name.replace("_", "-")
            raise InputError(f"--{option} is for a folder of ciar convert. Add --backbone DIR.")
    work = Path(DEFAULT_WORK) if options.work is None else options.work
    config = distil_config(options.profile)
    sizes = _sizes(options)
    general = None
    if options.finish_from is not None:
        general = needed(work / "device", "device.safetensors", "device")
        sizes["finish_from"] = options.finish_from
    figures = train_device(
        data=needed(work / "data", "captions.json", "data"),
        text=needed(work / "text", "text.safetensors", "text"),
        codes=needed(work / "codes", "codes.npy", "codes"),
        backbone=needed(work / "backbone", "gpt.safetensors", "backbone"),
        out=work / ("device" if general is None else "device-finish"),
        loop=loop_of(options, DEVICE_LOOP),
        loss=options.loss,
        profile=options.profile,
        resume=not options.no_resume,
        config=replace(config, **sizes),
        general=general,
    )
    return report(figures)


def _sizes(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name in ("real", "drifted") if (value := getattr(options, name)) is not None}


def _run_folder(options: argparse.Namespace) -> int:
    """Distils a device model into a folder.

    Raises:
        InputError: options do not go together, or the gate is none of one law.
    """
    from dataclasses import replace

    from ciar.cli.output import note
    from ciar.decoding.gate import LAW_SCORES
    from ciar.training.distil import DEVICE_LOOP, distil_config
    from ciar.training.folder import FolderConfig, FolderSources, open_folder, train_folder_device

    if options.finish_from is not None:
        raise InputError("--finish-from is for a run folder. Leave it out with --backbone.")
    score = options.score or "entropy"
    if score not in LAW_SCORES:
        raise InputError(f"--score {score} is not set here. Use one of: {', '.join(sorted(LAW_SCORES))}.")
    bundle = open_folder(options.backbone, options.device or "cpu", options.dtype)
    work = options.work
    if work is None:
        work = Path("runs") / f"{bundle.folder.resolve().name}-device"
    given = {name: getattr(options, name) for name in ("width", "teacher_top_k", "budget", "calibrate")}
    given["pictures"] = options.batch
    given = {name: value for name, value in given.items() if value is not None}
    figures = train_folder_device(
        bundle,
        FolderSources(options.prompts, options.features, options.codes, options.data),
        work,
        loop=loop_of(options, DEVICE_LOOP),
        loss=options.loss,
        sizes=replace(distil_config(options.profile), ffn_multiplier=None, **_sizes(options)),
        config=FolderConfig(score=score, **given),
        resume=not options.no_resume,
        say=lambda words: note(f"{words} ..."),
    )
    return report(figures)


STAGE = Stage(
    help="distil the device model from the cloud model",
    add_arguments=add_arguments,
    run=run,
    description=DESCRIPTION,
    epilog=EPILOG,
)
