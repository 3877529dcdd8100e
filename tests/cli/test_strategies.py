"""``ciar strategies``: what is listed of strategies and of gates."""

from __future__ import annotations

import json
from collections.abc import Callable

from ciar.decoding.strategy import all_strategies
from ciar.intervals.gates import GATES

Ciar = Callable[..., tuple[int, str, str]]


def test_strategies_say_what_they_need_and_promise(ciar: Ciar) -> None:
    code, out, err = ciar("strategies")
    assert (code, err) == (0, "")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert out.splitlines()[0].split() == ["strategy", "runs", "on", "law", "needs", "summary", "source"]
    for one in all_strategies():
        assert all(part in lines[one.name] for part in (one.summary, one.source, one.training))
        assert ("the cloud's" in lines[one.name]) == one.exact
    listed = {one["name"]: one for one in json.loads(ciar("strategies", "--json")[1])["strategies"]}
    assert set(listed["code"]) == {
        *("name", "summary", "source", "exact", "drift", "training", "uses_device", "uses_cloud")
    }
    assert "device model" in listed["code"]["training"]
    assert listed["code"]["exact"] is False


def test_gates_are_listed(ciar: Ciar) -> None:
    code, out, err = ciar("strategies", "--gates")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["gate", *(gate.name for gate in GATES)]
    for gate, line in zip(GATES, out.splitlines()[1:], strict=True):
        assert all(part in line for part in (gate.cost, gate.training, gate.summary, gate.source))
    listed = json.loads(ciar("strategies", "--gates", "--json")[1])["gates"]
    assert [one["name"] for one in listed] == [gate.name for gate in GATES]
    assert {"name", "summary", "source", "cost", "training", "bounds"} == set(listed[0])
    assert listed[0]["bounds"] == [0.0, None]  # JSON has no infinity


def test_train_gate_refuses_unknown_gates(ciar: Ciar) -> None:
    code, out, err = ciar("train", "gate", "--scores", "entropy,magic")
    assert (code, out) == (2, "")
    assert "There is no score 'magic'. The scores are: collision" in err
