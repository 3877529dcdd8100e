"""The cloud's end of one session, whatever carries its messages.

Checks that messages come in order and fit the session, hands them to the cloud, and turns every failure
into an ``Error``. The in-process transport and the server both use it, so both behave alike. Blocking,
no I/O; knows neither sockets nor models.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace

from ciar.errors import ProtocolError
from ciar.protocol.codec import check
from ciar.protocol.messages import MAX_FRAME_BYTES, Done, Draft, Message, Open, Opened
from ciar.transport.base import Cloud, CloudSession
from ciar.transport.failures import VersionMismatch, error_message


def _none() -> Sequence[Message]:
    """Nothing came meanwhile."""
    return ()


class Conversation:
    """One session, from ``Open`` to its end.

    ``answer`` is called by one thread at a time; ``close`` may be called by any thread at any time.

    Args:
        cloud: what opens the session.
        max_frame_bytes: largest frame accepted, announced to the device.
        idle_timeout_s: how long a silent session lives, announced to the device.

    Attributes:
        session: identifier of the session, "" before it is open.
        is_done: whether the picture is complete.
        is_over: whether no more messages are accepted.
        failure: what ended the session, if it was an exception.
    """

    def __init__(
        self, cloud: Cloud, *, max_frame_bytes: int = MAX_FRAME_BYTES, idle_timeout_s: float = 60.0
    ) -> None:
        self.session = ""
        self.is_done = False
        self.is_over = False
        self.failure: Exception | None = None
        self._cloud = cloud
        self._limits = (max_frame_bytes, idle_timeout_s)
        self._session: CloudSession | None = None
        self._lock = threading.Lock()

    def answer(self, message: Message, more: Callable[[], Sequence[Message]] = _none) -> Iterator[Message]:
        """The cloud's answers to a message, each as soon as it is known.

        Args:
            message: what the device sent.
            more: takes what the device has sent meanwhile, without waiting; called from the thread that
                computes.

        Never raises what the cloud raises: the last answer is then an ``Error``, ``failure`` holds the
        exception, and the session is over. After ``close`` the rest of the answers is dropped.
        """
        try:
            for answer in self._answer(message, more):
                yield _checked(answer)
        except Exception as error:
            self.failure = error
            with suppress(Exception):  # the first failure is the one to report
                self.close()
            yield error_message(error)

    def close(self) -> None:
        """Free the session; safe to call twice and while ``answer`` runs."""
        with self._lock:
            self.is_over = True
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def _answer(self, message: Message, more: Callable[[], Sequence[Message]]) -> Iterator[Message]:
        if isinstance(message, Open):
            yield self._open(message)
        elif isinstance(message, Draft):
            yield from self._draft(message, more)
        else:
            raise ProtocolError(f"A device may not send {type(message).__name__}. Open a new session.")

    def _open(self, message: Open) -> Opened:
        if self._session is not None:
            raise ProtocolError("This session is already open. Open another one on a new connection.")
        cloud = self._cloud
        if message.backbone != cloud.backbone:
            raise VersionMismatch(
                f"This server runs the backbone {cloud.backbone}, not {message.backbone}. Use --backbone "
                f"{cloud.backbone}, or connect to another server."
            )
        if message.weights and cloud.weights and message.weights != cloud.weights:
            raise VersionMismatch(
                f"This server's weights of {cloud.backbone} are {cloud.weights} and the device's are "
                f"{message.weights}. Install the same version on both sides."
            )
        session = cloud.open(message)
        with self._lock:
            was_closed = self.is_over
            if not was_closed:
                self._session = session
        if was_closed:
            # The device left while the prompt was being read.
            session.close()
            raise ProtocolError("The session was closed while it was being opened. Open a new one.")
        self.session = session.opened.session
        max_frame_bytes, idle_timeout_s = self._limits
        return replace(session.opened, max_frame_bytes=max_frame_bytes, idle_timeout_s=idle_timeout_s)

    def _draft(self, message: Draft, more: Callable[[], Sequence[Message]]) -> Iterator[Message]:
        session = self._session
        if session is None:
            if self.is_over:
                return  # closed by another thread a moment ago
            raise ProtocolError("A draft came before the session was open. Send Open first.")
        self._check_draft(session, message)

        def newer() -> list[Draft]:
            return [self._check_draft(session, one) for one in more()]

        answers = session.handle(message, newer)
        # Sessions may answer with a generator, which goes on holding what it uses until it is closed.
        with closing(answers) if isinstance(answers, Generator) else nullcontext():
            for answer in answers:
                if self.is_over:
                    return
                self.is_done = self.is_done or isinstance(answer, Done)
                yield answer

    @staticmethod
    def _check_draft(session: CloudSession, message: Message) -> Draft:
        """A message that must be a draft and fit the picture."""
        if not isinstance(message, Draft):
            raise ProtocolError(f"{type(message).__name__} came among drafts. Open a new session.")
        tokens, vocab_size = session.opened.tokens, session.opened.vocab_size
        if message.ids and max(message.ids) >= vocab_size:
            raise ProtocolError(f"The draft holds an id that is not below {vocab_size}. Open a new session.")
        if message.start + message.span > tokens:
            raise ProtocolError(f"The draft goes beyond the {tokens} tokens. Open a new session.")
        return message


def _checked(answer: Message) -> Message:
    """An answer of the cloud, checked here so that a bad one is reported as the cloud's own failure."""
    try:
        return check(answer)
    except ProtocolError as error:
        raise RuntimeError("The cloud's answer does not fit the protocol.") from error
