"""Counters, gauges and histograms in Prometheus' text format; as much of it as the server needs.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/ (text format 0.0.4).
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence

#: Media type of :meth:`Metrics.render`.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Upper ends of the latency buckets, in seconds.
LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Counter:
    """A number that goes up (or, for a gauge, also down), one for each value of its label. Thread-safe.

    Args:
        name: metric name.
        about: one line of help.
        label: name of the label, "" for none.
        values: label values that are shown from the start, as 0.
        kind: ``counter`` or ``gauge``.
    """

    def __init__(
        self, name: str, about: str, label: str = "", values: Sequence[str] = ("",), kind: str = "counter"
    ) -> None:
        self.name, self.about, self.label, self.kind = name, about, label, kind
        self._lock = threading.Lock()
        self._values: dict[str, float] = dict.fromkeys(values, 0)

    def add(self, amount: float = 1, value: str = "") -> None:
        """Add to the number with this label value."""
        with self._lock:
            self._values[value] = self._values.get(value, 0) + amount

    def get(self, value: str = "") -> float:
        """The number with this label value."""
        with self._lock:
            return self._values.get(value, 0)

    def lines(self) -> list[str]:
        """Its part of the page."""
        with self._lock:
            found = dict(self._values)
        head = [f"# HELP {self.name} {self.about}", f"# TYPE {self.name} {self.kind}"]
        return head + [
            f"{self.name}{_labels(self.label, value)} {number:.17g}" for value, number in found.items()
        ]


class Histogram:
    """How often values fell below each of some bounds, for each value of one label. Thread-safe.

    Args:
        name: metric name.
        about: one line of help.
        label: name of the label.
        values: label values that are shown from the start.
        bounds: upper ends of the buckets, rising.
    """

    def __init__(
        self,
        name: str,
        about: str,
        label: str,
        values: Sequence[str],
        bounds: Sequence[float] = LATENCY_BUCKETS_S,
    ) -> None:
        self.name, self.about, self.label = name, about, label
        self._bounds = tuple(bounds)
        self._lock = threading.Lock()
        self._counts = {value: [0] * (len(self._bounds) + 1) for value in values}
        self._sums = dict.fromkeys(values, 0.0)

    def observe(self, number: float, value: str) -> None:
        """Count one number under this label value."""
        with self._lock:
            self._counts[value][bisect_left(self._bounds, number)] += 1
            self._sums[value] += number

    def count(self, value: str) -> int:
        """How many numbers were counted under this label value."""
        with self._lock:
            return sum(self._counts[value])

    def lines(self) -> list[str]:
        """Its part of the page."""
        with self._lock:
            counts = {value: list(row) for value, row in self._counts.items()}
            sums = dict(self._sums)
        out = [f"# HELP {self.name} {self.about}", f"# TYPE {self.name} histogram"]
        for value, row in counts.items():
            label = f'{self.label}="{_escaped(value)}"'
            below = 0
            for bound, count in zip((*map(str, self._bounds), "+Inf"), row, strict=True):
                below += count
                out.append(f'{self.name}_bucket{{{label},le="{bound}"}} {below}')
            out.append(f"{self.name}_sum{{{label}}} {sums[value]:.17g}")
            out.append(f"{self.name}_count{{{label}}} {below}")
        return out


class Metrics:
    """All numbers of one server."""

    def __init__(self) -> None:
        directions = ("up", "down")
        codes = ("input", "protocol", "busy", "version", "numerical", "internal", "token")
        endings = ("done", "cancelled", "gone", "idle", "error", "shutdown")
        self.sessions_open = Counter("ciar_sessions_open", "Sessions open now.", kind="gauge")
        self.sockets_open = Counter("ciar_sockets_open", "Connections open now.", kind="gauge")
        self.sessions = Counter("ciar_sessions_total", "Sessions opened.")
        self.endings = Counter("ciar_connections_ended_total", "Connections ended, by how.", "how", endings)
        self.frames = Counter(
            "ciar_frames_total", "Frames, up from or down to devices.", "direction", directions
        )
        self.bytes = Counter("ciar_bytes_total", "Bytes of frames.", "direction", directions)
        self.passes = Counter("ciar_passes_total", "Passes of the cloud model.")
        self.token_rows = Counter("ciar_token_rows_total", "Token rows of those passes.")
        self.errors = Counter("ciar_errors_total", "Errors told to devices, by code.", "code", codes)
        self.late = Counter("ciar_late_answers_total", "Answers computed for devices that had left.")
        self.latency = Histogram(
            "ciar_answer_seconds",
            "Time from a message's turn in its session to its last answer, queueing for a worker included.",
            "message",
            ("open", "draft"),
        )

    def render(self) -> str:
        """The page at ``/metrics``."""
        parts: tuple[Counter | Histogram, ...] = (
            self.sessions_open,
            self.sockets_open,
            self.sessions,
            self.endings,
            self.frames,
            self.bytes,
            self.passes,
            self.token_rows,
            self.errors,
            self.late,
            self.latency,
        )
        return "\n".join(line for part in parts for line in part.lines()) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _labels(label: str, value: str) -> str:
    return f'{{{label}="{_escaped(value)}"}}' if label else ""
