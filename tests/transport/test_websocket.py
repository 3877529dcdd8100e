"""The device's end of the socket: every way in which a server can fail is a clear error, in time."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from transport.fake_cloud import opening
from websockets.exceptions import ConnectionClosedOK
from websockets.http11 import Request
from websockets.server import ServerProtocol
from websockets.sync.server import ServerConnection
from websockets.sync.server import serve as serve_websocket

from ciar.errors import CiarError, CloudUnavailable, InputError, NumericalError, ProtocolError, ServerBusy
from ciar.protocol import SUBPROTOCOL, Cost, Done, Draft, Error, Opened, Patch, encode
from ciar.transport.base import ReceiveTimeout
from ciar.transport.websocket import WebSocketTransport, session_url

OPENED = encode(Opened("s", 16, 1000))


@contextmanager
def speaking(
    handler: Callable[[ServerConnection], None],
    subprotocol: str = SUBPROTOCOL,
    context: ssl.SSLContext | None = None,
) -> Iterator[str]:
    """A WebSocket server that does what a test tells it to."""
    offers = [subprotocol]
    with serve_websocket(handler, "127.0.0.1", 0, subprotocols=offers, ssl=context) as server:  # type: ignore[arg-type]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"{'wss' if context else 'ws'}://localhost:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def listening(serve_one: Callable[[socket.socket], None]) -> Iterator[str]:
    """A TCP server for one connection."""

    def run() -> None:
        with suppress(OSError):
            peer, _ = listener.accept()
            with peer:
                serve_one(peer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def wait_for(stop: threading.Event) -> None:
    """Say nothing for as long as the test likes."""
    stop.wait(5)


def quickly(action: Callable[[], object], expected: type[CiarError], seconds: float = 2.0) -> str:
    """The sentence of the error that an action must raise in time."""
    began = time.monotonic()
    with pytest.raises(expected) as caught:
        action()
    assert time.monotonic() - began < seconds
    assert str(caught.value).endswith(".")
    return str(caught.value)


@pytest.mark.parametrize(
    ("url", "full"),
    [
        ("ws://a:1", "ws://a:1/v1/session"),
        ("ws://a", "ws://a/v1/session"),
        ("wss://a:1/", "wss://a:1/v1/session"),
        ("ws://a:1/v1/session", "ws://a:1/v1/session"),
        ("wss://a/behind/proxy/", "wss://a/behind/proxy/v1/session"),
        ("ws://[::1]:8765", "ws://[::1]:8765/v1/session"),
    ],
)
def test_addresses(url: str, full: str) -> None:
    assert session_url(url) == full
    assert session_url(full) == full


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("http://a:1", "Use ws://a:1"),
        ("https://a", "Use wss://a"),
        ("localhost:8765", "ws://"),
        ("", "ws://"),
        ("ws://", "host"),
        ("ws://a:0", "host"),
        ("ws://a:99999", "ws://host:port"),
        ("ws://a:b", "ws://host:port"),
        ("ws://[::1", "ws://host:port"),
        ("ws://a b", "blanks"),
        ("ws://a?x=1", "host"),
        ("ws://user:secret@a", "token"),
    ],
)
def test_unusable_addresses_are_refused_before_anything_is_tried(url: str, match: str) -> None:
    with pytest.raises(InputError, match=match) as caught:
        WebSocketTransport(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "käse"])
def test_unusable_tokens_are_refused(token: str) -> None:
    with pytest.raises(InputError, match="token"):
        WebSocketTransport("ws://a", token=token)


@pytest.mark.parametrize("limit_s", [0, -1, float("nan"), float("inf")])
def test_unusable_limits_are_refused(limit_s: float) -> None:
    with pytest.raises(InputError, match="read_timeout_s"):
        WebSocketTransport("ws://a", read_timeout_s=limit_s)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    sentence = quickly(WebSocketTransport(f"ws://127.0.0.1:{port}").connect, CloudUnavailable)
    assert f"ws://127.0.0.1:{port}" in sentence
    assert "ciar serve" in sentence


def test_the_host_is_unknown() -> None:
    sentence = quickly(WebSocketTransport("ws://no-such-host.invalid:1").connect, CloudUnavailable, 6)
    assert "no-such-host.invalid" in sentence


def test_a_listener_that_never_answers_is_given_up_in_time() -> None:
    stop = threading.Event()
    with listening(lambda peer: wait_for(stop)) as url:
        sentence = quickly(WebSocketTransport(url, connect_timeout_s=0.3).connect, CloudUnavailable)
        stop.set()
    assert "ciar serve" in sentence


def test_a_listener_that_is_no_web_server() -> None:
    def answer(peer: socket.socket) -> None:
        peer.recv(100)
        peer.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

    with listening(answer) as url:
        assert "not a ciar server" in quickly(WebSocketTransport(url).connect, CloudUnavailable)


def test_a_listener_that_hangs_up() -> None:
    with listening(lambda peer: None) as url:
        quickly(WebSocketTransport(url).connect, CloudUnavailable)


def test_tls_where_there_is_none() -> None:
    def answer(peer: socket.socket) -> None:
        peer.recv(100)
        peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with listening(answer) as url:
        secure = WebSocketTransport(url.replace("ws://", "wss://"))
        assert "Use ws://" in quickly(secure.connect, CloudUnavailable)


@pytest.mark.parametrize("status", [200, 403, 404, 426, 500, 503])
def test_a_web_server_without_sessions(status: int) -> None:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        transport = WebSocketTransport(f"ws://127.0.0.1:{server.server_port}")
        sentence = quickly(transport.connect, CloudUnavailable)
        thread.join()
    assert f"HTTP {status}" in sentence


@pytest.mark.parametrize("subprotocol", ["ciar.v2", "chat"])
def test_a_server_of_another_protocol(subprotocol: str) -> None:
    offered: list[str] = []

    def accept_anything(connection: ServerConnection, offers: object) -> None:
        offered.extend(offers)  # type: ignore[arg-type]

    with serve_websocket(
        lambda connection: None,
        "127.0.0.1",
        0,
        subprotocols=[subprotocol],  # type: ignore[list-item]
        select_subprotocol=accept_anything,
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        assert SUBPROTOCOL in quickly(WebSocketTransport(url).connect, ProtocolError)
        server.shutdown()
        thread.join()
    assert offered == [SUBPROTOCOL]


def test_the_token_travels_in_a_header() -> None:
    seen: list[str | None] = []

    def handler(connection: ServerConnection) -> None:
        request = connection.request
        assert isinstance(request, Request)
        seen.append(request.headers.get("Authorization"))

    with speaking(handler) as url:
        for token in ("abc", None):
            with WebSocketTransport(url, token=token).connect() as connection:
                quickly(connection.receive, CloudUnavailable)  # the handler is through
    assert seen == ["Bearer abc", None]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("text", ProtocolError),
        (b"", ProtocolError),
        (b"\xc1", ProtocolError),
        (encode(Patch(0, 0, (1,), (0,), 1)), ProtocolError),
        (encode(Error("busy", "Full.", 2.0)), ServerBusy),
        (encode(Error("numerical", "NaN.")), NumericalError),
        (b"\x00" * 2_000_000, ProtocolError),
    ],
    ids=lambda part: repr(part)[:20],
)
def test_what_a_server_says_is_checked(said: bytes | str, expected: type[CiarError]) -> None:
    def handler(connection: ServerConnection) -> None:
        connection.send(said)
        connection.recv(timeout=2)

    with speaking(handler) as url, WebSocketTransport(url).connect() as connection:
        quickly(connection.receive, expected)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (1000, CloudUnavailable),
        (1001, CloudUnavailable),
        (1011, CloudUnavailable),
        (1012, CloudUnavailable),
        (1013, ServerBusy),
        (1002, ProtocolError),
        (1008, ProtocolError),
        (1009, ProtocolError),
    ],
)
def test_what_a_closing_server_means(code: int, expected: type[CiarError]) -> None:
    with speaking(lambda c: c.close(code, "because")) as url, WebSocketTransport(url).connect() as connection:
        sentence = quickly(connection.receive, expected)
        assert "because" in sentence
        assert str(code) in sentence
        quickly(lambda: connection.send(opening()), expected)


def test_an_error_before_the_close_is_what_a_later_send_raises() -> None:
    def handler(connection: ServerConnection) -> None:
        connection.send(OPENED)
        connection.send(encode(Error("numerical", "NaN at position 3.")))
        connection.close(1011)

    with speaking(handler) as url, WebSocketTransport(url).connect() as connection:
        time.sleep(0.1)
        assert quickly(lambda: connection.send(opening()), NumericalError) == "NaN at position 3."


def test_a_line_that_is_cut() -> None:
    def handler(connection: ServerConnection) -> None:
        connection.send(OPENED)
        connection.recv()
        connection.socket.shutdown(socket.SHUT_RDWR)

    with speaking(handler) as url, WebSocketTransport(url).connect() as connection:
        connection.receive()
        connection.send(Draft(0, 0, want=1))
        assert "lost" in quickly(connection.receive, CloudUnavailable)
        quickly(lambda: connection.send(Draft(1, 1, want=1)), CloudUnavailable)


def test_a_timeout_leaves_the_connection_usable() -> None:
    go_on = threading.Event()

    def handler(connection: ServerConnection) -> None:
        connection.send(OPENED)
        connection.recv()
        go_on.wait(5)
        connection.send(encode(Done((1,) * 16, Cost())))
        connection.recv()

    with speaking(handler) as url, WebSocketTransport(url, read_timeout_s=0.1).connect() as connection:
        connection.receive()
        connection.send(Draft(0, 0, want=1))
        assert "0.1 s" in quickly(connection.receive, ReceiveTimeout)
        quickly(lambda: connection.receive(0), ReceiveTimeout, 0.1)
        go_on.set()
        assert isinstance(connection.receive(2), Done)


def black_hole(peer: socket.socket, stop: threading.Event) -> None:
    """Complete the handshake, then neither answer pings nor close."""
    server = ServerProtocol(subprotocols=[SUBPROTOCOL])  # type: ignore[list-item]
    while not (events := server.events_received()):
        server.receive_data(peer.recv(65536))
    request = events[0]
    assert isinstance(request, Request)
    server.send_response(server.accept(request))
    peer.sendall(b"".join(server.data_to_send()))
    stop.wait(10)


def test_a_network_that_swallows_everything_is_given_up() -> None:
    """No endless waiting when nothing comes back, not even a pong (known faults, D4)."""
    stop = threading.Event()
    with listening(lambda peer: black_hole(peer, stop)) as url:
        connection = WebSocketTransport(url, heartbeat_s=0.3).connect()
        sentence = quickly(connection.receive, CloudUnavailable, 2 * 0.3 + 1.5)
        assert url in sentence
        began = time.monotonic()
        connection.close()
        assert time.monotonic() - began < 0.5
        stop.set()


def test_closing_says_farewell_and_waits_for_none() -> None:
    """Nobody answers: closing is over at once, and the socket is after a second."""
    stop = threading.Event()
    rest: list[bytes] = []

    def silent(peer: socket.socket) -> None:
        black_hole(peer, stop)
        peer.settimeout(5)
        while rest[-1:] != [b""]:
            rest.append(peer.recv(100))

    with listening(silent) as url:
        connection = WebSocketTransport(url).connect()
        began = time.monotonic()
        connection.close()
        connection.close()
        assert time.monotonic() - began < 0.5
        with pytest.raises(CloudUnavailable, match="is over"):
            connection.send(opening())
        stop.set()
    assert rest[0][0] == 0x88  # a last frame that closes (RFC 6455, section 5.2)
    assert rest[-1] == b""


def test_a_farewell_arrives_and_what_came_before_it_counts() -> None:
    told = threading.Event()

    def handler(connection: ServerConnection) -> None:
        connection.send(OPENED)
        with pytest.raises(ConnectionClosedOK):
            connection.recv()
        told.set()

    with speaking(handler) as url:
        connection = WebSocketTransport(url).connect()
        connection.receive()
        connection.close()
        assert connection.bytes_down == len(OPENED)
        assert told.wait(5)


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost "
        f"-addext subjectAltName=DNS:localhost -out {certificate} -keyout {key}"
    )
    try:
        subprocess.run(command.split(), check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs the openssl command")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def handler(connection: ServerConnection) -> None:
        connection.send(OPENED)
        connection.recv()

    with speaking(handler, context=context) as url:
        assert "SSL_CERT_FILE" in quickly(WebSocketTransport(url).connect, CloudUnavailable)
        plain = WebSocketTransport(url.replace("wss://", "ws://"))
        assert "wss://" in quickly(plain.connect, CloudUnavailable, 6)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with WebSocketTransport(url).connect() as connection:
            assert isinstance(connection.receive(), Opened)
