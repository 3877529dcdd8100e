"""Runs the application on uvicorn: in the foreground for ``ciar serve``, in a thread for tests."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

import uvicorn
from starlette.applications import Starlette

from ciar.errors import CiarError, InputError
from ciar.serving.app import create_app
from ciar.serving.config import ServerConfig
from ciar.serving.logs import log_to_stderr, stop_logging
from ciar.transport.base import Cloud

__all__ = ["BackgroundServer", "ServerConfig", "serve"]

#: How long a background server may take to start or to stop, in seconds.
_START_TIMEOUT_S = 10.0


class _Server(uvicorn.Server):
    """uvicorn, telling when it is ready."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()


def serve(
    cloud: Cloud,
    host: str,
    port: int,
    config: ServerConfig | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until the process is told to stop (Ctrl-C or SIGTERM).

    Args:
        cloud: what opens sessions.
        host: name or address to listen on; ``0.0.0.0`` or ``::`` for all.
        port: 0 takes a free one.
        config: limits and the token.
        on_ready: called with the server's ``ws://`` address once devices can connect.

    Raises:
        InputError: the address cannot be listened on.
    """
    config = config or ServerConfig()
    listening = _listen(host, port)
    url = _url_of(listening)
    handler = log_to_stderr()

    def ready() -> None:
        if on_ready is not None:
            on_ready(url)

    try:
        server = _Server(_uvicorn_config(create_app(cloud, config), config), ready)
        # uvicorn raises the signal again once it has shut down; for Ctrl-C that is this exception.
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
    finally:
        listening.close()
        stop_logging(handler)


class BackgroundServer:
    """A real server on a free port in a thread of this process, as a context manager.

    Args:
        cloud: what opens sessions.
        config: limits and the token.
        host: address to listen on.
        port: 0 takes a free one.

    Attributes:
        url: its ``ws://`` address.
        http_url: its ``http://`` address.
        app: its application.
    """

    def __init__(
        self, cloud: Cloud, config: ServerConfig | None = None, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        config = config or ServerConfig()
        self.app: Starlette = create_app(cloud, config)
        self._listening = _listen(host, port)
        self.url = _url_of(self._listening)
        self.http_url = self.url.replace("ws://", "http://", 1)
        self._ready = threading.Event()
        self._server = _Server(_uvicorn_config(self.app, config), self._ready.set)
        self._thread = threading.Thread(target=self._run, name="ciar-server", daemon=True)

    def _run(self) -> None:
        self._server.run(sockets=[self._listening])

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(_START_TIMEOUT_S):
            self.stop()
            raise CiarError(f"The server at {self.url} did not start within {_START_TIMEOUT_S:g} s.")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Shut down in an orderly way: sockets are closed with 1012. Safe to call twice."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(_START_TIMEOUT_S)
        self._listening.close()


def _uvicorn_config(app: Starlette, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="websockets-sansio",
        # A frame a little over the limit still reaches the application, which can say what is wrong;
        # anything larger is cut off before it is stored.
        ws_max_size=2 * config.max_frame_bytes,
        ws_ping_interval=config.ping_interval_s,
        ws_ping_timeout=config.ping_timeout_s,
        ws_per_message_deflate=False,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(config.shutdown_timeout_s)),
    )


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens, or a sentence that says why there is none.

    Raises:
        InputError: the host is unknown, or the port taken, out of range or not allowed.
    """
    if not 0 <= port <= 65535:
        raise InputError(f"The port must be from 0 to 65535, got {port}.")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise InputError(
            f"The host {host!r} is not known here ({error}). Use 127.0.0.1 or 0.0.0.0."
        ) from error
    family, kind, protocol, _, address = found[0]
    listening = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere this would let two servers share a port
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            sentence = f"Port {port} of {host} is in use. Stop what uses it, or choose another with --port."
        elif error.errno == errno.EACCES:
            sentence = f"Port {port} of {host} needs more rights. Choose one above 1023 with --port."
        elif error.errno == errno.EADDRNOTAVAIL:
            sentence = f"This machine has no address {host}. Use 127.0.0.1 or 0.0.0.0."
        else:
            sentence = f"Port {port} of {host} cannot be listened on ({error.strerror}). Choose another."
        raise InputError(sentence) from error
    return listening


def _url_of(listening: socket.socket) -> str:
    """The address at which a device on this machine reaches a listening socket."""
    host, port = listening.getsockname()[:2]
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"ws://[{local}]:{port}" if ":" in local else f"ws://{local}:{port}"
