"""One WebSocket, from hello to farewell, and what all of them share.

Two tasks serve a socket. The reader always listens, so that a device that leaves is noticed at once, also
while its draft is computed; the worker answers messages in their order. The first of them to finish ends
the connection. Everything that blocks runs in threads; the event loop only moves messages, so pings are
answered during a pass of any length.

Knows the protocol and ASGI; knows no model.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

from starlette.websockets import WebSocket, WebSocketDisconnect

from ciar.errors import ProtocolError, ServerBusy
from ciar.protocol.codec import decode, encode
from ciar.protocol.messages import SUBPROTOCOL, Cancel, Done, Error, Message, Open, Patch
from ciar.serving.config import ServerConfig
from ciar.serving.logs import describe, log
from ciar.serving.metrics import Metrics
from ciar.transport.base import Cloud
from ciar.transport.conversation import Conversation
from ciar.transport.failures import error_message

#: A browser cannot set headers on a WebSocket; it offers its token as a subprotocol with this prefix.
TOKEN_SUBPROTOCOL = "ciar.token."
#: How long the end of a connection waits for its session to be freed, in seconds.
_FREE_TIMEOUT_S = 1.0
#: Longest reason in a close frame, in bytes (RFC 6455, section 5.5).
_REASON_BYTES = 123

How = Literal["done", "cancelled", "gone", "idle", "error", "shutdown"]
_CLOSE_CODES = {"protocol": 1002, "version": 1002, "input": 1008, "busy": 1013}


@dataclass(frozen=True)
class Ending:
    """Why a connection ends.

    Attributes:
        how: in a word, for the metrics.
        code: WebSocket close code to send; 0 when the device is gone already.
        reason: for the close frame.
        error: what to tell the device first.
    """

    how: How
    code: int = 0
    reason: str = ""
    error: BaseException | None = None


@dataclass(frozen=True)
class _LastAnswer:
    """Marks that a message is answered, in the queue from worker thread to event loop."""


class Endpoint:
    """What all connections of a server share: the cloud, the limits, the threads and the numbers.

    Args:
        cloud: what opens sessions.
        config: limits and the token.

    Attributes:
        is_draining: whether the server is about to stop.
    """

    def __init__(self, cloud: Cloud, config: ServerConfig) -> None:
        self.cloud = cloud
        self.config = config
        self.metrics = Metrics()
        self.is_draining = False
        self.sessions = 0
        self.sockets = 0
        self._numbers = count(1)
        self.workers = ThreadPoolExecutor(config.worker_count, thread_name_prefix="ciar-worker")
        # Freeing a session must not wait behind the passes that keep the workers busy.
        self.closers = ThreadPoolExecutor(2, thread_name_prefix="ciar-closer")

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one connection."""
        if not self._admits(websocket):
            self.metrics.errors.add(value="token")
            await _refuse(websocket, 401, "Give the server's access token.", {"WWW-Authenticate": "Bearer"})
            return
        if self.sockets >= self.config.socket_limit or self.is_draining:
            self.metrics.errors.add(value="busy")
            headers = {"Retry-After": f"{self.config.retry_after_s:.0f}"}
            await _refuse(websocket, 503, "This server takes no more connections now.", headers)
            return
        self.sockets += 1
        self.metrics.sockets_open.add()
        try:
            if SUBPROTOCOL in websocket.scope.get("subprotocols", ()):
                await websocket.accept(subprotocol=SUBPROTOCOL)
                await _Socket(self, websocket, next(self._numbers)).serve()
            else:
                self.metrics.errors.add(value="version")
                await websocket.accept()
                await websocket.close(1002, f"This server speaks the subprotocol {SUBPROTOCOL}; ask for it.")
        except (WebSocketDisconnect, OSError, asyncio.CancelledError):
            # The device left in mid-sentence, or the server has no patience left: either way the
            # connection is over and its session was freed on the way here.
            pass
        finally:
            self.sockets -= 1
            self.metrics.sockets_open.add(-1)

    def shut_down(self) -> None:
        """Let go of the threads; computations that have not begun never do."""
        self.is_draining = True
        self.workers.shutdown(wait=False, cancel_futures=True)
        self.closers.shutdown(wait=False)

    def _admits(self, websocket: WebSocket) -> bool:
        """Whether the device has shown the token, in a header or a subprotocol."""
        token = self.config.token
        if token is None:
            return True
        shown = [
            offer.removeprefix(TOKEN_SUBPROTOCOL)
            for offer in websocket.scope.get("subprotocols", ())
            if offer.startswith(TOKEN_SUBPROTOCOL)
        ]
        scheme, _, value = websocket.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            shown.append(value.strip())
        # Compare all of them, each in constant time: nothing is learnt from how long it takes.
        matches = [hmac.compare_digest(candidate.encode(), token.encode()) for candidate in shown]
        return any(matches)


class _Socket:
    """One accepted connection.

    Args:
        endpoint: what it shares with the others.
        websocket: the connection.
        number: for the logs.
    """

    def __init__(self, endpoint: Endpoint, websocket: WebSocket, number: int) -> None:
        self._endpoint = endpoint
        self._config = endpoint.config
        self._metrics = endpoint.metrics
        self._websocket = websocket
        self._number = number
        self._conversation = Conversation(
            endpoint.cloud,
            max_frame_bytes=endpoint.config.max_frame_bytes,
            idle_timeout_s=endpoint.config.idle_timeout_s,
        )
        self._inbox = _Inbox(endpoint.config.max_queued_frames)
        self._holds_slot = False
        self._is_released = False

    async def serve(self) -> None:
        """Serve until the connection ends."""
        began = time.monotonic()
        tasks = (asyncio.create_task(self._read()), asyncio.create_task(self._work()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await self._release()
        ending = _first_ending(results)
        if self._conversation.is_done and ending.how in ("gone", "cancelled"):
            ending = replace(ending, how="done")
        self._metrics.endings.add(value=ending.how)
        self._log(
            logging.INFO, "connection ended", how=ending.how, seconds=round(time.monotonic() - began, 3)
        )
        if ending.code:
            await self._say_farewell(ending)

    async def _read(self) -> Ending:
        """Listen until the device leaves, cancels or breaks a rule."""
        bucket = _Bucket(self._config.max_frames_per_s)
        while True:
            event = await self._websocket.receive()
            if event["type"] == "websocket.disconnect":
                return Ending("shutdown" if event.get("code") == 1012 else "gone")
            frame = event.get("bytes")
            if frame is None:
                return _violation(f"This server takes binary {SUBPROTOCOL} frames, not text.", 1003)
            self._metrics.frames.add(value="up")
            self._metrics.bytes.add(len(frame), value="up")
            if len(frame) > self._config.max_frame_bytes:
                limit = self._config.max_frame_bytes
                return _violation(f"A frame of {len(frame)} bytes is over the limit of {limit}.", 1009)
            if not bucket.take(time.monotonic()):
                limit_per_s = self._config.max_frames_per_s
                return _violation(f"Frames come faster than {limit_per_s:g} a second. Send fewer.", 1008)
            try:
                message = decode(frame, limit=self._config.max_frame_bytes)
            except ProtocolError as error:
                return Ending("error", 1002, "malformed frame", error)
            if isinstance(message, Cancel):
                return Ending("cancelled", 1000, "cancelled")
            if not self._inbox.put(message):
                limit = self._config.max_queued_frames
                return _violation(f"More than {limit} messages wait for an answer. Wait for some.", 1008)

    async def _work(self) -> Ending:
        """Answer messages in their order until one of them ends the session or none comes."""
        config = self._config
        try:
            async with asyncio.timeout(config.open_timeout_s):
                message = await self._inbox.get()
        except TimeoutError:
            return Ending("idle", 1001, f"Nothing came for {config.open_timeout_s:g} s. Send Open at once.")
        if isinstance(message, Open) and not self._take_slot():
            busy = ServerBusy(
                f"This server already works on {config.max_sessions} pictures. Try again in "
                f"{config.retry_after_s:g} s.",
                config.retry_after_s,
            )
            return Ending("error", 1013, "busy", busy)
        while True:
            ending = await self._answer(message)
            if ending is not None:
                return ending
            wait_s = config.linger_s if self._conversation.is_done else config.idle_timeout_s
            try:
                async with asyncio.timeout(wait_s):
                    message = await self._inbox.get()
            except TimeoutError:
                if self._conversation.is_done:
                    return Ending("done", 1000, "done")
                return Ending("idle", 1001, f"Nothing came for {wait_s:g} s. Open again with the history.")

    async def _answer(self, message: Message) -> Ending | None:
        """Compute the answers to a message in a thread and send each as it comes."""
        loop = asyncio.get_running_loop()
        answers: asyncio.Queue[Message | _LastAnswer] = asyncio.Queue()

        def compute() -> None:
            for answer in self._conversation.answer(message, self._inbox.take):
                loop.call_soon_threadsafe(answers.put_nowait, answer)

        def finish(future: Future[None]) -> None:
            # Runs in the worker thread, or here if the work was cancelled before it began.
            if self._is_released and not future.cancelled():
                self._metrics.late.add()
            with suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(answers.put_nowait, _LastAnswer())

        began = time.monotonic()
        future = self._endpoint.workers.submit(compute)
        future.add_done_callback(finish)
        try:
            while not isinstance(answer := await answers.get(), _LastAnswer):
                if isinstance(answer, Error):
                    return self._failed(self._conversation.failure)
                await self._send(answer)
        finally:
            future.cancel()
        if future.cancelled():
            return Ending("shutdown", 1012, "The server stops.")
        if (failure := future.exception()) is not None:
            return self._failed(failure)
        kind = "open" if isinstance(message, Open) else "draft"
        self._metrics.latency.observe(time.monotonic() - began, kind)
        if kind == "open":
            self._metrics.sessions.add()
            self._log(logging.INFO, "session opened")
        return None

    def _failed(self, failure: BaseException | None) -> Ending:
        """The ending for what went wrong in the cloud."""
        failure = failure or RuntimeError("the cloud failed and did not say why")
        code = error_message(failure).code
        if code in ("internal", "numerical"):
            self._log(logging.ERROR, "session failed", code=code, **describe(failure))
        return Ending("error", _CLOSE_CODES.get(code, 1011), code, failure)

    async def _send(self, message: Message) -> None:
        """Send a message, or give up on a device that does not take it."""
        if isinstance(message, (Patch, Done)):
            self._metrics.passes.add(message.cost.passes)
            self._metrics.token_rows.add(message.cost.token_rows)
        frame = encode(message)
        try:
            async with asyncio.timeout(self._config.send_timeout_s):
                await self._websocket.send_bytes(frame)
        except TimeoutError:
            raise WebSocketDisconnect(1006, "the device does not take its answers") from None
        except RuntimeError as error:
            # What web servers raise for a connection that they have closed themselves.
            raise WebSocketDisconnect(1006, "the connection is closed") from error
        self._metrics.frames.add(value="down")
        self._metrics.bytes.add(len(frame), value="down")

    async def _say_farewell(self, ending: Ending) -> None:
        """Tell the device why, then close. It may be gone already, which is as good."""
        with suppress(WebSocketDisconnect, RuntimeError):
            if ending.error is not None:
                message = error_message(ending.error)
                self._metrics.errors.add(value=message.code)
                self._log(logging.INFO, "error told", code=message.code)
                await self._send(message)
            reason = ending.reason.encode()[:_REASON_BYTES].decode(errors="ignore")
            await self._websocket.close(ending.code, reason)

    def _take_slot(self) -> bool:
        """Count this connection as a session, if there is room."""
        if self._endpoint.sessions >= self._config.max_sessions:
            return False
        self._endpoint.sessions += 1
        self._metrics.sessions_open.add()
        self._holds_slot = True
        return True

    async def _release(self) -> None:
        """Free the session, whatever it is doing."""
        self._is_released = True
        # From here on a running computation drops what it finds, even if freeing takes a moment.
        self._conversation.is_over = True
        try:
            freeing = self._endpoint.closers.submit(self._conversation.close)
            async with asyncio.timeout(_FREE_TIMEOUT_S):
                await asyncio.shield(asyncio.wrap_future(freeing))
        except TimeoutError:
            self._log(logging.WARNING, "session is slow to free")
        except Exception as error:
            self._log(logging.ERROR, "session could not be freed", **describe(error))
        finally:
            if self._holds_slot:
                self._holds_slot = False
                self._endpoint.sessions -= 1
                self._metrics.sessions_open.add(-1)

    def _log(self, level: int, event: str, **fields: object) -> None:
        log(level, event, connection=self._number, session=self._conversation.session, **fields)


class _Inbox:
    """Messages that wait for an answer. The loop puts and gets; a thread that computes may take.

    ``get`` is not called while a thread computes, so a message has one taker at a time.

    Args:
        limit: most messages that may wait.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._messages: deque[Message] = deque()
        self._arrival = asyncio.Event()

    def put(self, message: Message) -> bool:
        """Adds a message; False when too many wait."""
        if len(self._messages) >= self._limit:
            return False
        self._messages.append(message)
        self._arrival.set()
        return True

    async def get(self) -> Message:
        """The next message, as soon as there is one."""
        while not self._messages:
            self._arrival.clear()
            await self._arrival.wait()
        return self._messages.popleft()

    def take(self) -> list[Message]:
        """Everything that waits; from any thread."""
        taken: list[Message] = []
        while self._messages:
            taken.append(self._messages.popleft())
        return taken


class _Bucket:
    """Lets through a lasting rate, and one second's worth at once.

    Args:
        rate_per_s: how many a second.
    """

    def __init__(self, rate_per_s: float) -> None:
        self._rate_per_s = rate_per_s
        self._left = max(1.0, rate_per_s)
        self._at_s: float | None = None

    def take(self, now_s: float) -> bool:
        """Whether one more may pass now."""
        if self._at_s is not None:
            self._left = min(max(1.0, self._rate_per_s), self._left + (now_s - self._at_s) * self._rate_per_s)
        self._at_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


def _violation(sentence: str, code: int) -> Ending:
    return Ending("error", code, sentence, ProtocolError(sentence))


def _first_ending(results: Sequence[Ending | BaseException]) -> Ending:
    """The ending that counts: the reader's before the worker's, and any ending before a failure here."""
    for result in results:
        if isinstance(result, Ending):
            return result
        if isinstance(result, WebSocketDisconnect):
            return Ending("gone")
    for result in results:
        if isinstance(result, Exception):
            log(logging.ERROR, "connection failed", **describe(result))
            return Ending("error", 1011, "internal", result)
    return Ending("shutdown")


async def _refuse(websocket: WebSocket, status: int, sentence: str, headers: dict[str, str]) -> None:
    """Answer the handshake with an HTTP error, where the web server can; else close it."""
    # Without the length and type that a response object would add: web servers write their own, and some
    # then send both.
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    start = {"type": "websocket.http.response.start", "status": status, "headers": pairs}
    with suppress(WebSocketDisconnect, OSError):  # the device may have left
        if "websocket.http.response" in websocket.scope.get("extensions", {}):
            await websocket.send(start)
            await websocket.send({"type": "websocket.http.response.body", "body": sentence.encode() + b"\n"})
        else:
            await websocket.close(1008, sentence)
