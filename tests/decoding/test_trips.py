"""Round trips by hand: who waited for what."""

from __future__ import annotations

from ciar.decoding.trips import RoundTrips
from ciar.protocol.messages import Draft, Patch


def draft(step: int, start: int, count: int) -> Draft:
    return Draft(step, start, (1,) * count, (False,) * count)


def patch(step: int, start: int, horizon: int) -> Patch:
    count = horizon - start
    return Patch(step, start, (1,) * count, (2,) * count, horizon)


def test_turns_are_all_critical() -> None:
    trips = RoundTrips()
    for step in range(4):
        trips.sent(draft(step, 4 * step, 4))
        trips.received(patch(step, 4 * step, 4 * step + 4), waited=True)
    assert (trips.answered, trips.critical) == (4, 4)


def test_further_patches_of_one_draft_are_no_further_round_trips() -> None:
    trips = RoundTrips()
    trips.sent(Draft(0, 0, want=16))
    trips.received(patch(0, 0, 4), waited=True)
    trips.received(patch(0, 4, 8), waited=True)
    trips.received(patch(0, 8, 16), waited=False)
    assert (trips.answered, trips.critical) == (1, 1)


def test_a_dropped_suffix_is_asked_for_again() -> None:
    """Chains of four of which one stands: every wait is for the draft just sent."""
    trips = RoundTrips()
    for step in range(3):
        trips.sent(draft(step, step, 4))
        trips.received(patch(step, step, step + 1), waited=True)
    assert trips.critical == 3
    trips.sent(draft(3, 3, 4))
    trips.received(patch(3, 3, 3), waited=True)  # nothing stands, the device draws the next one itself
    assert trips.critical == 4


def test_waits_for_drafts_that_were_on_their_way_anyway_are_one_round_trip() -> None:
    trips = RoundTrips()
    for step in range(4):
        trips.sent(draft(step, 4 * step, 4))
    trips.received(patch(0, 0, 3), waited=True)  # the device stands still until the first answer
    trips.received(patch(2, 3, 7), waited=True)
    assert (trips.answered, trips.critical) == (3, 1)
    trips.sent(draft(4, 16, 4))
    trips.received(patch(4, 7, 12), waited=True)  # has seen draft 4 and needed only what was there before
    assert (trips.answered, trips.critical) == (5, 1)
    trips.received(patch(4, 12, 18), waited=True)  # reaches into draft 4
    assert (trips.answered, trips.critical) == (5, 2)


def test_what_came_before_it_was_waited_for_is_not_critical() -> None:
    trips = RoundTrips()
    trips.sent(draft(0, 0, 4))
    trips.received(patch(0, 0, 4), waited=False)
    assert (trips.answered, trips.critical) == (1, 0)
