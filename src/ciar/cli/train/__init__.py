"""``ciar train``: the stages that make a backbone, each a command."""

from __future__ import annotations

import argparse

from ciar.cli.parser import Command, add_commands
from ciar.cli.train import (
    assemble,
    backbone,
    codebook,
    codes,
    curves,
    data,
    device,
    dual_encoder,
    eagle,
    gate,
    text,
    tokenizer,
)
from ciar.cli.train.stage import Stage

#: In the order in which they are run. A new stage is one file and one line here.
STAGES: dict[str, Stage] = {
    "data": data.STAGE,
    "text": text.STAGE,
    "tokenizer": tokenizer.STAGE,
    "codebook": codebook.STAGE,
    "codes": codes.STAGE,
    "backbone": backbone.STAGE,
    "device": device.STAGE,
    "eagle": eagle.STAGE,
    "gate": gate.STAGE,
    "dual-encoder": dual_encoder.STAGE,
    "assemble": assemble.STAGE,
    "curves": curves.STAGE,
}

DESCRIPTION = """\
Trains a backbone, one stage after the other; each can be stopped and goes on where it was. The
log goes to standard error and to the run folder, the last figures to standard output as JSON."""

EPILOG = """\
examples:
  npm install --prefix recipes/emoji
  ciar train data
  ciar train text --model path/to/sentence-model
  ciar train tokenizer
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-command a stage."""
    add_commands(parser, STAGES, "stage")


COMMAND = Command(
    help="train a backbone, stage by stage",
    add_arguments=add_arguments,
    description=DESCRIPTION,
    epilog=EPILOG,
)
