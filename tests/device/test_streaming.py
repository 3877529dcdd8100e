"""``ciar-stream`` over real messages: every transport, lost connections, dead clouds, honest counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from drive import device_session, opening, picture_of

from ciar.cloud.sessions import Cloud, CloudSession
from ciar.device.session import DeviceSession
from ciar.errors import CloudUnavailable, NumericalError, ProtocolError
from ciar.ledger import Ledger
from ciar.models.bundle import Bundle
from ciar.protocol.messages import Done, Draft, Open, Patch
from ciar.serving.config import ServerConfig
from ciar.serving.run import BackgroundServer
from ciar.transport.base import MoreDrafts, Transport
from ciar.transport.delayed import DelayedTransport
from ciar.transport.faulty import Fault, FaultyTransport
from ciar.transport.inprocess import InProcessTransport
from ciar.transport.threaded import ThreadedTransport
from ciar.transport.websocket import WebSocketTransport

PROMPT = "a smiling cat"


def message_of(seed: int = 3, prefix_rate: float = 0.0, **options: Any) -> Open:
    given = {"burst": 2, "lag": 10, **options}
    return opening(
        PROMPT, "ciar-stream", seed=seed, window=16, prefix_rate=prefix_rate, options=tuple(given.items())
    )


def base_of(cloud: Cloud, seed: int = 3) -> list[int]:
    return picture_of(cloud, opening(PROMPT, seed=seed))[0]


class Slow:
    """A cloud whose passes wait until the device has sent what a test wants it to have sent."""

    def __init__(self, cloud: Cloud, drafts: int) -> None:
        self.backbone, self.weights = cloud.backbone, cloud.weights
        self.cloud, self.drafts = cloud, drafts
        self.seen: list[int] = []

    def open(self, message: Open) -> Slow:
        self.session: CloudSession = self.cloud.open(message)
        self.opened = self.session.opened
        self.came = 0
        return self

    def handle(self, draft: Draft, more: MoreDrafts) -> Iterator[Patch | Done]:
        waiting: list[Draft] = []
        pause = threading.Event()
        for _ in range(400):
            waiting += more()
            if 1 + len(waiting) >= self.drafts or (waiting or [draft])[-1].until:
                break
            pause.wait(0.005)
        self.seen.append(1 + len(waiting))

        def taken() -> list[Draft]:
            found = [*waiting, *more()]
            waiting.clear()
            return found

        yield from self.session.handle(draft, taken)

    def close(self) -> None:
        self.session.close()


@pytest.fixture(scope="module")
def server(tiny_cloud: Cloud) -> Iterator[BackgroundServer]:
    with BackgroundServer(tiny_cloud, ServerConfig()) as running:
        yield running


def transport_of(name: str, cloud: Cloud, server: BackgroundServer) -> Transport:
    ways: dict[str, Any] = {
        "inprocess": lambda: InProcessTransport(cloud),
        "threaded": lambda: ThreadedTransport(cloud),
        "delayed": lambda: DelayedTransport(ThreadedTransport(cloud), 0.02),
        "delayed turns": lambda: DelayedTransport(InProcessTransport(cloud), 0.02),
        "socket": lambda: WebSocketTransport(server.url),
    }
    made: Transport = ways[name]()
    return made


@pytest.mark.parametrize("way", ["inprocess", "threaded", "delayed", "delayed turns", "socket"])
@pytest.mark.parametrize("prefix_rate", [0.0, 0.25])
@pytest.mark.parametrize("pace", ["fixed", "auto"])
def test_exact_on_every_way(
    tiny_bundle: Bundle, tiny_cloud: Cloud, server: BackgroundServer, way: str, prefix_rate: float, pace: str
) -> None:
    wire = transport_of(way, tiny_cloud, server)
    session = device_session(tiny_bundle, wire, message_of(3, prefix_rate, pace=pace))
    result = session.run()
    ledger = result.ledger
    assert result.tokens == base_of(tiny_cloud)
    assert len(ledger.decided) == 16
    assert ledger.counts["prefix"] == 16 * prefix_rate
    assert ledger.discarded == 0
    assert 1 <= ledger.critical_round_trips <= ledger.round_trips == 1 + session.run_state.step
    assert ledger.cloud_passes <= 17
    assert session.run_state.pace.step_ms > 0
    assert session.run_state.pace.pass_ms > 0
    if way.startswith("delayed"):
        assert session.run_state.pace.round_trip_ms >= 19
        assert ledger.critical_round_trips >= 2
    if way == "inprocess":
        # Nothing was ever waited for but the opening and the prefix.
        assert ledger.critical_round_trips == 1 + (prefix_rate > 0)


@pytest.mark.parametrize("policy", ["slack", "trust", "graded"])
def test_other_policies_over_a_socket(tiny_bundle: Bundle, server: BackgroundServer, policy: str) -> None:
    wire = WebSocketTransport(server.url)
    result = device_session(tiny_bundle, wire, message_of(5, policy=policy, uncertain=2), threshold=0.9).run()
    assert len(result.tokens) == len(result.ledger.decided) == 16
    assert (result.ledger.counts["device"] > 0) == (policy == "trust")


def test_the_cloud_takes_what_has_come_before_each_pass(tiny_bundle: Bundle, tiny_cloud: Cloud) -> None:
    slow = Slow(tiny_cloud, 4)
    result = device_session(tiny_bundle, ThreadedTransport(slow), message_of(lag=16)).run()
    assert max(slow.seen) >= 4
    assert result.tokens == base_of(tiny_cloud)
    at_once = device_session(tiny_bundle, InProcessTransport(tiny_cloud), message_of(lag=16)).run()
    assert result.ledger.cloud_passes <= at_once.ledger.cloud_passes


@pytest.mark.parametrize("way", [InProcessTransport, ThreadedTransport])
@pytest.mark.parametrize(("direction", "frame"), [("up", 2), ("up", 4), ("down", 2), ("down", 4)])
def test_a_lost_connection_in_mid_stream_costs_a_prefill(
    tiny_bundle: Bundle, tiny_cloud: Cloud, way: Any, direction: Any, frame: int
) -> None:
    wire = FaultyTransport(way(tiny_cloud), [Fault(direction, frame, "close")])
    session = device_session(tiny_bundle, wire, message_of(prefix_rate=0.125, lag=6))
    result = session.run()
    assert wire.struck
    assert result.tokens == base_of(tiny_cloud)
    counts = result.ledger.counts
    drafted = counts["accepted"] + counts["replaced"] + result.ledger.discarded
    assert result.ledger.device_steps >= drafted - 2  # the last token of each attempt is never fed


@pytest.mark.parametrize(("direction", "frame"), [("up", 2), ("up", 4), ("down", 3)])
def test_what_comes_twice_counts_once(
    tiny_bundle: Bundle, tiny_cloud: Cloud, direction: Any, frame: int
) -> None:
    wire = FaultyTransport(ThreadedTransport(tiny_cloud), [Fault(direction, frame, "duplicate")])
    result = device_session(tiny_bundle, wire, message_of(lag=6)).run()
    assert wire.struck
    assert result.tokens == base_of(tiny_cloud)


class Dying:
    """A cloud that stops answering, fails, or is gone after some drafts."""

    def __init__(self, cloud: Cloud, how: str, after: int) -> None:
        self.backbone, self.weights = cloud.backbone, cloud.weights
        self.cloud, self.how, self.after = cloud, how, after

    def open(self, message: Open) -> Dying:
        self.session = self.cloud.open(message)
        self.opened = self.session.opened
        return self

    def handle(self, draft: Draft, more: MoreDrafts) -> Iterator[Patch | Done]:
        self.after -= 1
        if self.after < 0:
            if self.how == "fails":
                raise NumericalError("NaN at position 7.")
            return  # takes the draft and says nothing
        yield from self.session.handle(draft, more)

    def close(self) -> None:
        self.session.close()


@pytest.mark.parametrize(("how", "error"), [("fails", NumericalError), ("silent", CloudUnavailable)])
def test_a_dead_cloud_in_mid_stream_is_an_error_and_no_hang(
    tiny_bundle: Bundle, tiny_cloud: Cloud, how: str, error: type[Exception]
) -> None:
    wire = ThreadedTransport(Dying(tiny_cloud, how, 1), read_timeout_s=0.1)
    with pytest.raises(error):
        device_session(tiny_bundle, wire, message_of(lag=4), retries=1).run()


def test_a_server_that_stops_in_mid_stream_is_an_error(tiny_bundle: Bundle, tiny_cloud: Cloud) -> None:
    with BackgroundServer(tiny_cloud, ServerConfig()) as server:
        wire = WebSocketTransport(server.url, connect_timeout_s=0.5, read_timeout_s=2.0)

        def stop(done: int, ledger: Ledger) -> None:
            server.stop()

        with pytest.raises(CloudUnavailable):
            device_session(tiny_bundle, wire, message_of(lag=2, burst=1), retries=1).run(stop)


def test_stopping_leaves_what_is_final(tiny_bundle: Bundle, tiny_cloud: Cloud) -> None:
    session = device_session(tiny_bundle, ThreadedTransport(tiny_cloud), message_of(lag=6))
    result = session.run(lambda done, ledger: done < 5)
    assert result.stopped
    assert 5 <= len(result.tokens) == len(result.ledger.decided)
    assert result.tokens == base_of(tiny_cloud)[: len(result.tokens)]
    if len(result.tokens) < 16:
        assert result.ledger.discarded > 0


def test_a_patch_that_promises_more_than_it_holds_is_refused(tiny_bundle: Bundle, tiny_cloud: Cloud) -> None:
    class Boasting(Dying):
        def handle(self, draft: Draft, more: MoreDrafts) -> Iterator[Patch | Done]:
            yield Patch(draft.step, draft.start, (1,), (2,), draft.start + 2)

    def run(cloud: Any) -> DeviceSession:
        session = device_session(tiny_bundle, InProcessTransport(cloud), message_of())
        session.run()
        return session

    with pytest.raises(ProtocolError, match="does not hold the tokens"):
        run(Boasting(tiny_cloud, "", 0))


def test_a_draft_that_leaves_a_gap_is_refused(tiny_cloud: Cloud) -> None:
    session = tiny_cloud.open(message_of())
    list(session.handle(Draft(0, 0, (1, 2), (False, False))))
    with pytest.raises(ProtocolError, match="drafts end at 2"):
        list(session.handle(Draft(1, 4, (1,), (False,))))
