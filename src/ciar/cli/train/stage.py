"""What the training stages share: the run folder, the options of the loop, the profiles.

A run folder (``--work``) has one sub-folder a stage, so a stage finds what the earlier ones left::

    data/  text/  tokenizer/  codebook/  codes/  backbone/  device/  eagle/  gate/  dual-encoder/
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ciar.cli.output import say_json
from ciar.cli.parser import Command, whole
from ciar.errors import DataError

if TYPE_CHECKING:
    from ciar.training.loop import LoopConfig

#: A stage is a command of ``ciar train``.
Stage = Command
#: ``emoji`` trains what ships; ``tiny`` trains every stage in seconds, to try the commands out.
PROFILES = ("emoji", "tiny")
DEFAULT_WORK = "runs/emoji"


def add_work(parser: argparse.ArgumentParser) -> None:
    """Adds ``--work``."""
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(DEFAULT_WORK),
        metavar="DIR",
        help=f"run folder (default: {DEFAULT_WORK})",
    )


def add_loop(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a stage that trains: ``--work``, ``--profile`` and those of the loop."""
    add_work(parser)
    parser.add_argument(
        "--profile", choices=PROFILES, default="emoji", help="sizes and steps (default: emoji)"
    )
    parser.add_argument(
        "--steps", type=whole(1), metavar="N", help="optimiser steps (default: the profile's)"
    )
    parser.add_argument(
        "--seed", type=whole(0, 2**31 - 1), default=0, metavar="N", help="of everything random"
    )
    parser.add_argument("--no-resume", action="store_true", help="begin anew even if there is a checkpoint")
    parser.add_argument(
        "--threads",
        type=whole(1, 1024),
        metavar="N",
        help="processor threads (default: all that torch takes)",
    )


def add_init(parser: argparse.ArgumentParser) -> None:
    """Adds ``--init``: weights to begin with, where there is no checkpoint to go on from."""
    parser.add_argument(
        "--init",
        type=Path,
        metavar="FILE",
        help="weights to begin with (safetensors), such as the shipped ones",
    )


def init_from(
    options: argparse.Namespace, module: Any, fit: Callable[[Any], Any] = lambda same: same
) -> None:
    """Fills a module with the weights that ``--init`` names, if it does.

    Args:
        fit: adapts the tensors by name to the module, where an older one may differ.
    """
    from ciar.models.checkpoint import load_strict, read_tensors

    if options.init is not None:
        load_strict(module, fit(read_tensors(options.init)), options.init)


def loop_of(options: argparse.Namespace, emoji: LoopConfig, tiny_steps: int = 4) -> LoopConfig:
    """The loop of a run: the profile's, changed by the options. Also sets the threads."""
    import torch

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    loop = replace(emoji, seed=options.seed)
    if options.profile == "tiny":
        loop = replace(loop, steps=tiny_steps, warmup=1, log_every=1, eval_every=tiny_steps)
    return loop if options.steps is None else replace(loop, steps=options.steps)


def needed(folder: Path, file: str, stage: str) -> Path:
    """The folder of an earlier stage.

    Raises:
        DataError: the stage has not been run; says how to.
    """
    if not (folder / file).is_file():
        raise DataError(
            f"{folder / file} does not exist. Run first: ciar train {stage} --work {folder.parent}"
        )
    return folder


def save_module(folder: Path, stem: str, module: Any, config: dict[str, Any]) -> None:
    """Writes ``STEM.safetensors`` and ``STEM.json``, from which :func:`load_module` restores."""
    from ciar.models.checkpoint import save_tensors

    save_tensors(module, folder / f"{stem}.safetensors")
    (folder / f"{stem}.json").write_text(json.dumps(config, indent=2) + "\n")


def load_config(folder: Path, stem: str) -> dict[str, Any]:
    """The configuration that :func:`save_module` wrote.

    Raises:
        DataError: it is damaged.
    """
    path = folder / f"{stem}.json"
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}). Run the stage that writes it again.") from None
    return values


def load_module(folder: Path, stem: str, module: Any) -> Any:
    """Fills a module with the weights of :func:`save_module`, strictly, and returns it."""
    from ciar.models.checkpoint import load_strict, read_tensors

    path = folder / f"{stem}.safetensors"
    load_strict(module, read_tensors(path), path)
    return module.eval()


def report(figures: dict[str, Any]) -> int:
    """Ends a stage: its last figures as one JSON line on standard output. Returns 0.

    A figure that is not defined (NaN, of too few pictures) becomes null: hours of training must not
    end in an error.
    """
    say_json({name: _json_value(value) for name, value in figures.items()})
    return 0


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _json_value(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
