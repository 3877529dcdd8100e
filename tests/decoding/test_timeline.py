"""What a picture's clock counts: passes of every kind, steps of every drafter, half a round trip each way."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

from ciar.decoding.strategy import GrowTree, KeepPath, Pass, Propose, Receive, Scatter, Send, TreePass
from ciar.decoding.timeline import Link, Timeline
from ciar.protocol.messages import Draft, Patch

LINK = Link(step_ms=3.0, pass_ms=10.0, row_ms=0.5, round_trip_ms=40.0)


def clock(cloud_op: Any = None, device_op: Any = None, link: Link = LINK) -> tuple[float, Patch]:
    """When a picture of one request is complete, and its patch; with an operation on a side."""
    got: list[Patch] = []

    def device() -> Generator[Any, Any, None]:
        if device_op is not None:
            yield device_op
        yield Send(Draft(0, 0, want=1))
        got.append((yield Receive()))

    def cloud(draft: Draft) -> Generator[Any, Any, None]:
        if cloud_op is not None:
            yield cloud_op
        yield Patch(draft.step, 0, (1,), (0,), 1)

    timeline = Timeline(device(), cloud, link)
    op = timeline.advance()
    while op is not None:
        assert timeline.on_device == (op is device_op)
        op = timeline.advance("reply")
    return timeline.device_ms, got[0]


@pytest.mark.parametrize(
    ("op", "positions"),
    [
        (None, None),
        (Pass(0, []), None),
        (Pass(0, [1, 2, 3]), 3),
        (Scatter((0, 4), [1, 2], torch.ones(2, 16, dtype=torch.bool)), 2),
        (TreePass(2, [5], [7, 8, 9], [-1, -1, 0]), 4),
        (TreePass(2, [5], [], []), 1),
        (GrowTree((1, 2), (-1, -1)), None),
        (KeepPath(2, (0,)), None),
    ],
)
def test_a_pass_takes_its_time_whatever_it_is_over(op: Any, positions: int | None) -> None:
    spent = 0.0 if positions is None else 10.0 + 0.5 * positions
    ended, patch = clock(cloud_op=op)
    assert ended == pytest.approx(40.0 + spent)
    assert patch.cost.cloud_ms == pytest.approx(spent)
    assert patch.cost.passes == (positions is not None)


@pytest.mark.parametrize(
    ("op", "steps"), [(Propose([]), 1), (GrowTree(), 1), (GrowTree((1, 2, 3), (-1, -1, 0)), 3)]
)
def test_a_drafter_takes_its_time(op: Any, steps: int) -> None:
    assert clock(device_op=op)[0] == pytest.approx(40.0 + 3.0 * steps)


@pytest.mark.parametrize(("op", "nodes"), [(GrowTree(), 1), (GrowTree((1, 2, 3), (-1, -1, 0)), 3)])
def test_a_drafter_beside_the_cloud_takes_the_time_it_is_given(op: Any, nodes: int) -> None:
    ended, patch = clock(cloud_op=op, link=Link(3.0, 10.0, 0.5, 40.0, node_ms=2.0))
    assert ended == pytest.approx(40.0 + 2.0 * nodes)
    assert (patch.cost.passes, patch.cost.cloud_ms) == (0, pytest.approx(2.0 * nodes))
