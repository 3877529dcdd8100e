"""What commands that judge pictures share: their options, and the judge, prompts and weights behind them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ciar.cli.parser import whole
from ciar.cli.train.stage import needed

if TYPE_CHECKING:
    from ciar.models.bundle import Bundle
    from ciar.models.text import StaticTextEncoder
    from ciar.quality import Judge


def add_judging(parser: argparse.ArgumentParser, seed: int) -> None:
    """Options of every such command.

    Args:
        seed: of picture 0 where none is given.
    """
    parser.add_argument("--work", type=Path, default=Path("runs/emoji"), metavar="DIR", help="run folder")
    parser.add_argument("--backbone", default="emoji", metavar="NAME", help="a name or a folder")
    parser.add_argument("--batch", type=whole(1, 4096), default=64, metavar="N", help="at once (default: 64)")
    parser.add_argument("--seed", type=whole(0, 2**31 - 1), default=seed, metavar="N", help="of picture 0")


@dataclass(frozen=True)
class Bench:
    """A judge and what it judges with.

    Attributes:
        data: the data set's folder.
        text: the dual encoder's text encoder.
        judge: the judge.
    """

    data: Path
    text: StaticTextEncoder
    judge: Judge

    @classmethod
    def of(cls, work: Path) -> Bench:
        """Of a run folder.

        Raises:
            DataError: a stage of it is missing; the message says which command makes it.
            CheckpointError: the dual encoder is missing or damaged.
        """
        from ciar.models.text import StaticTextEncoder
        from ciar.quality import Judge

        data = needed(work / "data", "captions.json", "data")
        text = StaticTextEncoder.load(needed(work / "text", "text.json", "text"))
        return cls(data, text, Judge.from_data(work / "dual-encoder", text, data))

    def prompts(self, count: int, *, calibration: bool = False) -> tuple[list[str], list[str]]:
        """Prompts and names, see :func:`ciar.quality.evaluation_prompts`."""
        from ciar.quality import evaluation_prompts

        return evaluation_prompts(self.data, count, self.text, calibration=calibration)


def origin(bundle: Bundle, prompts: Sequence[str], seed: int) -> dict[str, Any]:
    """How figures came about, for their document."""
    from ciar.tuning import prompts_digest
    from ciar.version import __version__

    return {
        "version": __version__,
        "backbone": bundle.name,
        "weights": bundle.weights,
        "prompts_sha256": prompts_digest(prompts),
        "seed": seed,
    }
