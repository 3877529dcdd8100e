"""Device and cloud in one process. Messages still become frames, so bytes and checks are the real ones."""

from __future__ import annotations

import math
import queue
import time
from contextlib import suppress

from ciar.errors import CloudUnavailable, ProtocolError
from ciar.protocol.codec import decode, encode
from ciar.protocol.messages import Cancel
from ciar.transport.base import Cloud, FrameConnection, ReceiveTimeout
from ciar.transport.conversation import Conversation
from ciar.transport.failures import error_message

#: How often a waiting receive looks whether anyone still computes, in seconds.
_LOOK_S = 0.05


class InProcessConnection(FrameConnection):
    """One session with a cloud in this process; ``send`` computes, ``receive`` takes what it left.

    Args:
        cloud: what opens the session.
    """

    def __init__(self, cloud: Cloud) -> None:
        super().__init__()
        self._conversation = Conversation(cloud)
        self._replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._is_computing = False
        self._is_closed = False

    def send_frame(self, frame: bytes) -> None:
        if self._is_closed or self._conversation.is_over:
            raise CloudUnavailable("This session is over. Open a new one on a new connection.")
        try:
            message = decode(frame)
        except ProtocolError as error:
            self._conversation.close()
            self._replies.put(encode(error_message(error)))
            return
        if isinstance(message, Cancel):
            self._conversation.close()
            return
        self._is_computing = True
        try:
            for answer in self._conversation.answer(message):
                self._replies.put(encode(answer))
        finally:
            self._is_computing = False

    def receive_frame(self, timeout_s: float | None = None) -> bytes:
        # Everything is computed in send. So without a time limit, wait only while another thread is
        # inside send; and never wait when the session is over.
        deadline = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        while True:
            can_come = self._is_computing
            is_over = self._is_closed or self._conversation.is_over
            with suppress(queue.Empty):
                return self._replies.get_nowait()
            left_s = deadline - time.monotonic()
            if not can_come and (is_over or timeout_s is None):
                break
            if left_s <= 0:
                break
            with suppress(queue.Empty):
                return self._replies.get(timeout=min(_LOOK_S, left_s))
        if is_over:
            raise CloudUnavailable("This session is over. Open a new one on a new connection.")
        raise ReceiveTimeout("No answer is on its way. Send a message first.")

    def close(self) -> None:
        self._is_closed = True
        self._conversation.close()


class InProcessTransport:
    """The way to a cloud in this process.

    Args:
        cloud: what opens sessions.
    """

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud

    def connect(self) -> InProcessConnection:
        """Begin a session."""
        return InProcessConnection(self._cloud)
