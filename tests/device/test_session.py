"""The device's side of a picture: the same tokens over any wire, after any loss, with honest counts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from drive import device_session, opening, picture_of
from safetensors.torch import load_file, save_file

from ciar.cloud.sessions import Cloud
from ciar.device.session import PictureResult
from ciar.errors import CloudUnavailable, NumericalError, ProtocolError
from ciar.ledger import Ledger
from ciar.models.bundle import Bundle, load_bundle
from ciar.protocol.messages import Done, Draft, Open, Opened, Patch
from ciar.transport.base import MoreDrafts
from ciar.transport.faulty import Fault, FaultyTransport
from ciar.transport.inprocess import InProcessTransport

CASES: dict[str, dict[str, Any]] = {
    "base": {"strategy": "base"},
    "lossless": {"strategy": "lossless", "window": 5},
    "ciar": {"strategy": "ciar", "prefix_rate": 0.2},
    "ciar, no injection": {"strategy": "ciar", "injection": False},
    "ciar, verify": {"strategy": "ciar", "action": "verify", "guidance": 1.0},
    "ciar, features": {"strategy": "ciar", "payload": "features"},
}
PROMPT = "a smiling cat with red sunglasses"


def message_of(case: str, seed: int = 5) -> Open:
    return opening(PROMPT, seed=seed, **CASES[case])


@pytest.fixture
def wire(tiny_cloud: Cloud) -> InProcessTransport:
    return InProcessTransport(tiny_cloud)


def picture(bundle: Bundle, wire: InProcessTransport, message: Open, **values: Any) -> PictureResult:
    return device_session(bundle, wire, message, **values).run()


# --- resumption -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_picture_goes_on_from_every_cut(tiny_bundle: Bundle, wire: InProcessTransport, case: str) -> None:
    """A new device and a new cloud that know the first tokens and their deciders finish the picture."""
    whole = picture(tiny_bundle, wire, message_of(case))
    for cut in range(1, 16):
        session = device_session(tiny_bundle, wire, message_of(case))
        session.run_state.tokens[:] = whole.tokens[:cut]
        session.run_state.decided[:] = whole.ledger.decided[:cut]
        resumed = session.run()
        assert resumed.tokens == whole.tokens, cut
        if case == "base":  # the opening, and the first of the patches that come by themselves
            assert resumed.ledger.critical_round_trips == 2 == whole.ledger.critical_round_trips
        if case != "lossless":  # other windows: the same tokens, other guesses
            assert resumed.ledger.decided == whole.ledger.decided, cut


def test_a_whole_picture_that_is_taken_up_asks_for_nothing(
    tiny_bundle: Bundle, wire: InProcessTransport
) -> None:
    whole = picture(tiny_bundle, wire, message_of("base"))
    session = device_session(tiny_bundle, wire, message_of("base"))
    session.resume(whole.tokens, whole.ledger.decided)
    again = session.run()
    assert again.tokens == whole.tokens
    assert again.ledger.round_trips == 1


def frames_of(case: str, bundle: Bundle, cloud: Cloud) -> dict[str, int]:
    """How many frames go each way in an undisturbed picture."""
    counting = FaultyTransport(InProcessTransport(cloud))
    device_session(bundle, counting, message_of(case)).run()
    return dict(counting._counts)


@pytest.mark.parametrize("kind", ["close", "drop"])
@pytest.mark.parametrize("case", CASES)
def test_a_lost_frame_costs_a_prefill_and_never_the_image(
    tiny_bundle: Bundle, tiny_cloud: Cloud, case: str, kind: Any
) -> None:
    """Known fault D1: the connection dies at any frame, either way, and the picture is the same."""
    whole = picture(tiny_bundle, InProcessTransport(tiny_cloud), message_of(case))
    for direction, count in frames_of(case, tiny_bundle, tiny_cloud).items():
        for frame in range(1, count):
            if kind == "drop" and direction == "down" and frame == count - 1:
                continue  # a lost last patch, with Done behind it: a live connection does not do that
            fault = Fault(direction, frame, kind)  # type: ignore[arg-type]
            wire = FaultyTransport(InProcessTransport(tiny_cloud), [fault])
            result = device_session(tiny_bundle, wire, message_of(case)).run()
            assert wire.struck == [fault]
            assert result.tokens == whole.tokens, fault
            assert len(result.ledger.decided) == 16
            assert result.ledger.round_trips >= whole.ledger.round_trips
            assert result.ledger.bytes_up > whole.ledger.bytes_up


def test_a_dead_server_at_the_start_is_no_picture(tiny_bundle: Bundle, tiny_cloud: Cloud) -> None:
    for direction in ("up", "down"):
        wire = FaultyTransport(InProcessTransport(tiny_cloud), [Fault(direction, 0, "close")])  # type: ignore[arg-type]
        with pytest.raises(CloudUnavailable):
            device_session(tiny_bundle, wire, message_of("ciar")).run()


def test_retries_are_limited(tiny_bundle: Bundle, tiny_cloud: Cloud) -> None:
    """Frames up: Open, draft (lost), Open, draft (lost), Open, draft (lost)."""
    faults = [Fault("up", frame, "close") for frame in (1, 3, 5)]
    wire = FaultyTransport(InProcessTransport(tiny_cloud), faults)
    with pytest.raises(CloudUnavailable):
        device_session(tiny_bundle, wire, message_of("ciar"), retries=2).run()
    assert len(wire.struck) == 3
    wire = FaultyTransport(InProcessTransport(tiny_cloud), faults)
    assert len(device_session(tiny_bundle, wire, message_of("ciar"), retries=3).run().tokens) == 16


def test_tokens_thrown_away_are_counted(tiny_bundle: Bundle, tiny_cloud: Cloud) -> None:
    """A device that keeps everything loses its unconfirmed tokens with the connection, and says so."""
    message = opening(PROMPT, "lossless", seed=5, window=8)
    wire = FaultyTransport(InProcessTransport(tiny_cloud), [Fault("up", 2, "close")])
    result = device_session(tiny_bundle, wire, message).run()
    assert result.ledger.discarded == 8
    drafted = 8 + 8 + 8  # the second window was drafted twice
    counts = result.ledger.counts
    assert drafted == counts["accepted"] + counts["replaced"] + result.ledger.discarded


@pytest.mark.parametrize("case", CASES)
def test_a_repeated_frame_changes_nothing(tiny_bundle: Bundle, tiny_cloud: Cloud, case: str) -> None:
    """Idempotent steps: a draft or an answer that arrives twice."""
    whole = picture(tiny_bundle, InProcessTransport(tiny_cloud), message_of(case))
    for direction, count in frames_of(case, tiny_bundle, tiny_cloud).items():
        for frame in range(1, count):
            fault = Fault(direction, frame, "duplicate")  # type: ignore[arg-type]
            wire = FaultyTransport(InProcessTransport(tiny_cloud), [fault])
            result = device_session(tiny_bundle, wire, message_of(case)).run()
            assert result.tokens == whole.tokens, fault
            assert result.ledger.decided == whole.ledger.decided, fault


# --- payloads and settings --------------------------------------------------------------------------


def test_payloads_decide_alike(tiny_bundle: Bundle, wire: InProcessTransport) -> None:
    """Features that travel cost bytes; apart from int8 rounding they are what the cloud recomputes."""
    same = 0
    for seed in range(10):
        ids = picture(tiny_bundle, wire, opening(PROMPT, "ciar", seed=seed))
        features = picture(tiny_bundle, wire, opening(PROMPT, "ciar", seed=seed, payload="features"))
        assert [d == "prefix" for d in ids.ledger.decided] == [d == "prefix" for d in features.ledger.decided]
        same += ids.tokens == features.tokens and ids.ledger.decided == features.ledger.decided
        if features.ledger.upload_share and ids.tokens == features.tokens:
            assert features.ledger.bytes_up > ids.ledger.bytes_up + 34
    assert same >= 9


def test_features_are_not_sent_when_they_are_not_wanted(
    tiny_bundle: Bundle, wire: InProcessTransport
) -> None:
    plain = picture(tiny_bundle, wire, opening(PROMPT, "ciar", seed=1, injection=False))
    unused = picture(tiny_bundle, wire, opening(PROMPT, "ciar", seed=1, injection=False, payload="features"))
    assert unused.tokens == plain.tokens
    assert unused.ledger.bytes_up < plain.ledger.bytes_up + 16  # the longer name of the payload


def test_threshold_0_uploads_everything_and_is_base(
    tiny_bundle: Bundle, tiny_cloud: Cloud, wire: InProcessTransport
) -> None:
    for seed in range(3):
        message = opening(PROMPT, "ciar", seed=seed, prefix_rate=0.1, injection=False)
        result = picture(tiny_bundle, wire, message, threshold=0.0)
        base, _ = picture_of(tiny_cloud, opening(PROMPT, seed=seed))
        assert result.tokens == base
        assert result.ledger.counts["device"] == 0
        assert result.ledger.upload_share == 15 / 16


def test_an_endless_threshold_keeps_everything(tiny_bundle: Bundle, wire: InProcessTransport) -> None:
    message = opening(PROMPT, "ciar", seed=2, prefix_rate=0.0)
    kept = picture(tiny_bundle, wire, message, threshold=float("inf"))
    alone = picture(tiny_bundle, wire, opening(PROMPT, "device-only", seed=2))
    assert kept.tokens == alone.tokens
    assert kept.ledger.counts["device"] == 16
    assert (alone.ledger.round_trips, alone.ledger.bytes_up, alone.ledger.cloud_passes) == (0, 0, 0)


def test_what_a_draft_says(tiny_bundle: Bundle, tiny_cloud: Cloud) -> None:
    """The certain tokens since the last answer, vouched for, and the uncertain one that is asked about."""
    drafts: list[Draft] = []

    class Listening:
        backbone, weights = tiny_cloud.backbone, tiny_cloud.weights

        def open(self, message: Open) -> Any:
            session = tiny_cloud.open(message)
            answer = session.handle

            def handle(draft: Draft, more: MoreDrafts) -> Any:
                drafts.append(draft)
                return answer(draft, more)

            session.handle = handle  # type: ignore[method-assign]
            return session

    message = message_of("ciar")
    result = device_session(tiny_bundle, InProcessTransport(Listening()), message).run()
    assert [draft.step for draft in drafts] == list(range(len(drafts)))
    assert (drafts[0].ids, drafts[0].want) == ((), 3)
    known = 3
    for draft in drafts[1:]:
        assert (draft.start, draft.want, draft.features) == (known, 0, b"")
        assert draft.certain == (True,) * (len(draft.ids) - 1) + (False,)
        assert draft.ids[:-1] == tuple(result.tokens[known : known + len(draft.ids) - 1])
        known += len(draft.ids)
        assert result.ledger.decided[known - 1] in ("accepted", "replaced")
    assert result.ledger.counts["device"] == 16 - 3 - (len(drafts) - 1)
    assert len(drafts) > 2


# --- progress, failures ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_progress_rises_to_the_end(tiny_bundle: Bundle, wire: InProcessTransport, case: str) -> None:
    seen: list[int] = []

    def note(done: int, ledger: Ledger) -> None:
        assert len(ledger.decided) == done
        seen.append(done)

    device_session(tiny_bundle, wire, message_of(case)).run(note)
    assert seen == sorted(set(seen))
    assert seen[-1] == 16


def test_a_callback_that_says_false_stops(tiny_bundle: Bundle, wire: InProcessTransport) -> None:
    result = device_session(tiny_bundle, wire, message_of("ciar")).run(lambda done, ledger: done < 6)
    whole = picture(tiny_bundle, wire, message_of("ciar"))
    assert result.stopped
    assert not whole.stopped
    assert result.tokens == whole.tokens[: len(result.tokens)]
    assert 6 <= len(result.tokens) < 16
    assert len(result.ledger.decided) == len(result.tokens)


def test_nan_in_the_device_model_is_named(tiny_folder: Path, tiny_cloud: Cloud, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_folder, tmp_path / "copy"))
    weights = load_file(copy / "device.safetensors")
    weights["head.centre.weight"][0] = float("nan")
    save_file(weights, copy / "device.safetensors")
    wire = InProcessTransport(tiny_cloud)
    with pytest.raises(NumericalError, match="the device model"):
        device_session(load_bundle(copy), wire, message_of("ciar")).run()


def test_nan_in_the_cloud_arrives_as_such(tiny_folder: Path, tiny_bundle: Bundle, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_folder, tmp_path / "copy"))
    weights = load_file(copy / "gpt.safetensors")
    weights["norm.weight"][0] = float("nan")
    save_file(weights, copy / "gpt.safetensors")
    wire = InProcessTransport(Cloud(load_bundle(copy)))
    message = replace(message_of("ciar"), weights="")
    with pytest.raises(NumericalError, match="the cloud model"):
        device_session(tiny_bundle, wire, message).run()


def test_weights_of_another_digest(tiny_bundle: Bundle, wire: InProcessTransport) -> None:
    message = replace(message_of("base"), weights="0" * 16)
    with pytest.raises(ProtocolError, match="Install the same version"):
        device_session(tiny_bundle, wire, message).run()


class Scripted:
    """A cloud that answers every draft with the same messages."""

    backbone, weights = "tiny", ""

    def __init__(self, answers: list[Patch | Done], opened: Opened | None = None) -> None:
        self.answers = answers
        self.opened = opened or Opened("scripted", 16, 64)

    def open(self, message: Open) -> Scripted:
        return self

    def handle(self, draft: Draft, more: MoreDrafts) -> list[Patch | Done]:
        return self.answers

    def close(self) -> None:
        """Holds nothing."""


@pytest.mark.parametrize(
    ("cloud", "message"),
    [
        (Scripted([Patch(0, 1, (1,), (0,), 2)]), "does not fit"),
        (Scripted([Done((0,) * 16)]), "sent Done where a patch was due"),
        (Scripted([], Opened("s", 17, 64)), "another size"),
        (Scripted([], Opened("s", 16, 65)), "another size"),
    ],
)
def test_a_cloud_that_answers_nonsense(tiny_bundle: Bundle, cloud: Scripted, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        device_session(tiny_bundle, InProcessTransport(cloud), opening("cat", "base")).run()
