"""Gates in use: sessions and batches agree, resumed pictures are the same, and shares are held."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drive import device_session, opening
from tiny import TINY_GPT

from ciar.cloud.sessions import Cloud
from ciar.decoding.batch import Batch
from ciar.decoding.gate import LAW_SCORES, SCORE_NAMES
from ciar.decoding.scorer import learned_file, load_learned, scoring_of
from ciar.decoding.strategy import get_strategy
from ciar.errors import CheckpointError, InputError
from ciar.intervals.learned import LearnedGate
from ciar.intervals.thresholds import ThresholdConfig
from ciar.ledger import Ledger
from ciar.models.bundle import Bundle, load_bundle
from ciar.models.checkpoint import save_tensors, write_manifest
from ciar.pipeline import Pipeline
from ciar.transport.inprocess import InProcessTransport

PROMPT = "a smiling cat with red sunglasses"
STATEFUL = ("softmaxcorr", "softmaxcorr-2d", "entropy-lens-delta", "periodic", "random", "u-hlm", "learned")


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny backbone with a learned gate."""
    out = tmp_path_factory.mktemp("gates") / "tiny"
    shutil.copytree(tiny_folder, out)
    torch.manual_seed(3)
    save_tensors(LearnedGate(TINY_GPT.dim, len(LAW_SCORES), 8), learned_file(out))
    write_manifest(out)
    return out


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Bundle:
    return load_bundle(folder)


def picture(bundle: Bundle, score: str, seed: int = 5) -> tuple[list[int], Ledger]:
    made = Pipeline(bundle)(PROMPT, seed=seed, score=score, output_type="tokens")
    return made.tokens[0], made.ledgers[0]


@pytest.mark.parametrize("score", SCORE_NAMES)
def test_a_score_without_a_threshold_uploads_the_share(bundle: Bundle, score: str) -> None:
    """Of 15 judged tokens a budget uploads round(0.32 * 15); blind gates have fixed thresholds."""
    for seed in (1, 2):
        _, ledger = picture(bundle, score, seed)
        asked = ledger.counts["accepted"] + ledger.counts["replaced"]
        if score == "interval":  # its threshold is the backbone's own
            continue
        assert 1 <= asked <= 10 if score == "random" else asked == pytest.approx(5, abs=score == "periodic")
        assert ledger.cloud_passes == ledger.counts["prefix"] + asked


@pytest.mark.parametrize("score", SCORE_NAMES)
def test_a_batch_makes_what_sessions_make(bundle: Bundle, score: str) -> None:
    alone = [picture(bundle, score, seed) for seed in (5, 6)]
    threshold = bundle.defaults.threshold_for(score)
    text = bundle.text.encode(PROMPT)
    base = replace(opening(strategy="ciar").settings, guidance=bundle.defaults.guidance, window=4)
    settings = [replace(base, seed=seed) for seed in (5, 6)]
    pictures = Batch(
        bundle.gpt,
        bundle.device_model,
        text.features.expand(2, -1, -1),
        text.mask.expand(2, -1),
        settings,
        get_strategy("ciar"),
        [threshold.start(15) for _ in settings],
        scoring_of(bundle, score, threshold.share),
    ).run()
    assert [p.tokens for p in pictures] == [tokens for tokens, _ in alone]
    assert [p.ledger.decided for p in pictures] == [ledger.decided for _, ledger in alone]


@pytest.mark.parametrize("score", STATEFUL)
def test_a_picture_taken_up_again_gets_the_same_scores(bundle: Bundle, score: str) -> None:
    """Windows are filled from the tokens: a device that knows the first ones finishes the same picture."""
    wire = InProcessTransport(Cloud(bundle))
    message = opening(PROMPT, "ciar", seed=5, prefix_rate=0.2)
    # A threshold amid the scores, so that some are kept and some are not.
    seen: list[float] = []
    probe = device_session(bundle, wire, message, score=score, threshold=float("inf"))
    assert probe.proposer is not None
    inner = probe.proposer.scorer
    probe.proposer.scorer = lambda reading: seen.extend(made := inner(reading)) or made  # type: ignore[func-returns-value]
    probe.run()
    seen.sort()
    middle = (seen[len(seen) // 2 - 1] + seen[len(seen) // 2]) / 2  # on no score: rounding decides nothing
    whole = device_session(bundle, wire, message, score=score, threshold=middle).run()
    assert {"device"} < set(whole.ledger.decided)
    for cut in (1, 4, 9, 14):
        session = device_session(bundle, wire, message, score=score, threshold=middle)
        session.run_state.tokens[:] = whole.tokens[:cut]
        session.run_state.decided[:] = whole.ledger.decided[:cut]
        again = session.run()
        assert again.tokens == whole.tokens, cut
        assert again.ledger.decided == whole.ledger.decided, cut


def test_same_seed_same_picture_other_seed_other_gate(bundle: Bundle) -> None:
    first, second = picture(bundle, "random", 1), picture(bundle, "random", 1)
    assert (first[0], first[1].decided) == (second[0], second[1].decided)
    assert picture(bundle, "random", 2)[1].decided != first[1].decided


def test_gates_differ_in_what_they_ask_about(bundle: Bundle) -> None:
    asked = {
        score: tuple(d in ("accepted", "replaced") for d in picture(bundle, score)[1].decided)
        for score in SCORE_NAMES
    }
    assert len(set(asked.values())) >= 10


def test_threshold_zero_uploads_everything_and_infinity_nothing(bundle: Bundle) -> None:
    pipe = Pipeline(bundle)
    for score in SCORE_NAMES:
        everything = pipe(PROMPT, seed=1, score=score, threshold=0.0, output_type="tokens").ledgers[0]
        nothing = pipe(PROMPT, seed=1, score=score, threshold=float("inf"), output_type="tokens").ledgers[0]
        assert (everything.counts["device"], nothing.counts["device"]) == (0, 15), score


def test_an_unknown_score_lists_the_known(bundle: Bundle) -> None:
    with pytest.raises(InputError, match=r"no score 'magic'\. The scores are: collision"):
        Pipeline(bundle)(PROMPT, score="magic")


# --- the file of the learned gate -----------------------------------------------------------------


def test_a_backbone_without_the_learned_gate_says_so(tiny_bundle: Bundle) -> None:
    with pytest.raises(InputError, match=r"no learned gate\. Train one with ciar train gate"):
        Pipeline(tiny_bundle)(PROMPT, score="learned")


def test_a_learned_gate_of_another_device_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    save_tensors(LearnedGate(TINY_GPT.dim + 1, len(LAW_SCORES)), tmp_path / "gate.safetensors")
    with pytest.raises(CheckpointError, match="does not fit"):
        load_learned(tmp_path / "gate.safetensors", bundle.device_model)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_learned(tmp_path / "none.safetensors", bundle.device_model)


def test_thresholds_of_the_backbone_are_used(folder: Path) -> None:
    bundle = load_bundle(folder)
    bundle.defaults = replace(bundle.defaults, thresholds={"entropy": ThresholdConfig(value=-1.0)})
    made = Pipeline(bundle)(PROMPT, seed=1, score="entropy", output_type="tokens")
    assert made.ledgers[0].counts["device"] == 0
