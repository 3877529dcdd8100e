"""``ciar encode``: the text features of prompts, made beforehand."""

from __future__ import annotations

import argparse
from pathlib import Path

from ciar.cli.generate import read_prompts
from ciar.cli.output import note, printable, say, say_json
from ciar.cli.parser import Command, whole

DESCRIPTION = """\
Runs the text encoder over prompts and writes their features: one safetensors file and an index. A
machine without room for the encoder then draws these prompts. Needs the extra [t5]."""

EPILOG = """\
examples:
  ciar encode "a red fox" "a blue car" --text flan-t5-xl/ --out features/
  ciar encode - --text llamagen-256 --out small-machine/llamagen-256 < prompts.txt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``ciar encode``."""
    parser.add_argument(
        "prompt", nargs="*", help="prompts, in quotes; - reads one from every line of standard input"
    )
    parser.add_argument(
        "--text",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of FLAN-T5-XL, or a backbone folder that holds it",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for the features, or a backbone folder without a text encoder",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="what the encoder runs in (default: bfloat16, or the backbone's)",
    )
    parser.add_argument(
        "--text-len",
        type=whole(2, 4096),
        default=120,
        metavar="N",
        help="text slots of the transformer (default: 120, or the backbone's)",
    )
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:1 (default: cpu)")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")


def run(options: argparse.Namespace) -> int:
    """Encodes. Returns 0."""
    prompts = read_prompts(options.prompt)
    from ciar.models.encode import encode_prompts

    def progress(done: int, warnings: tuple[str, ...]) -> None:
        for warning in warnings:
            note(f"prompt {done}: {printable(warning, 400)}")

    made = encode_prompts(
        prompts,
        options.text,
        options.out,
        dtype=options.dtype,
        text_len=options.text_len,
        device=options.device,
        progress=progress,
    )
    if options.json:
        say_json(made)
    else:
        count = f"{made['prompts']} prompts, {made['rows']} text tokens, {made['bytes'] / 1e6:.1f} MB"
        say(f"{count} in {printable(made['folder'], 400)}")
    return 0


COMMAND = Command(
    help="make the text features of prompts beforehand",
    add_arguments=add_arguments,
    run=run,
    description=DESCRIPTION,
    epilog=EPILOG,
)
