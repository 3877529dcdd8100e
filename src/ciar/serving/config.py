"""Limits and secrets of a server, in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ciar.errors import InputError
from ciar.protocol.messages import MAX_FRAME_BYTES


@dataclass(frozen=True)
class ServerConfig:
    """How a server treats its devices.

    Attributes:
        max_sessions: pictures at once; further ones are told to come back later.
        max_sockets: connections at once, with a session or without; further ones get HTTP 503. None is
            four for each session and 16 more.
        workers: threads that compute; sessions beyond them wait their turn. None is one for each session,
            at most 4.
        token: secret that devices must show; None serves everyone who can reach the port.
        open_timeout_s: a connection without ``Open`` ends after this long.
        idle_timeout_s: a session ends when nothing arrives for this long and nothing is computed.
        linger_s: the same, once the picture is complete.
        send_timeout_s: a device that does not take its answers is given up after this long.
        retry_after_s: when devices that met a full server are told to come back.
        max_frame_bytes: largest frame accepted.
        max_queued_frames: drafts that may wait for their turn in one session.
        max_frames_per_s: lasting rate of frames of one connection; a second's worth may come at once.
        ping_interval_s: how often a device is asked whether it is there.
        ping_timeout_s: a device that does not answer for this long is gone.
        shutdown_timeout_s: how long a stopping server waits for its connections.

    Raises:
        InputError: a limit is out of range.
    """

    max_sessions: int = 8
    max_sockets: int | None = None
    workers: int | None = None
    token: str | None = field(default=None, repr=False)
    open_timeout_s: float = 10.0
    idle_timeout_s: float = 60.0
    linger_s: float = 5.0
    send_timeout_s: float = 10.0
    retry_after_s: float = 2.0
    max_frame_bytes: int = MAX_FRAME_BYTES
    max_queued_frames: int = 64
    max_frames_per_s: float = 2000.0
    ping_interval_s: float = 20.0
    ping_timeout_s: float = 20.0
    shutdown_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("max_sessions", "max_frame_bytes", "max_queued_frames", "max_sockets", "workers"):
            count = getattr(self, name)
            if count is not None and (type(count) is not int or count < 1):
                raise InputError(f"{name} must be a whole number from 1, got {count!r}.")
        if self.max_frame_bytes > MAX_FRAME_BYTES:
            raise InputError(
                f"max_frame_bytes must be at most {MAX_FRAME_BYTES}, got {self.max_frame_bytes}."
            )
        for name in (
            "open_timeout_s",
            "idle_timeout_s",
            "linger_s",
            "send_timeout_s",
            "retry_after_s",
            "max_frames_per_s",
            "ping_interval_s",
            "ping_timeout_s",
            "shutdown_timeout_s",
        ):
            number = getattr(self, name)
            if not (isinstance(number, (int, float)) and math.isfinite(number) and 0 < number <= 1e6):
                raise InputError(f"{name} must be a number above 0 and at most 1000000, got {number!r}.")
        token = self.token
        if token is not None and not (token and token.isascii() and token.isprintable() and " " not in token):
            raise InputError("The access token must be printable ASCII without blanks, and not empty.")

    @property
    def socket_limit(self) -> int:
        """Connections at once."""
        return 4 * self.max_sessions + 16 if self.max_sockets is None else self.max_sockets

    @property
    def worker_count(self) -> int:
        """Threads that compute."""
        return min(4, self.max_sessions) if self.workers is None else self.workers
