"""The device's end of a WebSocket to ``ciar serve``.

Blocking. Every failure becomes one of ciar's errors, with a sentence that names the address and what to
try; nothing waits for ever: connecting, receiving, closing and a silent network each have a limit.

Source: RFC 6455, https://www.rfc-editor.org/rfc/rfc6455; close codes in its section 7.4.
"""

from __future__ import annotations

import logging
import math
import socket
import ssl
import threading
import time
from contextlib import ExitStack, suppress
from urllib.parse import SplitResult, urlsplit

from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidStatus,
    InvalidURI,
    NegotiationError,
    WebSocketException,
)
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from ciar.errors import CiarError, CloudUnavailable, InputError, ProtocolError, ServerBusy
from ciar.protocol.messages import MAX_FRAME_BYTES, SUBPROTOCOL
from ciar.transport.base import FrameConnection, ReceiveTimeout

#: Where a server keeps its sessions.
SESSION_PATH = "/v1/session"

#: Close codes by which the other side says that what it received was wrong.
_BLAME_CODES = {1002, 1003, 1007, 1008, 1009, 1010}
#: How long to wait for the other side's farewell, in seconds. Nothing is lost when it does not come.
_CLOSE_TIMEOUT_S = 1.0

# The library logs what it also raises; the exception is enough.
_LOGGER = logging.getLogger("ciar.transport.websocket")
_LOGGER.addHandler(logging.NullHandler())


class WebSocketConnection(FrameConnection):
    """One session over a WebSocket. One thread may send while another receives.

    Args:
        socket_stack: owns ``websocket`` and closes it.
        websocket: the open connection.
        address: for error sentences.
        read_timeout_s: how long ``receive`` waits when it is not told otherwise.
    """

    def __init__(
        self, socket_stack: ExitStack, websocket: ClientConnection, address: str, read_timeout_s: float
    ) -> None:
        super().__init__()
        self._stack = socket_stack
        self._websocket = websocket
        self._address = address
        self._read_timeout_s = read_timeout_s
        self._closing = threading.Lock()
        self._is_closed = False

    def send_frame(self, frame: bytes) -> None:
        if self._is_closed:
            raise CloudUnavailable("This session is over. Open a new one on a new connection.")
        try:
            self._websocket.send(frame)
        except ConnectionClosed as closed:
            raise self._lost(closed) from closed

    def receive_frame(self, timeout_s: float | None = None) -> bytes:
        wait_s = self._read_timeout_s if timeout_s is None else timeout_s
        try:
            frame = self._websocket.recv(timeout=wait_s)
        except TimeoutError:
            raise ReceiveTimeout(
                f"The server at {self._address} did not answer within {wait_s:g} s. It may be overloaded; "
                "try again, or allow more time."
            ) from None
        except ConnectionClosed as closed:
            raise self._lost(closed) from closed
        if isinstance(frame, str):
            raise ProtocolError(f"The server at {self._address} sent text; {SUBPROTOCOL} frames are binary.")
        return frame

    def close(self) -> None:
        """End the connection; the other side's farewell, a round trip later, is waited for in a thread.

        The picture is there by then, and whoever asked for it need not wait. A process does not end before
        the farewell has come or is given up.
        """
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        threading.Thread(target=self._say_farewell, name="ciar-farewell").start()

    def _say_farewell(self) -> None:
        with suppress(OSError, WebSocketException):
            self._stack.close()

    def abort(self) -> None:
        with suppress(OSError):
            self._websocket.socket.shutdown(socket.SHUT_RDWR)
        with self._closing:
            self._is_closed = True
        self._say_farewell()

    def _lost(self, closed: ConnectionClosed) -> CiarError:
        """What a closed connection means for the picture."""
        # The cloud's close frame counts; without one the line was cut, or our own end gave up waiting.
        said = closed.rcvd or closed.sent
        code, reason = (said.code, said.reason) if said else (1006, "")
        words = f"code {code}" + (f", {reason!r}" if reason else "")
        if code in _BLAME_CODES:
            return ProtocolError(
                f"The server at {self._address} closed the connection ({words}). "
                "Run the same version of ciar on both sides."
            )
        if code == 1013:
            return ServerBusy(f"The server at {self._address} is busy ({words}). Try again later.")
        return CloudUnavailable(
            f"The connection to {self._address} was lost ({words}). Check that `ciar serve` still runs "
            "there, then try again."
        )


class WebSocketTransport:
    """The way to a cloud behind ``ciar serve``.

    Args:
        url: ``ws://host:port`` or ``wss://host:port``; a path in front of ``/v1/session`` may be given.
        token: access token of the server.
        connect_timeout_s: limit for connecting, in seconds.
        read_timeout_s: limit for one answer, in seconds.
        heartbeat_s: how often to ask a silent server whether it is there; it is given up after twice that.

    Raises:
        InputError: the address, the token or a limit is not usable.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        connect_timeout_s: float = 5.0,
        read_timeout_s: float = 60.0,
        *,
        heartbeat_s: float = 10.0,
    ) -> None:
        self.url = session_url(url)
        self._address = urlsplit(self.url)._replace(path="").geturl()
        if token is not None and not (token and token.isascii() and token.isprintable() and " " not in token):
            raise InputError("The access token must be printable ASCII without blanks; check it for typos.")
        for name, seconds in (
            ("connect_timeout_s", connect_timeout_s),
            ("read_timeout_s", read_timeout_s),
            ("heartbeat_s", heartbeat_s),
        ):
            if not (math.isfinite(seconds) and seconds > 0):
                raise InputError(f"{name} must be a number of seconds above 0, got {seconds}.")
        self._token = token
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._heartbeat_s = heartbeat_s

    def connect(self) -> WebSocketConnection:
        """Begin a session.

        Raises:
            CloudUnavailable: nobody answers, or not as a server of sessions, or the token is refused.
            ServerBusy: the server takes no more connections now.
            ProtocolError: the server does not speak this protocol.
        """
        stack = ExitStack()
        began = time.monotonic()
        try:
            websocket = stack.enter_context(
                connect(
                    self.url,
                    subprotocols=[Subprotocol(SUBPROTOCOL)],
                    compression=None,
                    additional_headers={"Authorization": f"Bearer {self._token}"} if self._token else None,
                    open_timeout=self._connect_timeout_s,
                    ping_interval=self._heartbeat_s,
                    ping_timeout=self._heartbeat_s,
                    close_timeout=_CLOSE_TIMEOUT_S,
                    max_size=MAX_FRAME_BYTES,
                    logger=_LOGGER,
                )
            )
        except (OSError, WebSocketException, ValueError, EOFError) as error:
            raise self._refused(error, time.monotonic() - began) from error
        if websocket.subprotocol != SUBPROTOCOL:
            stack.close()
            raise ProtocolError(
                f"The server at {self._address} does not speak {SUBPROTOCOL}. Connect to a `ciar serve` of "
                "the same version."
            )
        self._limit_silence(websocket.socket)
        return WebSocketConnection(stack, websocket, self._address, self._read_timeout_s)

    def _limit_silence(self, opened: socket.socket) -> None:
        """Give up on sent bytes that nobody confirms; a heartbeat cannot run while a send is stuck."""
        option = getattr(socket, "TCP_USER_TIMEOUT", None)
        if option is not None:
            with suppress(OSError):
                opened.setsockopt(socket.IPPROTO_TCP, option, int(2000 * self._heartbeat_s))

    def _refused(self, error: Exception, waited_s: float) -> CiarError:
        """What a failed attempt to connect means, in words."""
        where = self._address
        match error:
            case InvalidStatus():
                return self._answered(error)
            case NegotiationError():
                return ProtocolError(f"The server at {where} does not speak {SUBPROTOCOL} ({error}).")
            case TimeoutError():
                return CloudUnavailable(
                    f"No server answered at {where} within {waited_s:.0f} s. Check the address, the network, "
                    "and that `ciar serve` runs there."
                )
            case ssl.SSLError():
                return CloudUnavailable(
                    f"No secure connection to {where} ({error.reason or error}). Use ws:// if it has no "
                    "TLS; for a private certificate name its authority in SSL_CERT_FILE."
                )
            case socket.gaierror():
                return CloudUnavailable(
                    f"The host of {where} is not known ({error.strerror}). Check the address."
                )
            case OSError():
                return CloudUnavailable(
                    f"No server answers at {where} ({error.strerror or error}). Start one with `ciar serve` "
                    "or check the address."
                )
            case InvalidURI():
                return InputError(f"{where} is not a usable address ({error}). Use ws://host:port.")
            case InvalidHandshake() | EOFError():
                return CloudUnavailable(
                    f"What answers at {where} is not a ciar server ({error}). Check the address and port; "
                    "start a server with `ciar serve`. A server with TLS needs wss://."
                )
            case _:
                return CloudUnavailable(f"Connecting to {where} failed ({error}). Check the address.")

    def _answered(self, error: InvalidStatus) -> CiarError:
        """What an HTTP answer in place of a WebSocket means."""
        status, where = error.response.status_code, self._address
        if status == 401:
            return CloudUnavailable(f"The server at {where} refused the access token. Give the right one.")
        if status == 503 and "Retry-After" in error.response.headers:
            retry_after_s = 1.0
            with suppress(ValueError):
                retry_after_s = max(0.0, float(error.response.headers["Retry-After"]))
            return ServerBusy(
                f"The server at {where} takes no more connections now. Try again.", retry_after_s
            )
        return CloudUnavailable(
            f"What answers at {where} has no sessions (HTTP {status} at {urlsplit(self.url).path}). Check "
            "the address and port; start a server with `ciar serve`."
        )


def session_url(url: str) -> str:
    """The full address of a server's sessions.

    Args:
        url: ``ws://host[:port][/prefix]``, or ``wss``.

    Returns:
        The address with ``/v1/session`` at its end.

    Raises:
        InputError: it is no such address.
    """
    try:
        parts: SplitResult = urlsplit(url)
        port_is_good = parts.port is None or parts.port > 0
    except ValueError as error:
        raise InputError(f"The address of the cloud is not usable ({error}). Use ws://host:port.") from error
    if parts.scheme not in ("ws", "wss"):
        hint = {"http": "ws", "https": "wss"}.get(parts.scheme)
        better = f"{hint}://{parts.netloc}" if hint and not parts.username else "ws://host:port"
        raise InputError(f"The address of the cloud must begin with ws:// or wss://. Use {better}.")
    if parts.username is not None or parts.password is not None:
        raise InputError("The address of the cloud may not hold a user or password. Give a token instead.")
    if not parts.hostname or not port_is_good or parts.query or parts.fragment:
        raise InputError("The address of the cloud must be a host and a port. Use ws://host:port.")
    if any(character.isspace() or not character.isprintable() for character in url):
        raise InputError("The address of the cloud may not hold blanks. Use ws://host:port.")
    path = parts.path.rstrip("/")
    return parts._replace(path=path if path.endswith(SESSION_PATH) else path + SESSION_PATH).geturl()
