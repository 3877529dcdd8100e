"""The ledger: its sums and shares, and the identities that hold for every strategy."""

from __future__ import annotations

import json
from typing import Any

import pytest
from drive import device_session, opening

from ciar.cloud.sessions import Cloud
from ciar.ledger import DECIDERS, Ledger
from ciar.models.bundle import Bundle
from ciar.transport.inprocess import InProcessTransport

CASES: dict[str, dict[str, Any]] = {
    "base": {"strategy": "base"},
    "base, unguided": {"strategy": "base", "guidance": 1.0},
    "lossless 1": {"strategy": "lossless", "window": 1},
    "lossless 6": {"strategy": "lossless", "window": 6},
    "ciar": {"strategy": "ciar"},
    "ciar, long prefix": {"strategy": "ciar", "prefix_rate": 0.5},
    "ciar, all prefix": {"strategy": "ciar", "prefix_rate": 1.0},
    "ciar, verify": {"strategy": "ciar", "action": "verify", "prefix_rate": 0.0},
    "device-only": {"strategy": "device-only"},
}


def test_shares() -> None:
    ledger = Ledger(tokens=10, cloud_passes=4)
    ledger.decided = ["prefix", *(["device"] * 5), "accepted", "replaced", "replaced", "device"]
    assert ledger.counts == {"prefix": 1, "device": 6, "accepted": 1, "replaced": 2}
    assert ledger.upload_share == 0.3
    assert ledger.cloud_call_share == 0.4
    assert ledger.accept_length == 1.0  # a prefix token, one accepted, two replaced, in four passes
    assert Ledger().upload_share == Ledger().cloud_call_share == Ledger().accept_length == 0.0


def test_document_has_every_field_and_counts() -> None:
    ledger = Ledger(tokens=2, cloud_ms=1.23456, decided=["device", "prefix"])
    document = json.loads(json.dumps(ledger.to_dict()))
    assert document["decided"] == {"prefix": 1, "device": 1, "accepted": 0, "replaced": 0}
    assert document["cloud_ms"] == 1.235
    assert set(document) == set(Ledger.__dataclass_fields__)


def test_deciders_are_numbered_as_on_the_wire() -> None:
    assert DECIDERS == ("prefix", "device", "accepted", "replaced")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_identities(tiny_bundle: Bundle, tiny_cloud: Cloud, case: str, seed: int) -> None:
    message = opening("a smiling cat", seed=seed, **CASES[case])
    wire = InProcessTransport(tiny_cloud)
    result = device_session(tiny_bundle, wire, message, threshold=0.9).run()
    ledger, values = result.ledger, message.settings
    counts = ledger.counts
    assert ledger.tokens == len(result.tokens) == len(ledger.decided) == 16
    assert sum(counts.values()) == 16
    asked = counts["accepted"] + counts["replaced"]
    assert ledger.upload_share == asked / 16
    assert ledger.discarded == 0
    rows = 1 if values.guidance == 1.0 else 2
    if values.strategy == "base":
        assert counts["prefix"] == 16
        assert (ledger.cloud_passes, ledger.token_rows) == (16, 16 * rows)
        assert ledger.device_steps == 0
        assert ledger.critical_round_trips == 2
    if values.strategy == "ciar":
        prefix = int(values.prefix_rate * 16)
        assert counts["prefix"] == prefix
        assert counts["device"] == 16 - prefix - asked
        # The prefill, then a pass for each token of the prefix but the first and for each uploaded one
        # (the prefill answers position 0).
        first_is_free = prefix > 0 or ledger.decided[0] != "device"
        assert ledger.round_trips == ledger.critical_round_trips == 1 + (prefix > 0) + asked
        assert ledger.round_trips > 1, "choose a seed whose device asks"
        assert ledger.cloud_passes == 1 + prefix + asked - first_is_free
        # Every token before the last one that the cloud decided is fed once, in each row.
        last = max(i for i, d in enumerate(ledger.decided) if d != "device")
        assert ledger.token_rows == rows * (1 + last)
    if values.strategy == "lossless":
        windows = -(-16 // values.window)
        assert asked == 16
        assert ledger.round_trips == ledger.critical_round_trips == 1 + windows
        assert windows <= ledger.cloud_passes <= 17
        assert ledger.token_rows >= rows * 16
        assert ledger.device_steps >= 15
    if values.strategy == "device-only":
        assert counts["device"] == 16
        assert ledger.device_steps == 15
        assert (ledger.cloud_passes, ledger.bytes_up, ledger.bytes_down, ledger.round_trips) == (0, 0, 0, 0)
    else:
        assert ledger.bytes_up > 0
        assert ledger.bytes_down > 0
        assert ledger.cloud_ms > 0
    assert (ledger.device_ms > 0) == (values.strategy != "base")
