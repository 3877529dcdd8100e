"""A real server on a real socket, with a cloud that has no model."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import msgpack  # type: ignore[import-untyped]
import pytest
from transport.fake_cloud import TOKENS, FakeCloud, opening, picture, run_picture
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from ciar.errors import (
    CloudUnavailable,
    InputError,
    NumericalError,
    ProtocolError,
    RemoteError,
    ServerBusy,
)
from ciar.protocol import SUBPROTOCOL, Cancel, Draft, Error, Opened, Patch, decode, encode
from ciar.serving.config import ServerConfig
from ciar.serving.logs import JsonLines
from ciar.serving.metrics import Metrics
from ciar.serving.run import BackgroundServer, serve
from ciar.transport.inprocess import InProcessTransport
from ciar.transport.websocket import WebSocketConnection, WebSocketTransport

OURS = [Subprotocol(SUBPROTOCOL)]
CONFIG = ServerConfig(max_sessions=64, workers=4, max_frame_bytes=4096, retry_after_s=1.5)


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[FakeCloud, BackgroundServer]]:
    cloud = FakeCloud()
    with BackgroundServer(cloud, CONFIG) as server:
        yield cloud, server


@pytest.fixture
def cloud(shared: tuple[FakeCloud, BackgroundServer]) -> Iterator[FakeCloud]:
    found = shared[0]
    yield found
    if found.gate is not None:
        found.gate.set()
    found.gate, found.failure, found.delay_s, found.open_delay_s = None, None, 0.0, 0.0
    found.begun = threading.Semaphore(0)
    until(lambda: not found.live)


@pytest.fixture
def server(shared: tuple[FakeCloud, BackgroundServer]) -> BackgroundServer:
    return shared[1]


def until(condition: Callable[[], bool], seconds: float = 1.0) -> None:
    """Wait for something that must become true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true within {seconds} s"
        time.sleep(0.005)


def metrics_of(server: BackgroundServer) -> Metrics:
    found = server.app.state.endpoint.metrics
    assert isinstance(found, Metrics)
    return found


def sessions_open(server: BackgroundServer) -> float:
    return metrics_of(server).sessions_open.get()


def begin(server: BackgroundServer, seed: int = 0) -> WebSocketConnection:
    """An open session."""
    connection = WebSocketTransport(server.url).connect()
    connection.send(opening(seed))
    assert isinstance(connection.receive(), Opened)
    return connection


def get(server: BackgroundServer, path: str) -> tuple[int, str, str]:
    with urllib.request.urlopen(server.http_url + path, timeout=5) as answer:
        return answer.status, answer.headers["Content-Type"], answer.read().decode()


def test_a_picture_over_the_socket_is_that_of_the_process_byte_for_byte(
    cloud: FakeCloud, server: BackgroundServer
) -> None:
    here, local = run_picture(InProcessTransport(FakeCloud()), seed=7)
    metrics = metrics_of(server)
    up, down = metrics.bytes.get("up"), metrics.bytes.get("down")
    there, remote = run_picture(WebSocketTransport(server.url), seed=7)
    assert there == here == picture(7)
    # Opened announces the server's own limits, and those of this one are smaller than the defaults.
    opened = Opened("session-0001", TOKENS, 1000)
    announced = len(encode(dataclasses.replace(opened, max_frame_bytes=4096))) - len(encode(opened))
    assert (remote.bytes_up, remote.bytes_down) == (local.bytes_up, local.bytes_down + announced)
    until(lambda: metrics.bytes.get("down") - down == remote.bytes_down)
    assert metrics.bytes.get("up") - up == remote.bytes_up


def test_several_devices_at_once_each_get_their_own_picture(
    cloud: FakeCloud, server: BackgroundServer
) -> None:
    cloud.delay_s = 0.002
    transport = WebSocketTransport(server.url)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda seed: run_picture(transport, seed)[0], range(16)))
    assert found == [picture(seed) for seed in range(16)]
    until(lambda: sessions_open(server) == 0)


def test_dropped_sockets_free_their_sessions(cloud: FakeCloud, server: BackgroundServer) -> None:
    """50 sessions, 25 cut without a farewell and 25 closed: nothing is left (known faults, D3)."""
    with ThreadPoolExecutor(10) as pool:
        connections = list(pool.map(lambda seed: begin(server, seed), range(50)))
    assert sessions_open(server) == len(cloud.live) == 50
    with ThreadPoolExecutor(25) as pool:
        list(pool.map(lambda c: c.abort(), connections[:25]))
        until(lambda: sessions_open(server) == len(cloud.live) == 25)
        list(pool.map(lambda c: c.close(), connections[25:]))
    until(lambda: sessions_open(server) == len(cloud.live) == 0)
    until(lambda: metrics_of(server).sockets_open.get() == 0)
    assert run_picture(WebSocketTransport(server.url), seed=1)[0] == picture(1)


def test_a_socket_that_drops_during_a_draft_frees_its_session_and_the_answer_is_counted_late(
    cloud: FakeCloud, server: BackgroundServer
) -> None:
    late = metrics_of(server).late.get()
    cloud.gate = threading.Event()
    connection = begin(server)
    connection.send(Draft(0, 0, want=1))
    assert cloud.begun.acquire(timeout=5)
    connection.abort()
    until(lambda: sessions_open(server) == 0)
    assert not cloud.live
    cloud.gate.set()
    until(lambda: metrics_of(server).late.get() == late + 1)


def test_dropping_at_any_moment_of_a_draft_leaves_nothing(cloud: FakeCloud, server: BackgroundServer) -> None:
    cloud.delay_s = 0.004

    def drop(trial: int) -> None:
        connection = begin(server, trial)
        connection.send(Draft(0, 0, want=1))
        time.sleep(trial % 20 / 2000)
        connection.abort()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(drop, range(60)))
    until(lambda: sessions_open(server) == len(cloud.live) == 0)
    cloud.delay_s = 0
    assert run_picture(WebSocketTransport(server.url), seed=2)[0] == picture(2)


def test_a_socket_that_drops_while_its_session_opens_frees_it(
    cloud: FakeCloud, server: BackgroundServer
) -> None:
    opens = cloud.opens
    cloud.open_delay_s = 0.2
    connection = WebSocketTransport(server.url).connect()
    connection.send(opening())
    until(lambda: sessions_open(server) == 1)
    connection.abort()
    until(lambda: sessions_open(server) == 0)
    until(lambda: cloud.opens == opens + 1)
    until(lambda: not cloud.live)


def test_cancel_during_a_draft_ends_the_session_at_once(cloud: FakeCloud, server: BackgroundServer) -> None:
    cloud.gate = threading.Event()
    with begin(server) as connection:
        connection.send(Draft(0, 0, want=1))
        assert cloud.begun.acquire(timeout=5)
        connection.send(Cancel())
        until(lambda: sessions_open(server) == 0)
        assert not cloud.live
        with pytest.raises(CloudUnavailable, match="1000"):
            connection.receive(2)


def test_pings_are_answered_while_a_draft_is_computed(cloud: FakeCloud, server: BackgroundServer) -> None:
    """A pass in the event loop would starve the heartbeat and end in 1011 (known faults, D4)."""
    cloud.gate = threading.Event()
    with begin(server) as connection:
        connection.send(Draft(0, 0, want=1))
        assert cloud.begun.acquire(timeout=5)
        for _ in range(3):
            assert connection._websocket.ping().wait(0.5)
        assert get(server, "/livez")[0] == 200
        cloud.gate.set()
        assert isinstance(connection.receive(), Patch)


def test_a_heartbeat_shorter_than_a_pass_does_not_end_the_session() -> None:
    config = ServerConfig(ping_interval_s=0.1, ping_timeout_s=0.1)
    with (
        BackgroundServer(FakeCloud(delay_s=0.6), config) as server,
        WebSocketTransport(server.url, heartbeat_s=0.1).connect() as connection,
    ):
        connection.send(opening())
        connection.receive()
        connection.send(Draft(0, 0, want=1))
        assert isinstance(connection.receive(), Patch)


def test_drafts_may_be_streamed_and_are_answered_in_order(cloud: FakeCloud, server: BackgroundServer) -> None:
    with begin(server, 3) as connection:
        for step in range(TOKENS):
            connection.send(Draft(step, step, want=1))
        patches = [connection.receive() for _ in range(TOKENS)]
    assert [patch.step for patch in patches if isinstance(patch, Patch)] == list(range(TOKENS))


def test_a_repeated_step_is_computed_once(cloud: FakeCloud, server: BackgroundServer) -> None:
    passes = cloud.passes
    with begin(server) as connection:
        connection.send(Draft(0, 0, want=2))
        connection.send(Draft(0, 0, want=2))
        assert connection.receive() == connection.receive()
    assert cloud.passes == passes + 1


def test_a_full_server_says_busy_at_once_and_has_room_again_later() -> None:
    """Five devices, two places: three are told when to come back, none hangs (known faults, D6)."""
    with BackgroundServer(FakeCloud(), ServerConfig(max_sessions=2, retry_after_s=1.5)) as server:
        with ExitStack() as stack:
            connections = [stack.enter_context(WebSocketTransport(server.url).connect()) for _ in range(5)]
            waits_s: list[float] = []
            for connection in connections:
                connection.send(opening())
                try:
                    connection.receive(2)
                except ServerBusy as error:
                    waits_s.append(error.retry_after_s)
            assert waits_s == [1.5] * 3
        until(lambda: sessions_open(server) == 0)
        assert run_picture(WebSocketTransport(server.url), seed=1)[0] == picture(1)
        assert metrics_of(server).errors.get("busy") == 3


def test_too_many_sockets_are_refused_before_they_cost_anything() -> None:
    config = ServerConfig(max_sockets=2, retry_after_s=3.0)
    with BackgroundServer(FakeCloud(), config) as server, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(WebSocketTransport(server.url).connect())
        with pytest.raises(ServerBusy) as caught:
            WebSocketTransport(server.url).connect()
        assert caught.value.retry_after_s == 3.0


@pytest.mark.parametrize("offer", [None, ["ciar.v0"], ["chat", "ciar.v2"]])
def test_a_client_without_our_subprotocol_is_told_so(
    offer: list[str] | None, cloud: FakeCloud, server: BackgroundServer
) -> None:
    url = server.url + "/v1/session"
    with connect(url, subprotocols=offer) as websocket, pytest.raises(ConnectionClosed) as caught:  # type: ignore[arg-type]
        websocket.recv(timeout=2)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1002
    assert SUBPROTOCOL in caught.value.rcvd.reason


def test_the_token_is_asked_for() -> None:
    with BackgroundServer(FakeCloud(), ServerConfig(token="s3cret-token")) as server:
        for wrong in (None, "s3cret", "s3cret-token-and-more", "S3cret-token"):
            with pytest.raises(CloudUnavailable, match="token"):
                WebSocketTransport(server.url, token=wrong).connect()
        tokens, _ = run_picture(WebSocketTransport(server.url, token="s3cret-token"), seed=1)
        assert tokens == picture(1)
        url = server.url + "/v1/session"
        with connect(url, subprotocols=[*OURS, Subprotocol("ciar.token.s3cret-token")]) as websocket:
            assert websocket.subprotocol == SUBPROTOCOL
        guess = [*OURS, Subprotocol("ciar.token.guess")]
        with pytest.raises(InvalidStatus, match="401"), connect(url, subprotocols=guess):
            pass
        assert metrics_of(server).errors.get("token") == 5
        assert get(server, "/livez")[0] == 200
        assert "s3cret" not in repr(ServerConfig(token="s3cret-token"))


BAD_FRAMES: list[tuple[bytes | str, int]] = [
    (b"", 1002),
    (b"\x00" * 10, 1002),
    (b"\xff" * 300, 1002),
    (b"\x91" * 3000, 1002),
    ("hello", 1003),
    (msgpack.packb([2, 0]), 1002),
    (encode(Patch(0, 0, (1,), (0,), 1)), 1002),
    (encode(Draft(5, 0, want=1)), 1002),
    (b"\x00" * 5000, 1009),
]


@pytest.mark.parametrize(
    ("frame", "code", "is_open"),
    [(frame, code, is_open) for frame, code in BAD_FRAMES for is_open in (False, True)]
    + [(encode(opening()), 1002, True)],
    ids=lambda part: repr(part)[:20],
)
def test_bad_frames_get_an_error_and_the_server_lives_on(
    frame: bytes | str, code: int, is_open: bool, cloud: FakeCloud, server: BackgroundServer
) -> None:
    with connect(server.url + "/v1/session", subprotocols=OURS) as websocket:
        if is_open:
            websocket.send(encode(opening()))
            assert isinstance(decode(websocket.recv(timeout=2)), Opened)  # type: ignore[arg-type]
        websocket.send(frame)
        error = decode(websocket.recv(timeout=2))  # type: ignore[arg-type]
        assert isinstance(error, Error)
        assert error.code == "protocol"
        assert error.message.endswith(".")
        with pytest.raises(ConnectionClosed) as caught:
            websocket.recv(timeout=2)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == code
    until(lambda: sessions_open(server) == 0)
    assert run_picture(WebSocketTransport(server.url), seed=3)[0] == picture(3)


def test_a_huge_frame_is_cut_off_before_it_is_stored(cloud: FakeCloud, server: BackgroundServer) -> None:
    with connect(server.url + "/v1/session", subprotocols=OURS) as websocket:
        with suppress(ConnectionClosed):  # the cut may come while this is still being sent
            websocket.send(b"\x00" * 3_000_000)
        with pytest.raises(ConnectionClosed) as caught:
            websocket.recv(timeout=2)
    assert caught.value.rcvd is None or caught.value.rcvd.code == 1009
    assert run_picture(WebSocketTransport(server.url), seed=3)[0] == picture(3)


def test_a_flood_of_drafts_is_stopped(cloud: FakeCloud, server: BackgroundServer) -> None:
    cloud.gate = threading.Event()
    with begin(server) as connection:
        for step in range(CONFIG.max_queued_frames + 2):
            connection._websocket.send(encode(Draft(step, 0, want=1)))
        with pytest.raises(ProtocolError, match="messages wait"):
            connection.receive(2)


def test_a_rate_limit_holds_but_lets_bursts_through() -> None:
    config = ServerConfig(max_frames_per_s=5.0)
    with BackgroundServer(FakeCloud(), config) as server, begin(server) as connection:
        for _ in range(4):  # with Open, five at once
            connection.send(Draft(0, 0, want=1))
            connection.receive()
        time.sleep(0.25)  # time enough for one more
        connection.send(Draft(0, 0, want=1))
        assert isinstance(connection.receive(2), Patch)
        for _ in range(3):
            connection._websocket.send(encode(Draft(0, 0, want=1)))
        with pytest.raises(ProtocolError, match="faster than 5"):
            connection.receive(2)


@pytest.mark.parametrize(
    ("failure", "code", "expected"),
    [
        (NumericalError("NaN at position 3."), "numerical", NumericalError),
        (InputError("No."), "input", InputError),
        (RuntimeError("/secret/path"), "internal", RemoteError),
    ],
)
def test_failures_of_the_cloud_reach_the_device(
    failure: Exception, code: str, expected: type[Exception], cloud: FakeCloud, server: BackgroundServer
) -> None:
    told = metrics_of(server).errors.get(code)
    cloud.failure = failure
    with begin(server) as connection:
        connection.send(Draft(0, 0, want=1))
        with pytest.raises(expected) as caught:
            connection.receive(2)
        assert "secret" not in str(caught.value)
        # The reason is kept for whoever sends on, however late.
        until(lambda: sessions_open(server) == 0)
    assert metrics_of(server).errors.get(code) == told + 1
    assert not cloud.live


def test_other_versions_and_bad_prompts_are_refused(cloud: FakeCloud, server: BackgroundServer) -> None:
    opens = cloud.opens
    for message, expected, match in (
        (dataclasses.replace(opening(), backbone="anole"), ProtocolError, "backbone fake"),
        (dataclasses.replace(opening(), weights="w2"), ProtocolError, "same version"),
        (opening(prompt=" "), InputError, "empty"),
    ):
        with WebSocketTransport(server.url).connect() as connection:
            connection.send(message)
            with pytest.raises(expected, match=match):
                connection.receive(2)
    assert cloud.opens == opens


def test_silent_devices_are_let_go() -> None:
    config = ServerConfig(open_timeout_s=0.2, idle_timeout_s=0.2, linger_s=0.1)
    with BackgroundServer(FakeCloud(), config) as server:
        silent = WebSocketTransport(server.url).connect()
        with silent, pytest.raises(CloudUnavailable, match="Send Open"):
            silent.receive(2)
        with begin(server) as connection:
            with pytest.raises(CloudUnavailable, match="with the history"):
                connection.receive(2)
            until(lambda: sessions_open(server) == 0)
        with begin(server) as connection:
            connection.send(Draft(0, 0, want=TOKENS))
            connection.receive(), connection.receive()
            with pytest.raises(CloudUnavailable, match="1000"):
                connection.receive(2)
        until(lambda: metrics_of(server).endings.get("idle") == 2)
        assert metrics_of(server).endings.get("done") == 1


def test_a_long_pass_is_not_idleness() -> None:
    config = ServerConfig(idle_timeout_s=0.1)
    with BackgroundServer(FakeCloud(delay_s=0.4), config) as server, begin(server) as connection:
        connection.send(Draft(0, 0, want=1))
        assert isinstance(connection.receive(2), Patch)


def test_stopping_closes_sockets_with_1012_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """A close in the middle of a verify must be orderly (known faults, D2)."""
    cloud = FakeCloud()
    cloud.gate = threading.Event()
    with caplog.at_level(logging.INFO), BackgroundServer(cloud) as server:
        idle, computing = begin(server, 1), begin(server, 2)
        computing.send(Draft(0, 0, want=1))
        assert cloud.begun.acquire(timeout=5)
        began = time.monotonic()
        server.stop()
        for connection in (idle, computing):
            with pytest.raises(CloudUnavailable, match="1012"):
                connection.receive(2)
            connection.close()
        assert time.monotonic() - began < 3
        assert not cloud.live
        cloud.gate.set()
    assert metrics_of(server).endings.get("shutdown") == 2
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
    with pytest.raises(CloudUnavailable, match="ciar serve"):
        WebSocketTransport(server.url).connect()


SERVER_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from fake_cloud import FakeCloud
from ciar.serving.run import serve
serve(FakeCloud(delay_s=30), "127.0.0.1", 0, None, lambda url: print(url, flush=True))
"""


def test_a_killed_server_is_noticed_at_once_and_another_takes_over(
    cloud: FakeCloud, server: BackgroundServer
) -> None:
    folder = str(Path(__file__).parents[1] / "transport")
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER_PROGRAM, folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with WebSocketTransport(url).connect() as connection:
            connection.send(opening(9))
            connection.receive()
            connection.send(Draft(0, 0, want=4))
            process.kill()
            began = time.monotonic()
            with pytest.raises(CloudUnavailable, match=re.escape(url)):
                connection.receive()
            assert time.monotonic() - began < 2
            with pytest.raises(CloudUnavailable):
                connection.send(Draft(1, 4, want=4))
    finally:
        process.kill()
        process.communicate()
    # What was decided so far goes on elsewhere.
    with WebSocketTransport(server.url).connect() as connection:
        connection.send(opening(9, history=picture(9)[:4]))
        connection.receive()
        connection.send(Draft(0, 4, want=TOKENS - 4))
        patch = connection.receive()
        assert isinstance(patch, Patch)
        assert patch.ids == picture(9)[4:]


def test_serve_stops_on_a_signal_and_logs_json_without_prompts() -> None:
    folder = str(Path(__file__).parents[1] / "transport")
    program = SERVER_PROGRAM.replace("delay_s=30", "delay_s=0")
    process = subprocess.Popen(
        [sys.executable, "-c", program, folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        run_picture(WebSocketTransport(url), seed=1)
        with WebSocketTransport(url).connect() as connection:
            connection.send(opening(prompt="a secret wish"))
            connection.receive()
            process.send_signal(2)
            with pytest.raises(CloudUnavailable, match="1012"):
                connection.receive(5)
        _, logs = process.communicate(timeout=10)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0
    events = [json.loads(line) for line in logs.splitlines()]
    assert [event["event"] for event in events if event["level"] != "info"] == []
    assert {event["session"] for event in events} == {"session-0001", "session-0002"}
    assert "secret" not in logs
    assert "Traceback" not in logs


def test_logs_name_errors_but_never_quote_them() -> None:
    try:
        raise RuntimeError("a secret wish")
    except RuntimeError as error:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "failed", None, (type(error), error, None))
    line = JsonLines().format(record)
    assert json.loads(line)["error"] == "RuntimeError"
    assert "secret" not in line


def test_health_metrics_and_the_page(cloud: FakeCloud, server: BackgroundServer) -> None:
    run_picture(WebSocketTransport(server.url), seed=1)
    until(lambda: sessions_open(server) == 0)
    assert get(server, "/livez") == (200, "text/plain; charset=utf-8", "ok\n")
    status, kind, body = get(server, "/readyz")
    ready = json.loads(body)
    assert (status, kind) == (200, "application/json")
    assert (ready["ready"], ready["backbone"], ready["weights"], ready["sessions"]) == (True, "fake", "w1", 0)
    _, kind, page = get(server, "/")
    assert kind.startswith("text/html")
    assert f"ciar generate --cloud {server.url}" in page
    _, kind, text = get(server, "/metrics")
    assert kind.startswith("text/plain; version=0.0.4")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values["ciar_sessions_open"] == "0"
    assert float(values['ciar_answer_seconds_count{message="draft"}']) >= 4
    assert (
        values['ciar_answer_seconds_bucket{message="draft",le="+Inf"}']
        == (values['ciar_answer_seconds_count{message="draft"}'])
    )
    assert float(values["ciar_passes_total"]) >= 4
    assert set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)) >= {
        "ciar_frames_total", "ciar_bytes_total", "ciar_errors_total", "ciar_late_answers_total",
    }  # fmt: skip


def test_addresses_that_cannot_be_listened_on_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"Port {port} of 127.0.0.1 is in use"):
            serve(FakeCloud(), "127.0.0.1", port)
    for host, port, match in (("no.such.host.invalid", 0, "not known"), ("127.0.0.1", 70000, "65535")):
        with pytest.raises(InputError, match=match):
            BackgroundServer(FakeCloud(), host=host, port=port)


@pytest.mark.parametrize(
    "change",
    [
        {"max_sessions": 0}, {"workers": 0}, {"max_sessions": 1.5}, {"idle_timeout_s": 0}, {"token": ""},
        {"token": "two words"}, {"max_frame_bytes": 1 << 30}, {"ping_timeout_s": float("nan")},
    ],
)  # fmt: skip
def test_impossible_limits_are_refused(change: dict[str, float | str]) -> None:
    with pytest.raises(InputError, match=next(iter(change)).replace("token", "token|access")):
        ServerConfig(**change)  # type: ignore[arg-type]
