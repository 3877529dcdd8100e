"""The relay on real sockets: delay, rate, order, and every way in which a connection can end."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from ciar.network.relay import BackgroundRelay
from ciar.network.shape import Shape

#: What a loaded machine may add to a round trip, in seconds.
SLACK_S = 0.05
TIMEOUT_S = 10.0


@contextmanager
def server(handle: Callable[[socket.socket], None]) -> Iterator[int]:
    """A TCP server that handles connections one after the other in a thread; gives its port."""

    def run() -> None:
        with suppress(OSError):
            while True:
                peer, _ = listener.accept()
                peer.settimeout(TIMEOUT_S)
                with peer, suppress(OSError):
                    handle(peer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def echo(peer: socket.socket) -> None:
    while data := peer.recv(65536):
        peer.sendall(data)


def dial(relay: BackgroundRelay) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", relay.port), timeout=TIMEOUT_S)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def everything(end: socket.socket) -> bytes:
    parts = []
    while data := end.recv(65536):
        parts.append(data)
    return b"".join(parts)


def reset(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


@pytest.mark.parametrize("rtt_ms", [0.0, 10.0, 60.0])
def test_an_answer_takes_the_round_trip(rtt_ms: float) -> None:
    took = []
    with server(echo) as port, BackgroundRelay(Shape(rtt_ms), "127.0.0.1", port) as relay, dial(relay) as end:
        for number in range(8):
            began = time.perf_counter()
            end.sendall(bytes([number]) * 40)
            assert end.recv(100) == bytes([number]) * 40
            took.append(time.perf_counter() - began)
    # The first pays for the handshake as well, which the kernel did not wait for.
    assert took[0] >= 2 * rtt_ms / 1e3
    assert min(took[1:]) >= rtt_ms / 1e3
    assert sorted(took[1:])[3] <= rtt_ms / 1e3 + SLACK_S


@pytest.mark.parametrize("seed", range(3))
def test_bytes_arrive_whole_and_in_order_at_the_rate(seed: int) -> None:
    shape = Shape(rtt_ms=4, jitter_ms=2, megabits_per_s=16, loss=0.0)
    data = random.Random(seed).randbytes(200_000)
    with (
        server(echo) as port,
        BackgroundRelay(shape, "127.0.0.1", port, seed) as relay,
        dial(relay) as end,
    ):
        began = time.perf_counter()
        sender = threading.Thread(target=lambda: (end.sendall(data), end.shutdown(socket.SHUT_WR)))
        sender.start()
        assert everything(end) == data  # and the end of the stream came through both ways
        took = time.perf_counter() - began
        sender.join()
    assert took >= len(data) / shape.bytes_per_s
    assert took <= len(data) / shape.bytes_per_s + 0.4


def test_losses_delay_and_lose_nothing() -> None:
    data = random.Random(5).randbytes(40_000)
    with (
        server(echo) as port,
        BackgroundRelay(Shape(rtt_ms=2, loss=0.2), "127.0.0.1", port) as relay,
        dial(relay) as end,
    ):
        began = time.perf_counter()
        end.sendall(data)
        end.shutdown(socket.SHUT_WR)
        assert everything(end) == data
        assert time.perf_counter() - began > 0.2


def test_the_server_may_close_first_and_the_device_still_speak() -> None:
    heard: list[bytes] = []
    over = threading.Event()

    def handle(peer: socket.socket) -> None:
        peer.sendall(b"bye")
        peer.shutdown(socket.SHUT_WR)
        heard.append(everything(peer))
        over.set()

    with (
        server(handle) as port,
        BackgroundRelay(Shape(rtt_ms=10), "127.0.0.1", port) as relay,
        dial(relay) as end,
    ):
        assert everything(end) == b"bye"
        end.sendall(b"still here")
        end.shutdown(socket.SHUT_WR)
        assert over.wait(TIMEOUT_S)
    assert heard == [b"still here"]


@pytest.mark.parametrize("side", ["device", "cloud"])
def test_a_reset_travels_behind_the_bytes_before_it(side: str) -> None:
    gone = threading.Event()
    heard: list[bytes | type[BaseException]] = []

    def listen(end: socket.socket) -> None:
        try:
            while data := end.recv(100):
                heard.append(data)
            heard.append(b"")
        except ConnectionResetError:
            heard.append(ConnectionResetError)

    def speak(end: socket.socket) -> None:
        end.sendall(b"last words")
        time.sleep(0.1)  # a reset throws away what the kernel has not sent
        reset(end)

    def handle(peer: socket.socket) -> None:
        speak(peer) if side == "cloud" else listen(peer)
        gone.set()

    with server(handle) as port, BackgroundRelay(Shape(rtt_ms=20), "127.0.0.1", port) as relay:
        end = dial(relay)
        with end:
            listen(end) if side == "cloud" else speak(end)
        assert gone.wait(TIMEOUT_S)
        # Whoever comes next is served as ever.
        with dial(relay) as another:
            another.settimeout(TIMEOUT_S)
            if side == "cloud":
                assert another.recv(100) == b"last words"
    assert heard[:2] == [b"last words", ConnectionResetError]


def test_nobody_behind_the_relay() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    nobody = BackgroundRelay(Shape(), "127.0.0.1", port)
    # A relay that reaches nobody resets, or ends in order; it may do so while it is still being dialled.
    with nobody as relay, suppress(ConnectionResetError), dial(relay) as end:
        assert end.recv(1) == b""


def test_closing_the_relay_cuts_what_is_open() -> None:
    with server(echo) as port:
        with BackgroundRelay(Shape(rtt_ms=10), "127.0.0.1", port) as relay:
            end = dial(relay)
            end.sendall(b"x")
            assert end.recv(1) == b"x"
        with end, suppress(ConnectionResetError):  # or an orderly end
            assert end.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        dial(relay)
