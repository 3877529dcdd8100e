"""Round trips of one connection, counted the same way by everyone who drives a device half."""

from __future__ import annotations

from dataclasses import dataclass, field

from ciar.protocol.messages import Draft, Patch


@dataclass
class RoundTrips:
    """Requests that were answered, and how many of them lay on the critical path.

    The device may wait several times while drafts that it sent long ago are verified; the network costs it
    nothing then. A wait is a round trip on the critical path when the draft that it was for had not been
    sent at the end of the one before: the longest chain of a draft that needed an answer that needed a
    draft, and so on.

    Attributes:
        answered: requests that were answered; one patch may answer several.
        critical: those that the device had to wait for, as above.
    """

    answered: int = 0
    critical: int = 0
    _starts: list[int] = field(default_factory=list)
    _mark: int = 0

    def sent(self, draft: Draft) -> None:
        """A draft left."""
        self._starts.append(draft.start)

    def received(self, patch: Patch, waited: bool) -> None:
        """A patch came.

        Args:
            waited: whether the device could do nothing else until it came.
        """
        self.answered = max(self.answered, patch.step + 1)
        reach = max(patch.horizon, patch.start + 1)
        needed = next((step for step in range(patch.step, -1, -1) if self._starts[step] < reach), patch.step)
        if waited and needed >= self._mark:
            self.critical += 1
            self._mark = len(self._starts)
