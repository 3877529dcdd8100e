"""Two network namespaces with a wire between them that ``tc netem`` shapes. Linux, as root.

The namespaces have no names: each lives as long as a process that waits for its standard input to end.
When this process ends, in whatever way, theirs ends, theirs take the namespaces with them, and those take
the wire and its shaping. So nothing is ever left behind, and nothing outside the two is touched.

Source: network_namespaces(7), veth(4), https://man7.org/linux/man-pages/man8/tc-netem.8.html
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, Self

from ciar.errors import CiarError, InputError
from ciar.network.shape import Shape

#: Programs of iproute2 and util-linux.
_TOOLS = ("ip", "tc", "unshare", "nsenter")
_CLONE_NEWNET = 0x40000000
_WIRE = "ciar0"
#: Packets that may be on their way; beyond them netem drops, which 100 Mbit/s over 200 ms would not.
_LIMIT = 20_000
_TOOL_TIMEOUT_S = 10.0
#: Addresses of the two ends; no other network is reached from the namespaces, so any will do.
CLOUD_ADDRESS, DEVICE_ADDRESS = "10.99.0.1", "10.99.0.2"


def netem_options(shape: Shape) -> list[str]:
    """The words after ``netem`` for one direction of a network; none where nothing is to be shaped.

    netem shapes what leaves, and each end of the wire has its own, so either gets half the round trip.
    """
    words: list[str] = []
    if shape.rtt_ms or shape.jitter_ms:
        words += ["delay", f"{shape.rtt_ms / 2:g}ms"]
        words += [f"{shape.jitter_ms:g}ms"] if shape.jitter_ms else []
    if shape.loss:
        words += ["loss", f"{100 * shape.loss:g}%"]
    if shape.megabits_per_s is not None:
        words += ["rate", f"{round(shape.megabits_per_s * 1e6)}bit"]
    return [*words, "limit", str(_LIMIT)] if words else []


def missing() -> str | None:
    """Why there can be no shaped namespaces here, in a sentence; None where there can be."""
    if sys.platform != "linux":
        return "Network namespaces need Linux."
    lacking = [name for name in _TOOLS if shutil.which(name) is None]
    if lacking:
        return f"{' and '.join(lacking)} cannot be found: install iproute2 and util-linux."
    if os.geteuid() != 0:
        return "Network namespaces need root: run the command with sudo."
    try:
        with ExitStack() as stack:
            space = stack.enter_context(Namespace())
            space.call("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    except CiarError as error:
        return f"{error} Where the kernel has it as a module: modprobe sch_netem."
    return None


class Namespace:
    """An empty network, held by a process of its own; a context manager."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.pid = 0

    def __enter__(self) -> Self:
        try:
            holder = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo ready; exec cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is for us; it ends when its input does
            )
        except OSError as error:
            raise CiarError(f"No network namespace could be made ({error.strerror}).") from error
        self._stack.callback(_let_go, holder)
        assert holder.stdout is not None
        assert holder.stderr is not None
        with self._undone():
            if holder.stdout.readline() != "ready\n":
                raise CiarError(f"No network namespace could be made ({_sentence(holder.stderr.read())}).")
            self.pid = holder.pid
            self.call("ip", "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Lets go of everything where the beginning fails."""
        try:
            yield
        except BaseException:
            self._stack.close()
            raise

    def inside(self, command: Sequence[str]) -> list[str]:
        """A command line that runs a command in this network."""
        return ["nsenter", "--target", str(self.pid), "--net", "--", *command]

    def call(self, *command: str) -> None:
        """Runs a short command in this network.

        Raises:
            CiarError: it fails; with what it says.
        """
        try:
            done = subprocess.run(
                self.inside(command),
                capture_output=True,
                text=True,
                timeout=_TOOL_TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CiarError(f"{' '.join(command)} could not be run ({error}).") from error
        if done.returncode:
            raise CiarError(f"{' '.join(command)} failed ({_sentence(done.stderr)}).")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread's new sockets are in this network; it goes back at the end."""
        with open("/proc/thread-self/ns/net", "rb") as home, open(f"/proc/{self.pid}/ns/net", "rb") as there:
            _enter(there)
            try:
                yield
            finally:
                _enter(home)


class Wire:
    """Two networks, the cloud's and the device's, and a shaped wire between them; a context manager."""

    def __init__(self) -> None:
        self.cloud, self.device = Namespace(), Namespace()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.cloud)
            stack.enter_context(self.device)
            # Made inside, so that no end of it is ever in the machine's own network.
            self.cloud.call(
                *("ip", "link", "add", _WIRE, "type", "veth"),
                *("peer", "name", _WIRE, "netns", str(self.device.pid)),
            )
            for space, address in ((self.cloud, CLOUD_ADDRESS), (self.device, DEVICE_ADDRESS)):
                space.call("ip", "address", "add", f"{address}/30", "dev", _WIRE)
                space.call("ip", "link", "set", _WIRE, "up")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def shape(self, shape: Shape, before: Shape | None = None) -> None:
        """Makes the wire like a network.

        Args:
            before: what it was like so far; None is a new wire.

        Raises:
            CiarError: the kernel refuses.
        """
        words = netem_options(shape)
        for space in (self.cloud, self.device):
            if words:
                space.call("tc", "qdisc", "replace", "dev", _WIRE, "root", "netem", *words)
            elif before is not None and netem_options(before):
                space.call("tc", "qdisc", "del", "dev", _WIRE, "root")


def _enter(namespace: IO[bytes]) -> None:
    """Moves this thread to a network namespace (setns(2); os.setns is there from Python 3.12 on)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise InputError(f"The network namespace cannot be entered ({os.strerror(number)}). Run as root.")


def _let_go(holder: subprocess.Popen[str]) -> None:
    """Ends a holder: its input ends, and it is killed where that is not enough."""
    for stream in (holder.stdin, holder.stdout, holder.stderr):
        if stream is not None:
            stream.close()
    try:
        holder.wait(1.0)
    except subprocess.TimeoutExpired:
        holder.kill()
        holder.wait()


def _sentence(said: str) -> str:
    """What a tool said, on one line."""
    return " ".join(said.split()).rstrip(".") or "it does not say why"
