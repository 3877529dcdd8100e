"""Real network namespaces: what is made inside them, and that nothing is left behind, whatever happens."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import ciar.network.namespaces as namespaces
from ciar.errors import CiarError
from ciar.network.namespaces import CLOUD_ADDRESS, Namespace, Wire, missing
from ciar.network.shape import Shape

REFUSED = missing()
#: Namespaces may work where netem does not.
spaces = pytest.mark.skipif(REFUSED is not None and "qdisc" not in REFUSED, reason=str(REFUSED))
shaped = pytest.mark.skipif(REFUSED is not None, reason=str(REFUSED))


def interfaces() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"


def answer_once(listener: socket.socket) -> None:
    peer, _ = listener.accept()
    with peer:
        while data := peer.recv(100):
            peer.sendall(data)


def round_trips(wire: Wire, count: int = 6) -> list[float]:
    """Seconds that an answer takes between the two namespaces, after one that is not counted."""
    with wire.cloud.entered():
        listener = socket.create_server((CLOUD_ADDRESS, 0))
    with listener:
        threading.Thread(target=answer_once, args=(listener,), daemon=True).start()
        with wire.device.entered():
            end = socket.create_connection(listener.getsockname(), timeout=10)
        with end:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            took = []
            for _ in range(count + 1):
                began = time.perf_counter()
                end.sendall(b"x")
                assert end.recv(1) == b"x"
                took.append(time.perf_counter() - began)
    return took[1:]


@pytest.mark.network
@spaces
def test_a_wire_joins_two_networks_and_nothing_else() -> None:
    before, home = interfaces(), os.readlink("/proc/thread-self/ns/net")
    with Wire() as wire:
        pids = wire.cloud.pid, wire.device.pid
        assert interfaces() == before
        for space in (wire.cloud, wire.device):
            with space.entered():
                assert interfaces() == {"lo", "ciar0"}
                assert os.readlink("/proc/thread-self/ns/net") != home
        assert max(round_trips(wire)) < 0.5
        wire.shape(Shape())  # nothing to shape needs no netem
    assert interfaces() == before
    assert os.readlink("/proc/thread-self/ns/net") == home
    assert not any(map(alive, pids))


@pytest.mark.network
@shaped
def test_netem_delays_and_can_be_changed() -> None:
    with Wire() as wire:
        before = None
        for shape in (Shape(rtt_ms=40), Shape(rtt_ms=10), Shape()):
            wire.shape(shape, before)
            before = shape
            took = sorted(round_trips(wire))
            assert took[0] >= shape.rtt_ms / 1e3 - 1e-3
            assert took[2] <= shape.rtt_ms / 1e3 + 0.05


@pytest.mark.network
@spaces
def test_a_thread_comes_home_from_a_failure() -> None:
    home = os.readlink("/proc/thread-self/ns/net")
    with Namespace() as space, pytest.raises(ZeroDivisionError), space.entered():
        raise ZeroDivisionError
    assert os.readlink("/proc/thread-self/ns/net") == home


@pytest.mark.network
@spaces
def test_a_tool_that_fails_says_why() -> None:
    with Namespace() as space, pytest.raises(CiarError, match=r"ip link set nosuch up failed \(.*nosuch"):
        space.call("ip", "link", "set", "nosuch", "up")


@pytest.mark.network
@spaces
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_process_that_is_killed(how: signal.Signals) -> None:
    code = (
        "import time\nfrom ciar.network.namespaces import Wire\n"
        "with Wire() as wire:\n    print(wire.cloud.pid, wire.device.pid, flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(alive, pids))
        process.send_signal(how)
        process.wait(10)
    deadline = time.monotonic() + 10
    while any(map(alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_is_missing_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.sys, "platform", "darwin")
    assert missing() == "Network namespaces need Linux."
    monkeypatch.setattr(namespaces.sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else f"/bin/{name}")
    assert missing() == "tc cannot be found: install iproute2 and util-linux."
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert missing() == "Network namespaces need root: run the command with sudo."
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    def refuse(self: Namespace, *command: str) -> None:
        raise CiarError("tc failed (unknown qdisc).")

    monkeypatch.setattr(Namespace, "call", refuse)
    monkeypatch.setattr(Namespace, "__enter__", lambda self: self)
    assert missing() == "tc failed (unknown qdisc). Where the kernel has it as a module: modprobe sch_netem."
