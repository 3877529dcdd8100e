"""A cloud whose passes take as long as another model's: this model's decisions at that one's speed.

A decorator over the engine. Each pass lasts what was asked for, by sleeping behind it for what is left;
the time counts as the pass's own, in ledgers and in what devices measure. A pass that takes longer by
itself is not shortened.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from ciar.cloud.engine import CloudEngine, Slot
from ciar.cloud.sessions import Cloud
from ciar.decoding.strategy import Pass, Scatter
from ciar.errors import InputError
from ciar.models.text import TextFeatures


@dataclass(frozen=True)
class Tempo:
    """How long a pass lasts, in milliseconds.

    Attributes:
        pass_ms: each pass, beside its rows.
        row_ms: each position that it processes, however many rows guidance makes of it. Reading the
            prompt is a pass over its text positions.

    Raises:
        InputError: a number is out of its range.
    """

    pass_ms: float = 0.0
    row_ms: float = 0.0

    def __post_init__(self) -> None:
        for name in ("pass_ms", "row_ms"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 <= value <= 60_000):
                raise InputError(f"{name} is {value}; it must be from 0 to 60000 milliseconds.")

    def of(self, positions: int) -> float:
        """Milliseconds of a pass."""
        return self.pass_ms + self.row_ms * positions


class PacedEngine(CloudEngine):
    """An engine whose passes last as long as a tempo says.

    Passes over trees, which do not go through :meth:`run`, keep the model's own speed.

    Args:
        engine: what computes; its models are shared, not copied.
        tempo: how long a pass lasts.
    """

    def __init__(self, engine: CloudEngine, tempo: Tempo) -> None:
        vars(self).update(vars(engine))
        self.tempo = tempo
        # A pass that sleeps is still a pass: those of other sessions wait for it, as they would.
        self._beat = threading.Lock()

    def open(
        self, text: TextFeatures, negative: TextFeatures | None, guidance: float, device_text: TextFeatures
    ) -> Slot:
        with self._beat:
            began = time.perf_counter()
            slot = super().open(text, negative, guidance, device_text)
            self._last(slot, began, int(text.mask.sum()))
            return slot

    def run(self, slot: Slot, request: Pass, features: Tensor | None = None) -> Tensor:
        if not request.ids:  # the prefill's answer, which has been paid for
            return super().run(slot, request, features)
        with self._lasting(slot, len(request.ids)):
            return super().run(slot, request, features)

    def run_scattered(self, slot: Slot, request: Scatter) -> Tensor:
        with self._lasting(slot, len(request.ids)):
            return super().run_scattered(slot, request)

    @contextmanager
    def _lasting(self, slot: Slot, positions: int) -> Iterator[None]:
        with self._beat:
            began = time.perf_counter()
            yield
            self._last(slot, began, positions)

    def _last(self, slot: Slot, began_s: float, positions: int) -> None:
        """Sleeps for what is left of a pass."""
        now_s = time.perf_counter()
        left_s = began_s + self.tempo.of(positions) / 1e3 - now_s
        if left_s > 0:
            time.sleep(left_s)
            slot.milliseconds += (time.perf_counter() - now_s) * 1e3


def pace(cloud: Cloud, tempo: Tempo) -> Cloud:
    """Gives a cloud a tempo; returns the same cloud."""
    cloud.engine = PacedEngine(cloud.engine, tempo)
    return cloud
