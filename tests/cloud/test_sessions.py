"""Cloud sessions on the tiny backbone: exactness, honest caches, resumption, refusals."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drive import Propose, finish_session, opening, picture_of
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ciar.cloud.sessions import Cloud, CloudSession
from ciar.decoding.drafter import Drafter
from ciar.decoding.features import pack_feature
from ciar.decoding.noise import PictureNoise
from ciar.decoding.sampling import SamplingLaw, choose, to_law
from ciar.decoding.strategy import Pass
from ciar.errors import CheckpointError, CiarError, InputError, NumericalError, ProtocolError
from ciar.ledger import DECIDERS
from ciar.models.bundle import Bundle, load_bundle
from ciar.protocol.messages import Done, Draft, Open, Patch

LONG = "a red car with a smiling dog sunglasses"


def base_picture(cloud: Cloud, message: Open) -> list[int]:
    """Plain AR's tokens for the same prompt, seed and settings."""
    return picture_of(cloud, replace(message, settings=replace(message.settings, strategy="base")))[0]


def oracle(truth: list[int]) -> Propose:
    return lambda tokens: truth[len(tokens)]


def always_wrong(truth: list[int]) -> Propose:
    return lambda tokens: (truth[len(tokens)] + 1) % 64


def at_random(seed: int) -> Propose:
    generator = torch.Generator().manual_seed(seed)
    return lambda tokens: int(torch.randint(64, (1,), generator=generator))


def tiny_drafts(bundle: Bundle, message: Open) -> Propose:
    """The tiny device model under the picture's noise: what a real device proposes."""
    drafter = Drafter(bundle.device_model, bundle.device_trunk, bundle.text.encode(message.prompt))
    values = message.settings
    law = SamplingLaw(values.temperature, values.top_k, values.top_p)
    noise = PictureNoise(values.seed, values.image, 16, 64)

    def propose(tokens: list[int]) -> int:
        with torch.no_grad():
            centre = bundle.device_model.head.centre_logits(drafter.hidden(tokens))
            return int(choose(to_law(centre, law), noise.gumbel(len(tokens), 1)[0]))

    return propose


# --- lossless is base, token for token ------------------------------------------------------------


@pytest.mark.parametrize("window", range(1, 17))
def test_lossless_equals_base_for_every_window(tiny_cloud: Cloud, tiny_bundle: Bundle, window: int) -> None:
    message = opening(strategy="lossless", seed=window, window=window)
    truth = base_picture(tiny_cloud, message)
    drafters = {
        "oracle": oracle(truth),
        "always wrong": always_wrong(truth),
        "random": at_random(window),
        "device": tiny_drafts(tiny_bundle, message),
    }
    for name, propose in drafters.items():
        tokens, session = picture_of(tiny_cloud, message, propose, window)
        assert tokens == truth, name
        assert session._run.fed == 15
        decided = session._run.decided
        if name == "oracle":
            # One pass a window and the prefill, which answers a first window of one token alone.
            assert session._slot.passes == 1 + -(-16 // window) - (window == 1)
            assert session._slot.token_rows == 2 * (1 + 15)
            assert decided == ["accepted"] * 16
        if name == "always wrong":
            # Each sweep makes one token final at least; where a sweep's own choices come right by
            # luck (they are made after wrong tokens) it is fewer.
            assert session._slot.passes <= 17 - (window == 1)
            assert session._slot.passes == 16 or window > 1
            assert decided == ["replaced"] * 16


@pytest.mark.parametrize("guidance", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("negative", ["", "dog", "a smiling dog with red sunglasses"])
@pytest.mark.parametrize("prompt", ["cat", LONG])
def test_lossless_equals_base_for_every_guidance(
    tiny_cloud: Cloud, prompt: str, negative: str, guidance: float
) -> None:
    message = opening(prompt, "lossless", negative, seed=3, guidance=guidance)
    truth = base_picture(tiny_cloud, message)
    for window, propose in ((1, at_random(0)), (5, at_random(1)), (16, always_wrong(truth))):
        tokens, session = picture_of(tiny_cloud, message, propose, window)
        assert tokens == truth
        assert session._slot.cache.rows == (1 if guidance == 1.0 else 2)


@pytest.mark.parametrize(
    "law",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
        {"top_k": 1},
        {"top_p": 0.3},
    ],
    ids=str,
)
def test_lossless_equals_base_for_every_law(tiny_cloud: Cloud, law: dict[str, Any]) -> None:
    message = opening(strategy="lossless", seed=4, **law)
    truth = base_picture(tiny_cloud, message)
    for window in (1, 3, 16):
        assert picture_of(tiny_cloud, message, at_random(window), window)[0] == truth
    if law.get("temperature") == 0.0 or law.get("top_k") == 1:
        other_seed = replace(message, settings=replace(message.settings, seed=5))
        assert base_picture(tiny_cloud, other_seed) == truth


def test_chunking_does_not_matter(tiny_cloud: Cloud) -> None:
    """``base`` asked for its tokens in parts gives the same picture."""
    truth = base_picture(tiny_cloud, opening(seed=6))
    session = tiny_cloud.open(opening(seed=6))
    tokens: list[int] = []
    for step, want in enumerate((1, 5, 2, 7, 1)):
        answers = list(session.handle(Draft(step, len(tokens), want=want)))
        tokens += [i for a in answers if isinstance(a, Patch) for i in a.ids]
    assert tokens == truth


# --- caches and the invariant of the fed cells -----------------------------------------------------


def assert_honest_cells(cloud: Cloud, session: CloudSession, message: Open) -> None:
    """Cells before ``fed`` hold what a fresh session computes for the final tokens."""
    run, slot = session._run, session._slot
    assert run.fed <= len(run.tokens)
    assert len(run.decided) == len(run.tokens)
    if run.fed == 0:
        return
    # A session takes up a history by feeding all of it but the last token.
    decided = tuple(DECIDERS.index(d) for d in run.decided)
    padded = (*run.tokens, 0)[: run.fed + 1]
    padded_decided = (*decided, 0)[: run.fed + 1]
    fresh = cloud.open(replace(message, history=padded, history_decided=padded_decided))
    end = slot.cache.cells.shape[4] - 16 + run.fed
    found, expected = slot.cache.cells[..., :end, :], fresh._slot.cache.cells[..., :end, :]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0.0)


#: Drafts of random ids.
WALKS = st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=7), min_size=1, max_size=5)


def walk(session: CloudSession, prefix: int, drafts: list[list[int]], check: Callable[[], None]) -> None:
    """Lets the cloud make a prefix, then sends drafts; checks after every answer."""
    messages = [Draft(0, 0, want=prefix)] if prefix else []
    known = prefix
    for ids in drafts:
        ids = ids[: 16 - known]
        if ids:
            flags = (True,) * (len(ids) - 1) + (False,)
            messages.append(Draft(len(messages), known, tuple(ids), flags))
        known += len(ids)
    for message in messages:
        for answer in session.handle(message):
            if isinstance(answer, Patch):
                assert answer.horizon == answer.start + len(answer.ids) == len(session._run.tokens)
        check()


@given(drafts=WALKS, negative=st.sampled_from(["", "dog"]))
@settings(max_examples=20, deadline=None)
def test_cells_after_every_repaired_window(tiny_cloud: Cloud, drafts: list[list[int]], negative: str) -> None:
    message = opening(strategy="lossless", negative=negative, seed=8)
    session = tiny_cloud.open(message)
    walk(session, 0, drafts, lambda: assert_honest_cells(tiny_cloud, session, message))


@given(
    prefix=st.integers(0, 3),
    drafts=WALKS,
    action=st.sampled_from(["replace", "verify"]),
    injection=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_cells_after_every_answer(
    tiny_cloud: Cloud, prefix: int, drafts: list[list[int]], action: str, injection: bool
) -> None:
    message = opening(strategy="ciar", seed=9, action=action, injection=injection)
    session = tiny_cloud.open(message)
    walk(session, prefix, drafts, lambda: assert_honest_cells(tiny_cloud, session, message))


# --- steps ----------------------------------------------------------------------------------------


def test_a_repeated_step_is_answered_the_same_way(tiny_cloud: Cloud) -> None:
    session = tiny_cloud.open(opening(strategy="lossless", seed=1))
    draft = Draft(0, 0, (5, 6, 7), (False,) * 3)
    first = list(session.handle(draft))
    passes = session._slot.passes
    assert list(session.handle(draft)) == first
    assert (session._slot.passes, len(session._run.tokens)) == (passes, 3)
    last = Draft(1, 3, (0,) * 13, (False,) * 13)
    done = list(session.handle(last))
    assert isinstance(done[-1], Done)
    assert list(session.handle(last)) == done


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft(3, 2, (1,), (False,)), "Draft 3 came where 1 was due"),
        (Draft(1, 1, (1,), (False,)), "starts at 1 but 2 tokens are known"),
        (Draft(1, 3, (1,), (False,)), "starts at 3 but 2 tokens are known"),
        (Draft(1, 2, (64,), (False,)), "not below 64"),
        (Draft(1, 2, (-1,), (False,)), "not below 64"),
        (Draft(1, 2, (0,) * 15, (False,) * 15), "1 to 14 of them"),
        (Draft(1, 2, want=15), "1 to 14 of them"),
        (Draft(1, 2), "1 to 14 of them"),
        (Draft(1, 2, (1,), (False,), want=1), "ids or asks"),
        (Draft(1, 2, (1, 2), (False,)), "one certainty flag for each id"),
        (Draft(1, 2, (1,), (False,), features=b"x"), "Interval features"),
        (Draft(1, 2, want=1, features=b"x" * 34), "Interval features"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused_and_changes_nothing(
    tiny_cloud: Cloud, draft: Draft, message: str
) -> None:
    session = tiny_cloud.open(opening(strategy="ciar", seed=1))
    list(session.handle(Draft(0, 0, want=2)))
    before = (list(session._run.tokens), session._run.fed, session._slot.passes)
    with pytest.raises(ProtocolError, match=message):
        list(session.handle(draft))
    assert (session._run.tokens, session._run.fed, session._slot.passes) == before


def test_a_refused_draft_does_not_use_up_its_step(tiny_cloud: Cloud) -> None:
    session = tiny_cloud.open(opening(strategy="ciar", seed=1))
    with pytest.raises(ProtocolError):
        list(session.handle(Draft(0, 0, (1,), (False,), features=b"short")))
    assert [type(a) for a in session.handle(Draft(0, 0, (1,), (False,)))] == [Patch]


# --- resumption -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["base", "lossless"])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_history_is_taken_up_at_every_cut(tiny_cloud: Cloud, strategy: str, guidance: float) -> None:
    """Known faults B5 and D1: another replica goes on from (prompt, seed, settings, tokens)."""
    message = opening(LONG, strategy, seed=11, guidance=guidance)
    truth = base_picture(tiny_cloud, message)
    for cut in range(17):
        session = tiny_cloud.open(replace(message, history=tuple(truth[:cut])))
        assert session._run.fed == max(cut - 1, 0)
        assert finish_session(session, at_random(cut)) == truth


@pytest.mark.parametrize(
    ("history", "decided"),
    [((0,) * 17, ()), ((64,), ()), ((-1,), ()), ((1, 2), (0,)), ((1,), (0, 0)), ((1,), (4,)), ((1,), (-1,))],
)
def test_a_history_that_does_not_fit_is_refused(
    tiny_cloud: Cloud, history: tuple[int, ...], decided: tuple[int, ...]
) -> None:
    with pytest.raises(ProtocolError):
        tiny_cloud.open(opening(history=history, history_decided=decided))


def test_a_finished_history_needs_nothing_more(tiny_cloud: Cloud) -> None:
    truth = base_picture(tiny_cloud, opening(seed=2))
    session = tiny_cloud.open(replace(opening(seed=2), history=tuple(truth)))
    with pytest.raises(ProtocolError):
        list(session.handle(Draft(0, 16, want=1)))


# --- ciar ------------------------------------------------------------------------------------------


def upload_all(cloud: Cloud, message: Open, propose: Propose) -> CloudSession:
    session = cloud.open(message)
    for step in range(16):
        known = session._run.tokens
        list(session.handle(Draft(step, step, (propose(list(known)),), (False,))))
    return session


def test_replacing_everything_is_base(tiny_cloud: Cloud, tiny_bundle: Bundle) -> None:
    message = opening(strategy="ciar", seed=12, injection=False)
    truth = base_picture(tiny_cloud, message)
    session = upload_all(tiny_cloud, message, tiny_drafts(tiny_bundle, message))
    assert session._run.tokens == truth
    assert session._slot.passes == 16


def test_verifying_takes_a_proposal_outside_both_laws_for_wrong(tiny_cloud: Cloud) -> None:
    """A token that no law can give is never kept, whoever proposes it (known faults A2, A3)."""
    message = opening(strategy="ciar", seed=12, action="verify", top_k=4)
    session = tiny_cloud.open(message)
    for step in range(16):
        hidden = session._drafter().hidden(session._run.tokens)
        with torch.no_grad():
            centre = tiny_cloud.bundle.device_model.head.centre_logits(hidden)
        law = cloud_law(tiny_cloud, message, list(session._run.tokens))
        token = next(t for t in centre.argsort().tolist() if law[t] == -torch.inf)
        list(session.handle(Draft(step, step, (token,), (False,))))
        assert session._run.decided[-1] == "replaced"
        assert law[session._run.tokens[-1]] > -torch.inf


def cloud_law(cloud: Cloud, message: Open, tokens: list[int]) -> torch.Tensor:
    """The processed law of the next token in a fresh session."""
    decided = tuple(DECIDERS.index("replaced") for _ in tokens)
    session = cloud.open(replace(message, history=tuple(tokens), history_decided=decided))
    request = Pass(len(tokens) - 1, tokens[-1:]) if tokens else Pass(0, [])
    return to_law(session._pass(request)[-1], session._run.law)


@pytest.mark.parametrize("action", ["replace", "verify"])
def test_injection_is_heard(tiny_cloud: Cloud, tiny_bundle: Bundle, action: str) -> None:
    """With features of certain tokens the cloud's law is another; without, it is plain."""
    laws = []
    for injection in (True, False):
        session = tiny_cloud.open(opening(strategy="ciar", seed=13, action=action, injection=injection))
        list(session.handle(Draft(0, 0, (1, 2, 3, 4, 5), (True,) * 4 + (False,))))
        laws.append(session._slot.cache.cells.clone())
    assert (laws[0] - laws[1]).abs().max() > 1e-3


def test_features_that_travel_equal_those_that_are_recomputed(tiny_cloud: Cloud, tiny_bundle: Bundle) -> None:
    """Payload ``features``: the cloud adds what it is sent, one int8 step from its own."""
    ids = (7, 8, 9, 10, 11)
    drafter = Drafter(
        tiny_bundle.device_model, tiny_bundle.device_trunk, tiny_bundle.text.encode("a red cat")
    )
    drafter.feed(list(ids))
    sent = b"".join(pack_feature(row) for row in drafter.features(0, 5))
    cells = []
    for payload, features in (("ids", b""), ("features", sent)):
        session = tiny_cloud.open(opening(strategy="ciar", seed=13, payload=payload))
        list(session.handle(Draft(0, 0, ids, (True,) * 4 + (False,), features=features)))
        cells.append(session._slot.cache.cells.clone())
    torch.testing.assert_close(cells[0], cells[1], atol=0.05, rtol=0.0)
    assert not torch.equal(cells[0], cells[1])


# --- what is refused on opening ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"backbone": "other"}, ProtocolError, "runs 'tiny', not 'other'"),
        ({"weights": "0123456789abcdef"}, ProtocolError, "Install the same version"),
        ({"prompt": ""}, InputError, "prompt is empty"),
        ({"prompt": " \x00 "}, InputError, "prompt is empty"),
        ({"prompt": "xyzzy"}, InputError, "No word of the prompt"),
        ({"negative_prompt": "xyzzy"}, InputError, "No word of the prompt"),
    ],
)
def test_what_cannot_be_opened(
    tiny_cloud: Cloud, change: dict[str, str], kind: type[CiarError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        tiny_cloud.open(replace(opening(), **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"strategy": "magic"}, "base, ciar"),
        ({"strategy": "device-only"}, "does not use a cloud"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 2.0}, "top_p"),
    ],
)
def test_settings_that_cannot_be_opened(tiny_cloud: Cloud, values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny_cloud.open(opening(**values))


def test_own_digest_and_any_digest_are_welcome(tiny_cloud: Cloud) -> None:
    for weights in ("", tiny_cloud.weights):
        assert tiny_cloud.open(replace(opening(), weights=weights)).opened.tokens == 16


def test_a_cut_prompt_is_announced(tiny_cloud: Cloud) -> None:
    opened = tiny_cloud.open(opening("a red car with a smiling dog with sunglasses")).opened
    assert "the limit is 8" in opened.warnings[0]
    assert (opened.tokens, opened.vocab_size) == (16, 64)


# --- damaged and incomplete backbones ----------------------------------------------------------------


def damaged(folder: Path, file: str, name: str, tmp_path: Path) -> Cloud:
    copy = Path(shutil.copytree(folder, tmp_path / "damaged"))
    weights = load_file(copy / file)
    weights[name][3] = float("nan")
    save_file(weights, copy / file)
    return Cloud(load_bundle(copy))


def test_nan_in_the_cloud_ends_the_session(tiny_folder: Path, tmp_path: Path) -> None:
    cloud = damaged(tiny_folder, "gpt.safetensors", "output.weight", tmp_path)
    session = cloud.open(opening())
    with pytest.raises(NumericalError, match="the cloud model"):
        list(session.handle(Draft(0, 0, want=4)))
    assert session._run.tokens == []


def test_nan_in_the_device_copy_ends_the_session(tiny_folder: Path, tmp_path: Path) -> None:
    cloud = damaged(tiny_folder, "device.safetensors", "head.centre.weight", tmp_path)
    session = cloud.open(opening(strategy="ciar", action="verify"))
    with pytest.raises(NumericalError, match="the device model"):
        list(session.handle(Draft(0, 0, (1,), (False,))))


def test_a_cloud_without_device_model(tiny_folder: Path, tmp_path: Path) -> None:
    """Plain AR works; what needs the device's features says so."""
    copy = Path(shutil.copytree(tiny_folder, tmp_path / "copy"))
    text = (copy / "config.json").read_text()
    (copy / "config.json").write_text(text.replace('"devices": {', '"devices_elsewhere": {'))
    cloud = Cloud(load_bundle(copy))
    truth = base_picture(cloud, opening(seed=1))
    assert len(truth) == 16
    session = cloud.open(opening(strategy="ciar", seed=1, action="verify"))
    with pytest.raises(CheckpointError, match="no copy of the device model"):
        list(session.handle(Draft(0, 0, (1,), (False,))))


# --- sessions side by side ----------------------------------------------------------------------------


def test_sessions_in_turn_equal_sessions_alone(tiny_cloud: Cloud) -> None:
    """Known faults A6 and B1: seeds 0 to 7 at once, in any order, and each alone."""
    messages = [opening("cat" if s % 2 else LONG, "lossless", seed=s) for s in range(8)]
    expected = [base_picture(tiny_cloud, message) for message in messages]
    assert len({tuple(tokens) for tokens in expected}) == 8
    sessions = {s: tiny_cloud.open(messages[s]) for s in (5, 2, 7, 0, 3, 6, 1, 4)}
    for step in range(4):
        for s in ((step * 3 + i * 5) % 8 for i in range(8)):
            list(sessions[s].handle(Draft(step, 4 * step, (s, 1, 2, 3), (False,) * 4)))
    assert [sessions[s]._run.tokens for s in range(8)] == expected


def test_closing_twice_is_safe(tiny_cloud: Cloud) -> None:
    session = tiny_cloud.open(opening())
    session.close()
    session.close()


def test_costs_add_up(tiny_cloud: Cloud) -> None:
    session = tiny_cloud.open(opening(seed=1))
    answers = [a for s in range(4) for a in session.handle(Draft(s, 4 * s, want=4))]
    spent = session.opened.passes + sum(a.cost.passes for a in answers)
    assert spent == session._slot.passes == 16
    rows = session.opened.token_rows + sum(a.cost.token_rows for a in answers)
    assert rows == session._slot.token_rows == 32
    total = session.opened.cloud_ms + sum(a.cost.cloud_ms for a in answers)
    assert total == pytest.approx(session._slot.milliseconds)
    assert isinstance(answers[-1], Done)


def test_a_closed_session_computes_nothing_more(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix is one answer of many passes: a device that left must not hold a worker for all of them."""
    cloud = Cloud(tiny_bundle)
    session = cloud.open(opening(strategy="ciar", prefix_rate=1.0))
    passes: list[Pass] = []
    run = cloud.engine.run

    def counted(slot: Any, request: Pass, features: Any = None) -> torch.Tensor:
        passes.append(request)
        if len(passes) == 3:
            session.close()
        return run(slot, request, features)

    monkeypatch.setattr(cloud.engine, "run", counted)
    assert list(session.handle(Draft(0, 0, want=16))) == []
    assert len(passes) == 3
