"""What a transport is, and what every transport does the same way.

A connection carries frames; :class:`FrameConnection` turns messages into frames and back, counts bytes,
checks what the cloud says against what it announced, and raises the cloud's errors. A transport only
has to move frames. Knows nothing about sockets or models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self

from ciar.errors import CloudUnavailable, ProtocolError
from ciar.protocol.codec import decode, encode
from ciar.protocol.messages import MAX_FRAME_BYTES, Done, Draft, Error, Message, Open, Opened, Patch
from ciar.transport.failures import exception_for

#: Takes the drafts that have come and were not answered yet. Never blocks.
MoreDrafts = Callable[[], Sequence[Draft]]


class CloudSession(Protocol):
    """One picture in the cloud.

    Attributes:
        opened: what to tell the device.
    """

    opened: Opened

    def handle(self, message: Draft, more: MoreDrafts, /) -> Iterable[Patch | Done]:
        """Answer a draft; blocks while it computes. A repeat of a step is answered the same way again.

        Args:
            message: the draft.
            more: takes the drafts that came meanwhile, for strategies whose devices stream; what is not
                taken is answered in its turn.

        Raises:
            CiarError: the draft cannot be answered; the session is over.
        """

    def close(self) -> None:
        """Free everything. Safe to call twice, and from another thread while ``handle`` runs."""


class Cloud(Protocol):
    """Something that opens sessions. Thread-safe.

    Attributes:
        backbone: name of its model.
        weights: digest of its weights, "" when unknown.
    """

    backbone: str
    weights: str

    def open(self, message: Open, /) -> CloudSession:
        """Begin a picture; blocks while it reads the prompt.

        Raises:
            CiarError: the session cannot be opened.
        """


class Connection(Protocol):
    """The device's end of one session.

    Attributes:
        bytes_up: bytes of all frames sent.
        bytes_down: bytes of all frames received.
    """

    bytes_up: int
    bytes_down: int

    def send(self, message: Message) -> None: ...

    def receive(self, timeout_s: float | None = None) -> Message: ...

    def close(self) -> None: ...


class Transport(Protocol):
    """A way to a cloud; ``connect`` begins a session each time it is called."""

    def connect(self) -> Connection: ...


class ReceiveTimeout(CloudUnavailable):
    """Nothing arrived in time. The connection is still open: the message may yet come."""


class FrameConnection(ABC):
    """A :class:`Connection` over anything that moves frames.

    Subclasses implement :meth:`send_frame`, :meth:`receive_frame` and :meth:`close`.
    """

    def __init__(self) -> None:
        self.bytes_up = 0
        self.bytes_down = 0
        self._opened: Opened | None = None
        self._steps_sent = 0

    @abstractmethod
    def send_frame(self, frame: bytes) -> None:
        """Move a frame to the cloud.

        Raises:
            CloudUnavailable: the connection is gone.
        """

    @abstractmethod
    def receive_frame(self, timeout_s: float | None = None) -> bytes:
        """The next frame from the cloud.

        Args:
            timeout_s: how long to wait, in seconds; None is the transport's own limit.

        Raises:
            ReceiveTimeout: nothing arrived in time.
            CloudUnavailable: the connection is gone.
        """

    @abstractmethod
    def close(self) -> None:
        """End the connection; safe to call twice."""

    def abort(self) -> None:
        """End the connection without a farewell, as a crash would. For tests."""
        self.close()

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            InputError: a field of ``Open`` is out of range.
            ProtocolError: another message is not valid, or larger than the cloud accepts.
            CloudUnavailable: the connection is gone.
            CiarError: the cloud had ended the session with an error that was not received yet.
        """
        limit = min(MAX_FRAME_BYTES, self._opened.max_frame_bytes) if self._opened else MAX_FRAME_BYTES
        frame = encode(message, limit=limit)
        try:
            self.send_frame(frame)
        except CloudUnavailable:
            # The cloud says why before it hangs up; its reason is worth more than "connection closed".
            self._raise_waiting_error()
            raise
        self.bytes_up += len(frame)
        if isinstance(message, Draft):
            self._steps_sent = max(self._steps_sent, message.step + 1)

    def receive(self, timeout_s: float | None = None) -> Message:
        """Wait for the next message. An ``Error`` is raised, not returned.

        Args:
            timeout_s: how long to wait, in seconds; None is the transport's own limit, 0 only looks.

        Raises:
            ReceiveTimeout: nothing arrived in time; the connection is still open.
            CloudUnavailable: the connection is gone.
            ProtocolError: the cloud sent something that is not allowed.
            CiarError: the cloud ended the session with this error.
        """
        frame = self.receive_frame(timeout_s)
        self.bytes_down += len(frame)
        message = decode(frame)
        if isinstance(message, Error):
            raise exception_for(message)
        self._check_order(message)
        return message

    def _check_order(self, message: Message) -> None:
        """Hold what the cloud says against what it announced and what it was asked."""
        name = type(message).__name__
        if isinstance(message, Opened):
            if self._opened is not None:
                raise ProtocolError("The cloud opened the session twice. Connect again.")
            self._opened = message
            return
        if not isinstance(message, (Patch, Done)):
            raise ProtocolError(f"The cloud sent {name}, which only a device may send. Connect again.")
        if self._opened is None:
            raise ProtocolError(f"The cloud sent {name} before it opened the session. Connect again.")
        tokens, vocab_size = self._opened.tokens, self._opened.vocab_size
        if message.ids and max(message.ids) >= vocab_size:
            raise ProtocolError(f"The cloud sent an id that is not below {vocab_size}. Connect again.")
        if isinstance(message, Done):
            if len(message.ids) != tokens:
                raise ProtocolError(f"The cloud sent {len(message.ids)} of {tokens} tokens. Connect again.")
            return
        if message.step >= self._steps_sent:
            raise ProtocolError(
                f"The cloud answered draft {message.step}, which was not sent. Connect again."
            )
        if max(message.start + len(message.ids), message.horizon) > tokens:
            raise ProtocolError(f"The cloud's patch goes beyond the {tokens} tokens. Connect again.")

    def _raise_waiting_error(self) -> None:
        """Raise the error that already waits among the received frames, if there is one."""
        while True:
            try:
                frame = self.receive_frame(0)
            except CloudUnavailable:
                return
            self.bytes_down += len(frame)
            message = decode(frame)
            if isinstance(message, Error):
                raise exception_for(message)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class FrameTransport(Protocol):
    """A transport whose connections can be wrapped at the level of frames."""

    def connect(self) -> FrameConnection: ...
