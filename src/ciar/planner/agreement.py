"""How often device and cloud agree, as the cost model reads it: what each plan spends a token.

A table ships with the package and one may lie beside a backbone (``agreement.json``); both are only where
the planner begins, since every picture that it makes moves the row of its plan. No I/O here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ciar.decoding.pacing import NEWEST
from ciar.errors import InputError
from ciar.ledger import Ledger

#: Name of a table beside a backbone's weights.
AGREEMENT_FILE = "agreement.json"


@dataclass(frozen=True)
class Agreement:
    """What a plan spends.

    Attributes:
        passes: passes of the cloud a token.
        rows: positions that they process a token; both rows of guidance are one position.
        steps: time of the device a token, in steps; scores and tokens that are fed again count with it.
        waits: critical round trips a token, beside ``trips``.
        trips: critical round trips of every picture, the opening among them; 0 without a cloud.
        up, down: bytes a token.
    """

    passes: float = 0.0
    rows: float = 0.0
    steps: float = 0.0
    waits: float = 0.0
    trips: float = 0.0
    up: float = 0.0
    down: float = 0.0

    def moved(self, ledger: Ledger, guided: int, step_ms: float, weight: float = NEWEST) -> Agreement:
        """This, moved towards what a picture spent.

        Args:
            ledger: of a picture that the plan made from its first token to its last.
            guided: rows of one position, 2 with guidance.
            step_ms: a step of the device; 0 where it is not known, and nothing is learned of it.
            weight: of the new picture, 0 to 1.
        """
        count = max(ledger.tokens, 1)
        seen = {
            "passes": ledger.cloud_passes / count,
            "rows": ledger.token_rows / guided / count,
            "steps": ledger.device_ms / step_ms / count if step_ms > 0 else self.steps,
            "waits": max(0.0, ledger.critical_round_trips - self.trips) / count,
            "up": ledger.bytes_up / count,
            "down": ledger.bytes_down / count,
        }
        now = asdict(self)
        return Agreement(trips=self.trips, **{k: now[k] + weight * (v - now[k]) for k, v in seen.items()})


@dataclass(frozen=True)
class Table:
    """Agreement of every plan by its name, and the price of a row where nothing was measured yet.

    Attributes:
        plans: by name.
        row_share: milliseconds of a row of a pass, relative to the pass beside its rows.
    """

    plans: Mapping[str, Agreement]
    row_share: float = 0.03

    def with_plan(self, name: str, agreement: Agreement) -> Table:
        """The same with another row."""
        return Table({**self.plans, name: agreement}, self.row_share)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; :meth:`from_dict` is its inverse."""
        return {"row_share": self.row_share, "plans": {n: asdict(one) for n, one in self.plans.items()}}

    @classmethod
    def from_dict(cls, values: Any, base: Table | None = None) -> Table:
        """A table from its :meth:`to_dict`.

        Args:
            values: rows may be missing, and figures of a row that are 0.
            base: where the missing rows come from.

        Raises:
            InputError: it is no such table; the message names what is wrong.
        """
        known = {field.name for field in fields(Agreement)}
        start = base or cls({})
        if not isinstance(values, dict) or not isinstance(values.get("plans", {}), dict):
            raise InputError(f"{AGREEMENT_FILE} holds no table of plans. Restore the file or remove it.")
        plans = dict(start.plans)
        for name, row in values.get("plans", {}).items():
            if not isinstance(row, dict) or not row.keys() <= known:
                names = ", ".join(sorted(known))
                raise InputError(f"{AGREEMENT_FILE}: plan {name!r} may hold {names} alone.")
            plans[name] = Agreement(**{key: _figure(f"{name}.{key}", value) for key, value in row.items()})
        return cls(plans, _figure("row_share", values.get("row_share", start.row_share)))


def _figure(name: str, value: Any) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        figure = float(value) if good else math.nan
    except OverflowError:  # a whole number of hundreds of digits
        figure = math.inf
    if not 0 <= figure < math.inf:
        raise InputError(f"{AGREEMENT_FILE}: {name} is {str(value)[:40]!r}; it must be a number, 0 or more.")
    return figure
