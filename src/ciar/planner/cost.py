"""The cost model: what a plan would take, from what is known of network, machines and agreement.

Time to the last token is a sum: making the connection and reading the prompt; critical round trips; bytes
on the line; and the work of both sides, which is the longer of the two behind the first draft where the
device drafts on while the cloud computes, and their sum where they wait for each other. It is linear in the
round trip, which is what makes choices monotone in it (see :mod:`ciar.planner.choose`). Text encoding and
pixel decoding are the same whatever the plan, and left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from ciar.planner.agreement import Agreement
from ciar.planner.conditions import Conditions
from ciar.planner.plans import Plan

#: Tokens of a first draft, which the cloud can do nothing before.
FIRST_DRAFT = 8


@dataclass(frozen=True)
class Prediction:
    """What a plan would cost.

    Attributes:
        total_ms: time to the last token.
        cloud_ms: time of the cloud's passes, the reading of the prompt among them.
        device_ms: time of the device's steps.
        passes, rows: of the cloud, beside the reading of the prompt.
        critical: round trips that the device waits for.
        bytes: up and down together.
    """

    total_ms: float
    cloud_ms: float
    device_ms: float
    passes: float
    rows: float
    critical: float
    bytes: float


def predict(plan: Plan, agreement: Agreement, conditions: Conditions) -> Prediction:
    """What a whole picture would cost by a plan."""
    local = plan.placement == "device"
    opening_ms = 0.0 if local else conditions.connect_ms
    prefill_ms = 0.0 if local else conditions.prefill_ms
    return _sum(plan, agreement, conditions, conditions.tokens, agreement.trips, opening_ms, prefill_ms)


def predict_rest(plan: Plan, agreement: Agreement, conditions: Conditions, done: int) -> Prediction:
    """What the rest of a picture would cost that runs by this plan already.

    Args:
        done: tokens that are decided.
    """
    return _sum(plan, agreement, conditions, conditions.tokens - done, 0.0, 0.0, 0.0)


def predict_change(plan: Plan, agreement: Agreement, conditions: Conditions, done: int) -> Prediction:
    """What the rest would cost by this plan on a new session that is given the decided tokens.

    Args:
        done: tokens that are decided; the cloud reads them again in one pass, the device in one block, which
            counts as a step.
    """
    again_ms = conditions.prefill_ms + conditions.pass_ms + done * conditions.row_ms
    start_ms = conditions.connect_ms + (conditions.step_ms if plan.uses_device else 0.0)
    return _sum(plan, agreement, conditions, conditions.tokens - done, agreement.trips, start_ms, again_ms)


def _sum(
    plan: Plan,
    agreement: Agreement,
    conditions: Conditions,
    tokens: int,
    trips: float,
    start_ms: float,
    prefill_ms: float,
) -> Prediction:
    passes, rows = agreement.passes * tokens, agreement.rows * tokens
    work_ms = passes * conditions.pass_ms + rows * conditions.row_ms
    device_ms = agreement.steps * tokens * conditions.step_ms
    critical = trips + agreement.waits * tokens
    sent = (agreement.up + agreement.down) * tokens
    if plan.overlaps and not conditions.together:
        both_ms = max(work_ms, device_ms) + min(FIRST_DRAFT * conditions.step_ms, work_ms, device_ms)
    else:
        both_ms = work_ms + device_ms
    line_ms = critical * conditions.rtt_ms + sent / conditions.bytes_per_ms
    return Prediction(
        start_ms + prefill_ms + line_ms + both_ms,
        work_ms + prefill_ms,
        device_ms,
        passes,
        rows,
        critical,
        sent,
    )
