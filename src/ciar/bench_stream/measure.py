"""Runs the benchmark: at every round-trip time every row makes the same pictures, the rows in turn."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ciar.bench import PROMPTS
from ciar.bench_stream.lines import Ends, Lines, echo_ms
from ciar.bench_stream.picture import Maker
from ciar.bench_stream.records import Records
from ciar.bench_stream.rows import Row
from ciar.models.bundle import Bundle
from ciar.network.shape import Shape
from ciar.transport.websocket import WebSocketTransport

#: Generous: plain AR of a large model sends its first patch late, and a bad network is measured too.
_CONNECT_S, _READ_S = 130.0, 600.0


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        rows: the first is plain AR.
        rtts_ms: round-trip times.
        shape: the network beside its round-trip time.
        pictures: a row and round-trip time.
        seed: of picture 0.
        step_ms: how long a proposal of the device lasts; None is its own speed.
    """

    rows: Sequence[Row]
    rtts_ms: Sequence[float]
    shape: Shape
    pictures: int
    seed: int = 0
    step_ms: float | None = None


def measure(plan: Plan, lines: Lines, bundle: Bundle, records: Records, note: Callable[[str], None]) -> None:
    """Makes the pictures that ``records`` does not hold yet.

    Args:
        lines: entered already.
        note: told how far it is.

    Raises:
        CiarError: the cloud or the network fails; what was measured before is in ``records``.
    """
    labels = [row.label for row in plan.rows]
    go = secrets.token_hex(4)
    for rtt_ms in plan.rtts_ms:
        done = set(records.rounds(rtt_ms, labels))
        missing = [number for number in range(plan.pictures) if number not in done]
        if not missing:
            note(f"RTT {rtt_ms:g} ms: all {plan.pictures} pictures a row are there")
            continue
        with lines.at(replace(plan.shape, rtt_ms=rtt_ms)) as ends, ends.on_device():
            _at(plan, rtt_ms, missing, ends, bundle, records, go, note)


def _at(
    plan: Plan,
    rtt_ms: float,
    missing: Sequence[int],
    ends: Ends,
    bundle: Bundle,
    records: Records,
    go: str,
    note: Callable[[str], None],
) -> None:
    """One round-trip time."""
    found_ms = echo_ms(ends.url)
    records.add({"rtt_ms": rtt_ms, "echo_ms": found_ms, "go": go})
    note(f"RTT {rtt_ms:g} ms: an answer takes {found_ms:.1f} ms; warming up")
    transport = WebSocketTransport(ends.url, connect_timeout_s=_CONNECT_S, read_timeout_s=_READ_S)
    maker = Maker(bundle, transport, plan.step_ms)
    for row in plan.rows:
        maker.make(row.run, PROMPTS[0], plan.seed + plan.pictures)
    for number in missing:
        times: list[str] = []
        # Whoever comes first meets what the picture before has left behind: take turns with that too.
        for row in _rotated(plan.rows, number):
            prompt, seed = PROMPTS[number % len(PROMPTS)], plan.seed + number
            shot = maker.make(row.run, prompt, seed)
            which = {"rtt_ms": rtt_ms, "picture": number, "row": row.label, "go": go}
            records.add(which | {"prompt": prompt, "seed": seed} | shot.to_dict())
            times.append(f"{row.name} {shot.ledger['total_ms']:.0f}")
        note(f"RTT {rtt_ms:g} ms, picture {number + 1} of {plan.pictures}, ms: {', '.join(times)}")


def _rotated(rows: Sequence[Row], by: int) -> list[Row]:
    start = by % len(rows)
    return [*rows[start:], *rows[:start]]
