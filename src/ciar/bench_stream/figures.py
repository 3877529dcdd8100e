"""From ledgers to figures: medians a row and round-trip time, and what they are compared with."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ciar.bench_stream.records import Records
from ciar.bench_stream.rows import Row


@dataclass(frozen=True)
class Figures:
    """One row at one round-trip time.

    Attributes:
        rtt_ms, row, label: which.
        without: name of the row without a drafter, or "".
        pictures: how many are behind it.
        total_ms: median time to image.
        quartiles_ms: first and third quartile of it.
        speed_up: plain AR's median time over this one's.
        over_without: the same with the row without a drafter in plain AR's place; None where there is none.
        passes, rows: cloud passes and token rows a token, means. Guidance doubles the rows.
        critical: round trips that the device had to wait for, median.
        bytes_up, bytes_down: medians.
        cloud_ms, device_ms: medians of the time in passes and in steps.
        same: share of the pictures that are plain AR's, token for token.
        overrun: with a tempo, by what share passes took longer than asked for, median; else None.
    """

    rtt_ms: float
    row: str
    label: str
    without: str
    pictures: int
    total_ms: float
    quartiles_ms: tuple[float, float]
    speed_up: float
    over_without: float | None
    passes: float
    rows: float
    critical: float
    bytes_up: float
    bytes_down: float
    cloud_ms: float
    device_ms: float
    same: float
    overrun: float | None

    def to_dict(self) -> dict[str, Any]:
        """One JSON object."""
        return asdict(self)


def figures(
    records: Records,
    rows: Sequence[Row],
    rtts_ms: Sequence[float],
    tempo: tuple[float, float] | None = None,
) -> list[Figures]:
    """Figures of every row at every round-trip time for which there are pictures.

    Args:
        rows: the first is plain AR.
        tempo: milliseconds of a pass and of a position, where passes were given them.
    """
    out: list[Figures] = []
    names = {row.label: row.name for row in rows}
    for rtt_ms in rtts_ms:
        rounds = records.rounds(rtt_ms, list(names))
        if not rounds:
            continue
        made = {label: records.of(rtt_ms, label, rounds) for label in names}
        medians = {label: _median(pictures, "total_ms") for label, pictures in made.items()}
        base = rows[0].label
        digests = [picture["digest"] for picture in made[base]]
        for row in rows:
            pictures, total_ms = made[row.label], medians[row.label]
            same = [one["digest"] == own for one, own in zip(pictures, digests, strict=True)]
            out.append(
                Figures(
                    rtt_ms=rtt_ms,
                    row=row.name,
                    label=row.label,
                    without=names.get(row.without, ""),
                    pictures=len(rounds),
                    total_ms=total_ms,
                    quartiles_ms=_quartiles([one["ledger"]["total_ms"] for one in pictures]),
                    speed_up=medians[base] / total_ms,
                    over_without=medians[row.without] / total_ms if row.without in medians else None,
                    passes=_share(pictures, "cloud_passes"),
                    rows=_share(pictures, "token_rows"),
                    critical=_median(pictures, "critical_round_trips"),
                    bytes_up=_median(pictures, "bytes_up"),
                    bytes_down=_median(pictures, "bytes_down"),
                    cloud_ms=_median(pictures, "cloud_ms"),
                    device_ms=_median(pictures, "device_ms"),
                    same=sum(same) / len(same),
                    overrun=None if tempo is None else _overrun(pictures, *tempo),
                )
            )
    return out


def asked_ms(picture: dict[str, Any], pass_ms: float, row_ms: float) -> float:
    """Milliseconds that a picture's passes should have taken; the prompt's pass is over its text."""
    ledger = picture["ledger"]
    passes, rows = ledger["cloud_passes"], ledger["token_rows"] / picture["guided"]
    read = picture["positions"] - 1 if passes else 0  # the ledger counts the prompt's pass as one position
    return pass_ms * passes + row_ms * (rows + read)


def _overrun(pictures: Sequence[dict[str, Any]], pass_ms: float, row_ms: float) -> float | None:
    both = [(one["ledger"]["cloud_ms"], asked_ms(one, pass_ms, row_ms)) for one in pictures]
    found = [took / asked - 1.0 for took, asked in both if asked]
    return statistics.median(found) if found else None


def _median(pictures: Sequence[dict[str, Any]], figure: str) -> float:
    return float(statistics.median(one["ledger"][figure] for one in pictures))


def _share(pictures: Sequence[dict[str, Any]], figure: str) -> float:
    return statistics.fmean(one["ledger"][figure] / one["ledger"]["tokens"] for one in pictures)


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third
