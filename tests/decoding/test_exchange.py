"""Verification shared by both sides: what travels, what is refused, and faults that the laws show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from drive import device_session, opening
from law_suite import ALL_THREE, CLOUD, DEVICES, PLAIN, WRONG_RESIDUALS, Q, bank, chain_misfit, settings_of
from table_cloud import CODES, BankNoise, drawing_from, make_picture
from vector_law import laws

import ciar.decoding.exchange as exchange
import ciar.decoding.strategies.dssd as dssd
from ciar.cloud.sessions import Cloud
from ciar.decoding.exchange import pack_law, unpack_law
from ciar.decoding.strategy import DeviceRun, Proposal, Propose, Receive, Send, get_strategy
from ciar.errors import ProtocolError
from ciar.models.bundle import Bundle
from ciar.protocol.codec import encode
from ciar.protocol.messages import Draft, LawRow, Patch
from ciar.transport.inprocess import InProcessTransport

BOTH = pytest.mark.parametrize("name", ["dssd", "picospec"])


@pytest.mark.parametrize("law", [PLAIN, ALL_THREE])
def test_a_law_comes_back_as_it_was(law: Any) -> None:
    for row in laws(CLOUD, law)[:40]:
        packed = pack_law(row)
        assert bool(packed.ids) == bool((row == -torch.inf).any())
        assert torch.equal(unpack_law(packed, CODES), row)
        encode(Patch(0, 0, (), (), 0, law=packed))


@pytest.mark.parametrize("ids", [(0, 8), ()], ids=["a code too many", "too few codes"])
def test_a_law_of_other_codes_is_refused(ids: tuple[int, ...]) -> None:
    halves = np.log(np.array([0.5, 0.5], "<f4")).tobytes()
    with pytest.raises(ProtocolError, match="law"):
        unpack_law(LawRow(ids, halves), CODES)


@BOTH
def test_the_cloud_needs_no_device_model(tiny_bundle: Bundle, name: str) -> None:
    """And the picture is the one that a cloud with its own copy gives."""
    cloud = Cloud(tiny_bundle)
    cloud.engine.device_model = None
    window = 3 if name == "dssd" else 16  # of picospec every token is judged
    for seed in range(4):
        made = [
            device_session(tiny_bundle, InProcessTransport(which), message, retries=0).run()
            for which, message in (
                (cloud, opening("a red cat", name, seed=seed, window=3, top_k=9)),
                (Cloud(tiny_bundle), opening("a red cat", "speculative", seed=seed, window=window, top_k=9)),
            )
        ]
        assert made[0].tokens == made[1].tokens
        down = made[0].ledger.bytes_down
        rejected = made[0].ledger.counts["replaced"]
        assert rejected > 0
        # The last rejection may be of the last token; every other brings 9 codes of 6 bytes down.
        assert down >= rejected * 9 * 6


@BOTH
def test_a_draft_that_tells_nothing_is_refused(tiny_cloud: Cloud, name: str) -> None:
    session = tiny_cloud.open(opening("a cat", name))
    with pytest.raises(ProtocolError, match="log-probability"):
        list(session.handle(Draft(0, 0, (1, 2), (False, False))))


def test_picospec_drafts_while_its_draft_is_in_flight() -> None:
    run = DeviceRun(settings_of("picospec", window=2), 6, None)  # type: ignore[arg-type]
    half = get_strategy("picospec").device(run)
    seen, reply, sent = [], None, Draft(0, 0)
    while True:
        op = half.send(reply)
        seen.append(type(op).__name__)
        reply = None
        if isinstance(op, Propose):
            reply = Proposal(len(op.tokens), 0.0, log_prob=-0.5)
        elif isinstance(op, Send):
            assert isinstance(op.message, Draft)
            sent = op.message
        elif isinstance(op, Receive):
            ids = sent.ids
            reply = Patch(sent.step, sent.start, ids, (2,) * len(ids), sent.start + len(ids))
            if len(run.tokens) == 6:
                break
    first = ["Propose", "Propose", "Send", "Propose", "Propose", "Receive", "Commit"]
    # The second draft leaves at once; what is drafted behind it was not there before.
    assert seen == [*first, "Send", "Propose", "Propose", "Receive", "Commit", "Send", "Receive"]
    assert run.discarded == 0


@BOTH
def test_every_drafted_token_is_accounted_for(name: str) -> None:
    """Known fault A14."""
    drafted = 0
    draw = drawing_from(Q)

    def drafter(tokens: list[int], noise: BankNoise) -> int:
        nonlocal drafted
        drafted += 1
        return draw(tokens, noise)

    for picture in range(60):
        drafted = 0
        settings = settings_of(name, window=2)
        device, session = make_picture(CLOUD, settings, BankNoise(bank(), picture), drafter, device_laws=Q)
        counts = {kind: device.decided.count(kind) for kind in ("accepted", "replaced", "prefix")}
        assert sum(counts.values()) == len(device.tokens)
        assert drafted == counts["accepted"] + counts["replaced"] + device.discarded
        # The cloud knows the whole picture, the device's own last token included.
        assert session.run.tokens == device.tokens
        assert session.run.decided == device.decided


# --- planted faults -------------------------------------------------------------------------------


@BOTH
def test_without_a_fault_the_law_fits(name: str) -> None:
    assert not chain_misfit(400, name)


@pytest.mark.parametrize(
    ("name", "kind"), [*(("dssd", kind) for kind in WRONG_RESIDUALS), ("picospec", "absolute")]
)
def test_fault_wrong_residual(monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    monkeypatch.setattr(exchange, "residual", WRONG_RESIDUALS[kind])
    assert chain_misfit(name=name)


def test_fault_most_likely_codes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the public codes send: the residual of a law without its tail."""

    def truncated(law: torch.Tensor) -> LawRow:
        return pack_law(law.where(law >= law.topk(2).values[-1], -torch.inf).log_softmax(-1))

    monkeypatch.setattr(exchange, "pack_law", truncated)
    assert chain_misfit(name="dssd")


def test_fault_the_chance_of_another_law() -> None:
    """Known fault A2: the device tells its law before temperature, top-k and top-p."""
    raw = DEVICES["sometimes"].logits.log_softmax(-1)
    assert chain_misfit(name="dssd", q=raw, drafter=drawing_from(laws(DEVICES["sometimes"], ALL_THREE)))


def test_fault_the_drawn_token_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cloud goes on behind another token than the device's."""
    plain = exchange.send_told

    def forgetful(run: Any, known: int, told: list[float]) -> Send:
        draft = plain(run, known, told).message
        assert isinstance(draft, Draft)
        ids = tuple(0 if sure else token for token, sure in zip(draft.ids, draft.certain, strict=True))
        return Send(replace(draft, ids=ids))

    monkeypatch.setattr(dssd, "send_told", forgetful)
    assert chain_misfit(name="dssd")
