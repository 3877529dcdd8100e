"""What one picture cost and who decided each of its tokens, the same for every strategy.

Whoever drives a strategy fills the ledger (a session, a batch); a strategy cannot. Three words hold
everywhere: a *cloud pass* is one forward of the cloud model over any number of positions, the prefill
among them; a *request* is a draft with its answer; the *accept length* is the number of tokens that
the cloud decided per cloud pass, its corrections and bonus tokens included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Decider = Literal["prefix", "device", "accepted", "replaced"]
#: Order in which deciders are numbered on the wire and in heat maps.
DECIDERS: tuple[Decider, ...] = ("prefix", "device", "accepted", "replaced")


@dataclass
class Ledger:
    """Counts of one picture.

    Attributes:
        tokens: tokens of the picture.
        cloud_passes: forwards of the cloud model over any number of positions.
        token_rows: token rows that those passes processed; guidance doubles them.
        cloud_ms: milliseconds inside the cloud's passes.
        device_ms: milliseconds inside the device's steps.
        total_ms: wall time from the prompt to the pixels.
        text_ms: wall time of text encoding, both sides.
        pixels_ms: wall time of decoding tokens to pixels.
        round_trips: messages that were answered: the opening and every request.
        critical_round_trips: answers that the device had to wait for; waits for drafts that were on their
            way at the same time count once.
        bytes_up: bytes from device to cloud.
        bytes_down: bytes from cloud to device.
        device_steps: forwards of the device model over one new token.
        discarded: drafted tokens that were thrown away before anyone judged them.
        decided: for each position its decider; empty until known. ``prefix`` is the cloud without a
            draft (the prefix, plain AR, bonus tokens), ``device`` the device unchecked, ``accepted``
            and ``replaced`` the cloud on a drafted token. Drafted tokens are those of the last three
            and the discarded ones.
    """

    tokens: int = 0
    cloud_passes: int = 0
    token_rows: int = 0
    cloud_ms: float = 0.0
    device_ms: float = 0.0
    total_ms: float = 0.0
    text_ms: float = 0.0
    pixels_ms: float = 0.0
    round_trips: int = 0
    critical_round_trips: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    device_steps: int = 0
    discarded: int = 0
    decided: list[Decider] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """How many tokens each decider decided."""
        return {name: self.decided.count(name) for name in DECIDERS}

    @property
    def upload_share(self) -> float:
        """Share of the tokens that the cloud was asked about: accepted plus replaced."""
        judged = self.counts["accepted"] + self.counts["replaced"]
        return judged / self.tokens if self.tokens else 0.0

    @property
    def cloud_call_share(self) -> float:
        """Cloud passes a token: the paper's "cloud requests"."""
        return self.cloud_passes / self.tokens if self.tokens else 0.0

    @property
    def accept_length(self) -> float:
        """Tokens that the cloud decided per cloud pass, corrections and bonus tokens included."""
        decided = len(self.decided) - self.counts["device"]
        return decided / self.cloud_passes if self.cloud_passes else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``: every field, with ``decided`` as counts."""
        values = {name: value for name, value in self.__dict__.items() if name != "decided"}
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in values.items()}
        return rounded | {"decided": self.counts}
