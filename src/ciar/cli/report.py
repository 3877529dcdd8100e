"""What ``ciar generate`` tells of the pictures that it made: a table for people, JSON for programs.

Knows the ledger and nothing of the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ciar.cli.output import printable, table
from ciar.ledger import DECIDERS, Ledger

_WHO = {
    "prefix": "the cloud, before the device began",
    "device": "the device, certain",
    "accepted": "the device, uncertain; the cloud agreed",
    "replaced": "the cloud, in the place of an uncertain token",
}


@dataclass(frozen=True)
class Made:
    """One picture that was made.

    Attributes:
        seed: the seed of the request.
        image: which of the request's pictures it is, from 0; with the seed it gives the tokens.
        tokens: ids in order.
    """

    prompt: str
    seed: int
    image: int
    strategy: str
    tokens: list[int]
    file: Path
    heatmap: Path | None
    ledger: Ledger

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        values: dict[str, Any] = {
            "prompt": self.prompt,
            "seed": self.seed,
            "strategy": self.strategy,
            "tokens": self.tokens,
            "file": str(self.file),
            "ledger": self.ledger.to_dict(),
        }
        return values if self.heatmap is None else values | {"heatmap": str(self.heatmap)}


def document(pictures: Sequence[Made]) -> dict[str, Any]:
    """The one JSON document of a run."""
    return {"images": [picture.to_dict() for picture in pictures]}


def describe(pictures: Sequence[Made]) -> str:
    """The ledger table: in full for one picture, a row a picture for several."""
    return _one(pictures[0]) if len(pictures) == 1 else _many(pictures)


def _one(picture: Made) -> str:
    ledger = picture.ledger
    head = [["file", str(picture.file)]]
    if picture.heatmap is not None:
        head.append(["heat map", str(picture.heatmap)])
    head += [["strategy", picture.strategy], ["seed", str(picture.seed)]]
    who = [["tokens", str(ledger.tokens), "100 %", "decided by"]]
    for name in DECIDERS:
        count = ledger.counts[name]
        who.append([f"  {name}", str(count), _percent(count, ledger.tokens), _WHO[name]])
    rest = max(0.0, ledger.total_ms - ledger.text_ms - ledger.cloud_ms - ledger.device_ms - ledger.pixels_ms)
    costs = [
        ["cloud passes", str(ledger.cloud_passes), f"{ledger.cloud_call_share:.2f} a token"],
        ["cloud token rows", str(ledger.token_rows), "guidance doubles them"],
        ["round trips", str(ledger.round_trips), f"{ledger.critical_round_trips} waited for"],
        ["bytes up", str(ledger.bytes_up), ""],
        ["bytes down", str(ledger.bytes_down), ""],
        ["device steps", str(ledger.device_steps), f"{ledger.discarded} drafts discarded"],
    ]
    times = [
        ["text", _ms(ledger.text_ms)],
        ["cloud passes", _ms(ledger.cloud_ms)],
        ["device steps", _ms(ledger.device_ms)],
        ["pixels", _ms(ledger.pixels_ms)],
        ["the rest", _ms(rest)],
        ["total", _ms(ledger.total_ms)],
    ]
    blocks = [
        printable(picture.prompt),
        table(head, "<<"),
        table(who, "<>><"),
        table(costs, "<><"),
        table(times, "<>"),
    ]
    return "\n\n".join(blocks)


def _many(pictures: Sequence[Made]) -> str:
    rows = [["file", "prompt", "seed", "kept local", "asked", "passes", "up", "down", "time"]]
    for picture in pictures:
        ledger = picture.ledger
        rows.append(
            [
                str(picture.file),
                printable(picture.prompt, 40),
                str(picture.seed),
                _percent(ledger.counts["device"], ledger.tokens),
                _percent(ledger.counts["accepted"] + ledger.counts["replaced"], ledger.tokens),
                str(ledger.cloud_passes),
                f"{ledger.bytes_up} B",
                f"{ledger.bytes_down} B",
                _ms(ledger.total_ms),
            ]
        )
    return table(rows, "<<")


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms"
