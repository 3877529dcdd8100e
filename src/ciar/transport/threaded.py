"""Device and cloud in one process, the cloud in a thread of its own: sending does not wait for answers.

What ``InProcessTransport`` is for strategies that take turns, this is for those that stream: drafts that
come while the cloud computes wait in a queue, and the cloud may take them between its passes, as from a
socket. Behind ``DelayedTransport`` it is a network in one process.
"""

from __future__ import annotations

import math
import queue
import threading
import time

from ciar.errors import CloudUnavailable, InputError, ProtocolError
from ciar.protocol.codec import decode, encode
from ciar.protocol.messages import Cancel, Message
from ciar.transport.base import Cloud, FrameConnection, ReceiveTimeout
from ciar.transport.conversation import Conversation
from ciar.transport.failures import error_message

#: How often a waiting receive looks whether the session is over, in seconds.
_LOOK_S = 0.05
#: How long closing waits for a pass in progress, in seconds.
_LINGER_S = 1.0


class ThreadedConnection(FrameConnection):
    """One session with a cloud in this process, in a thread of its own.

    Args:
        cloud: what opens the session.
        read_timeout_s: how long ``receive`` waits when it is not told otherwise.
    """

    def __init__(self, cloud: Cloud, read_timeout_s: float) -> None:
        super().__init__()
        self._read_timeout_s = read_timeout_s
        self._conversation = Conversation(cloud)
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._compute, name="ciar-cloud", daemon=True)
        self._thread.start()

    def send_frame(self, frame: bytes) -> None:
        if self._is_closed or self._conversation.is_over:
            raise CloudUnavailable("This session is over. Open a new one on a new connection.")
        self._frames.put(frame)

    def receive_frame(self, timeout_s: float | None = None) -> bytes:
        wait_s = self._read_timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + wait_s
        while True:
            # Looked at first: what a session leaves behind when it ends is still delivered.
            is_over = self._is_closed or not self._thread.is_alive()
            left_s = 0.0 if is_over else deadline_s - time.monotonic()
            try:
                return self._replies.get(timeout=min(_LOOK_S, max(0.0, left_s)))
            except queue.Empty:
                if is_over:
                    raise CloudUnavailable(
                        "This session is over. Open a new one on a new connection."
                    ) from None
                if left_s <= 0:
                    raise ReceiveTimeout(f"The cloud did not answer within {wait_s:g} s.") from None

    def close(self) -> None:
        self._is_closed = True
        self._frames.put(None)
        self._conversation.close()
        self._thread.join(_LINGER_S)

    def _compute(self) -> None:
        """Answers frames in their order until the session is over."""
        while not self._conversation.is_over and (frame := self._frames.get()) is not None:
            try:
                message = decode(frame)
            except ProtocolError as error:
                self._conversation.close()
                self._replies.put(encode(error_message(error)))
                return
            if isinstance(message, Cancel):
                self._conversation.close()
                return
            for answer in self._conversation.answer(message, self._take):
                self._replies.put(encode(answer))

    def _take(self) -> list[Message]:
        """Everything that has come meanwhile."""
        taken: list[Message] = []
        while True:
            try:
                frame = self._frames.get_nowait()
            except queue.Empty:
                return taken
            if frame is None:  # closed; leave the sign for the loop
                self._frames.put(None)
                return taken
            taken.append(decode(frame))


class ThreadedTransport:
    """The way to a cloud in this process that computes in threads of its own.

    Args:
        cloud: what opens sessions.
        read_timeout_s: limit for one answer, in seconds.

    Raises:
        InputError: the limit is not usable.
    """

    def __init__(self, cloud: Cloud, read_timeout_s: float = 60.0) -> None:
        if not (math.isfinite(read_timeout_s) and read_timeout_s > 0):
            raise InputError(f"read_timeout_s must be a number of seconds above 0, got {read_timeout_s}.")
        self._cloud = cloud
        self._read_timeout_s = read_timeout_s

    def connect(self) -> ThreadedConnection:
        """Begin a session."""
        return ThreadedConnection(self._cloud, self._read_timeout_s)
