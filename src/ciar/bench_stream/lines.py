"""Ways to put a network between device and cloud, both real sockets: netem, or a relay on loop-back."""

from __future__ import annotations

import http.client
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

from ciar.bench_stream.child import Child
from ciar.errors import CloudUnavailable, InputError
from ciar.network.namespaces import CLOUD_ADDRESS, Wire, missing
from ciar.network.shape import Shape

#: Questions that measure the round trip, behind one that opens the connection.
ECHOES = 9
_ECHO_TIMEOUT_S = 130.0


@dataclass(frozen=True)
class Ends:
    """Where the device stands while a network is up.

    Attributes:
        url: ``ws://`` address of the cloud as the device sees it.
        on_device: puts the calling thread where the device is.
    """

    url: str
    on_device: Callable[[], AbstractContextManager[None]] = nullcontext


class Lines(Protocol):
    """A cloud, and networks in front of it, one after the other. A context manager.

    Attributes:
        kind: in a word.
        detail: in a sentence, for the report.
    """

    kind: str
    detail: str

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def at(self, shape: Shape) -> AbstractContextManager[Ends]:
        """A network of a shape, while the context lasts."""


class RelayLines:
    """The cloud on the loop-back interface, a shaped relay in front of it; each in a process of its own.

    Args:
        order: what the cloud is told, without its host.
        seed: of jitter and losses.
        why: why it is not netem, if it could have been.
    """

    kind = "relay"

    def __init__(self, order: dict[str, Any], seed: int = 0, why: str = "") -> None:
        self._server = Child("ciar.bench_stream.server", order | {"host": "127.0.0.1"})
        self._seed = seed
        self.detail = "A TCP relay in user space between real sockets on loop-back."
        if why:
            self.detail += f" Not netem: {why}"

    def __enter__(self) -> Self:
        self._server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    @contextmanager
    def at(self, shape: Shape) -> Iterator[Ends]:
        parts = urlsplit(self._server.answer["url"])
        order = {"shape": shape.to_dict(), "host": parts.hostname, "port": parts.port, "seed": self._seed}
        with Child("ciar.network.relay", order) as relay:
            yield Ends(f"ws://127.0.0.1:{relay.answer['port']}")


class NetemLines:
    """The cloud in one network namespace and the device in another, ``tc netem`` on the wire between.

    Args:
        order: what the cloud is told, without its host.
    """

    kind = "netem"
    detail = "tc netem on a wire between two network namespaces, half the round trip at either end."

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order | {"host": CLOUD_ADDRESS}
        self._wire = Wire()
        self._server: Child | None = None
        self._shape: Shape | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._wire)
            cloud = self._wire.cloud
            self._server = stack.enter_context(
                Child("ciar.bench_stream.server", self._order, wrap=cloud.inside)
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def at(self, shape: Shape) -> Iterator[Ends]:
        assert self._server is not None
        self._wire.shape(shape, self._shape)
        self._shape = shape
        yield Ends(self._server.answer["url"], self._wire.device.entered)


def lines_of(kind: str, order: dict[str, Any], seed: int = 0) -> Lines:
    """The way that is asked for; ``auto`` is netem where that works.

    Raises:
        InputError: it does not work here; says what is missing.
    """
    why = missing() if kind in ("auto", "netem") else None
    if kind == "netem" and why is not None:
        raise InputError(f"{why} Or use --shaping relay.")
    if kind == "relay" or why is not None:
        return RelayLines(order, seed, why or "")
    return NetemLines(order)


def echo_ms(url: str) -> float:
    """The round trip of a small question over an open connection to a server, its median in milliseconds.

    Raises:
        CloudUnavailable: nobody answers.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_ECHO_TIMEOUT_S)
    took: list[float] = []
    try:
        for _ in range(1 + ECHOES):
            began = time.perf_counter()
            connection.request("GET", "/livez")
            connection.getresponse().read()
            took.append((time.perf_counter() - began) * 1e3)
    except (OSError, http.client.HTTPException) as error:
        raise CloudUnavailable(
            f"The benchmark's own server at {url} does not answer ({error}). Run the command again."
        ) from error
    finally:
        connection.close()
    return statistics.median(took[1:])
