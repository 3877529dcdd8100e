"""One picture over a connection, the whole way from the prompt to the pixels, on the device's clock."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from ciar.device.paced import PacedProposer, pace
from ciar.device.session import DeviceSession
from ciar.models.bundle import Bundle
from ciar.pipeline import Pipeline
from ciar.quality import Run
from ciar.transport.base import Transport


@dataclass(frozen=True)
class Shot:
    """What one picture cost.

    Attributes:
        ledger: as ``Ledger.to_dict`` gives it.
        digest: of the tokens, so that pictures can be compared without keeping them.
        positions: text positions that the cloud reads.
        guided: token rows of a position, 2 under guidance.
        strategy: what ran; for the planner's choice the strategies that it took.
        why: the planner's reason, or "".
        proposals: of a device with a tempo; 0 without one.
    """

    ledger: dict[str, Any]
    digest: str
    positions: int
    guided: int
    strategy: str
    why: str = ""
    proposals: int = 0

    def to_dict(self) -> dict[str, Any]:
        """One JSON object."""
        return asdict(self)


class Maker:
    """Makes pictures over one way to a cloud; what the planner learns, it keeps.

    Args:
        bundle: the device's side of the backbone.
        transport: the way to the cloud. A lost connection is an error, not taken up again.
        step_ms: how long a proposal of the device lasts; None is its own speed.
    """

    def __init__(self, bundle: Bundle, transport: Transport, step_ms: float | None = None) -> None:
        self._bundle, self._step_ms = bundle, step_ms
        self._sessions: list[DeviceSession] = []
        self._pipe = Pipeline(bundle, transport)
        self._pipe.session_of = self._session

    def make(self, run: Run, prompt: str, seed: int) -> Shot:
        """Makes a picture; connecting, text encoding and pixel decoding count.

        Raises:
            CiarError: the cloud cannot be reached or fails.
        """
        self._sessions.clear()
        asked = dict(run.settings)
        guidance = asked.pop("guidance", None)
        options = dict(asked.pop("options", ()))
        done = self._pipe(
            prompt,
            seed=seed,
            guidance_scale=guidance,
            score=run.score,
            threshold=run.threshold,
            options=options,
            output_type="np",
            **asked,
        )
        scale = self._bundle.defaults.guidance if guidance is None else guidance
        proposers = [one.proposer for one in self._sessions]
        return Shot(
            ledger=done.ledgers[0].to_dict(),
            digest=hashlib.sha256(repr(done.tokens[0]).encode()).hexdigest()[:16],
            positions=int(self._bundle.text.encode(prompt).mask.sum()),
            guided=1 if scale == 1.0 else 2,
            strategy=done.strategies[0],
            why=done.why[0] if done.why else "",
            proposals=sum(one.proposals for one in proposers if isinstance(one, PacedProposer)),
        )

    def _session(self, *arguments: Any) -> DeviceSession:
        session = DeviceSession(*arguments)
        session.retries = 0
        if self._step_ms is not None:
            pace(session, self._step_ms)
        self._sessions.append(session)
        return session
