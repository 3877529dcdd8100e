"""A TCP relay that makes a network out of the loop-back interface, without rights and on any system.

Every byte that comes in at one end goes out at the other, in order, when :class:`ciar.network.shape.Lane`
says that it has arrived. Ends of streams and resets travel the same way. Not modelled: headers,
acknowledgements and TCP's slow start; a lost packet is one that comes late, with all behind it.

``python -m ciar.network.relay`` runs one in a process of its own: a JSON line on standard input says where
to and how, a JSON line on standard output where from; it ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import random
import selectors
import socket
import struct
import sys
import threading
from collections.abc import Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from ciar.errors import CiarError
from ciar.network.shape import PACKET_BYTES, Lane, Shape

#: Packets that may be on their way in one direction; a sender of more waits, as for a full socket.
_ON_THEIR_WAY = 4096
#: What travels besides bytes.
_END, _RESET = b"", None
_START_S = 10.0
#: Rounds of the event loop, and some to spare, between taking a connection and serving it.
_ROUNDS = 8


class Relay:
    """Relays every connection that it is given.

    Args:
        shape: the network.
        host, port: where to.
        seed: of jitter and losses; connection number n always meets the same ones.
    """

    def __init__(self, shape: Shape, host: str, port: int, seed: int = 0) -> None:
        self._shape, self._host, self._port, self._seed = shape, host, port, seed
        self._count = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Begins to listen; returns the port."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=PACKET_BYTES)
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    async def close(self) -> None:
        """Listens no more, and cuts every connection."""
        if self._server is not None:
            for listening in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            # A connection that was just taken is no task yet, and would leak if the server closed now.
            for _ in range(_ROUNDS):
                await asyncio.sleep(0)
            self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # sockets are closed in the loop's next round

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._count += 1
        seed, loop = f"{self._seed}/{self._count}", asyncio.get_running_loop()
        # The kernel has already shaken hands; over the network that would have taken a round trip.
        opens_s = loop.time() + 2 * self._shape.one_way_s
        far_writer: asyncio.StreamWriter | None = None
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port, limit=PACKET_BYTES)
            up = Lane(self._shape, random.Random(f"{seed}/up"), opens_s)
            down = Lane(self._shape, random.Random(f"{seed}/down"), opens_s)
            await _together(_carry(reader, far_writer, up), _carry(far_reader, writer, down))
            for end in (writer, far_writer):  # what was written last still goes out
                end.close()
                await end.wait_closed()
        except (_Reset, OSError):
            for one in filter(None, (writer, far_writer)):
                _reset(one)
        except asyncio.CancelledError:
            pass  # the relay closes
        finally:
            for one in filter(None, (writer, far_writer)):
                one.transport.abort()
            self._tasks.discard(task)


class _Reset(Exception):
    """One end of a connection has gone without a farewell."""


async def _together(*halves: Coroutine[Any, Any, None]) -> None:
    """Runs both directions until both have ended, or one fails."""
    tasks = [asyncio.create_task(half) for half in halves]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lane: Lane) -> None:
    """One direction, to the end of its stream."""
    line: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue(_ON_THEIR_WAY)
    await _together(_take(reader, lane, line), _deliver(writer, line))


async def _take(
    reader: asyncio.StreamReader, lane: Lane, line: asyncio.Queue[tuple[float, bytes | None]]
) -> None:
    now_s = asyncio.get_running_loop().time
    while True:
        try:
            packet: bytes | None = await reader.read(PACKET_BYTES)
        except OSError:
            packet = _RESET
        await line.put((lane.arrival_s(len(packet or b""), now_s()), packet))
        if not packet:
            return


async def _deliver(writer: asyncio.StreamWriter, line: asyncio.Queue[tuple[float, bytes | None]]) -> None:
    now_s = asyncio.get_running_loop().time
    while True:
        arrival_s, packet = await line.get()
        if (wait_s := arrival_s - now_s()) > 0:
            await asyncio.sleep(wait_s)
        if packet is _RESET:
            raise _Reset
        if packet == _END:
            if writer.can_write_eof():
                writer.write_eof()
            return
        writer.write(packet)
        await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Makes the coming close of a socket a reset."""
    found = writer.get_extra_info("socket")
    with suppress(OSError):
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _new_loop() -> asyncio.AbstractEventLoop:
    """An event loop that waits to the microsecond; the usual ones round up to the millisecond."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


class BackgroundRelay:
    """A relay in a thread of this process, as a context manager.

    Args:
        shape: the network.
        host, port: where to.
        seed: of jitter and losses.

    Attributes:
        port: where it listens on 127.0.0.1, once entered.
    """

    def __init__(self, shape: Shape, host: str, port: int, seed: int = 0) -> None:
        self.port = 0
        self._relay = Relay(shape, host, port, seed)
        self._loop = _new_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="ciar-relay", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(_START_S) or not self.port:
            raise CiarError("The relay did not start. Try again.")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_START_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        self.port = await self._relay.listen()
        self._ready.set()
        await self._stop.wait()
        await self._relay.close()


def main() -> int:
    """Relays until standard input ends. Returns 0."""
    order = json.loads(sys.stdin.readline())
    with BackgroundRelay(Shape(**order["shape"]), order["host"], order["port"], order["seed"]) as relay:
        sys.stdout.write(json.dumps({"port": relay.port}) + "\n")
        sys.stdout.flush()
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
