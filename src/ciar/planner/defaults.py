"""The table of agreement that ships: where the planner begins.

Measured on the embedded emoji backbone: means of two pictures of 256 tokens (``a red car`` and ``a smiling
cat with sunglasses``, seed 11), guidance 3, plans as in :data:`ciar.planner.plans.PLANS`; ``ciar-stream``
over 80 ms of a delaying transport, the others in one process, whose counts do not depend on the network. Two
pictures are a beginning, not a measurement of a method; the planner moves these figures with every picture.
"""

from __future__ import annotations

from ciar.planner.agreement import Agreement, Table

#: Bytes a token of plans that listen: one request up, patches of 16 tokens down.
_UP, _DOWN = 1.2, 4.1


def _colocated(passes: float, rows: float) -> Agreement:
    return Agreement(passes, rows, trips=2, up=_UP, down=_DOWN)


DEFAULTS = Table(
    {
        "base": _colocated(1.0, 1.0),
        "scd-8": _colocated(0.46, 3.6),
        "scd-16": _colocated(0.37, 5.8),
        "scd-32": _colocated(0.33, 9.9),
        "scd-64": _colocated(0.32, 18.3),
        "scd-slack-8": _colocated(0.39, 3.1),
        "scd-slack-16": _colocated(0.30, 4.5),
        "scd-slack-32": _colocated(0.23, 6.9),
        "scd-slack-64": _colocated(0.23, 12.5),
        "scd-slack-4-16": _colocated(0.23, 3.6),
        "scd-slack-4-32": _colocated(0.22, 6.7),
        "lossless-16": Agreement(0.45, 4.5, 1.2, 1 / 16, 1, 4.1, 4.2),
        "lossless-32": Agreement(0.35, 6.9, 1.2, 1 / 32, 1, 3.6, 3.6),
        "slack-16": Agreement(0.33, 3.6, 1.15, 1 / 16, 1, 4.1, 4.2),
        "slack-32": Agreement(0.23, 4.2, 1.1, 1 / 32, 1, 3.7, 3.6),
        "ciar-stream": Agreement(0.35, 8.7, 0.8, 0.018, 2, 5.0, 12.8),
        "ciar-stream-slack": Agreement(0.27, 5.3, 0.65, 0.016, 2, 4.7, 8.2),
        "ciar-stream-slack-4": Agreement(0.21, 3.8, 0.65, 0.016, 2, 4.6, 6.4),
        "ciar": Agreement(0.45, 1.0, 1.0, 0.39, 2, 8.2, 11.6),
        "device-only": Agreement(steps=1.0),
    },
    row_share=0.05,
)
