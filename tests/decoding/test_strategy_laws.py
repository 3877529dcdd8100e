"""Laws of the strategies on toy pictures: exact ones by 200,000 pictures, relaxed ones by their formula.

Chains and Jacobi windows are judged in two steps: a vectorised reading of the papers (vector_law) has
the exact joint law, and the strategies, driven as sessions drive them, give its tokens picture by
picture. All seeds are fixed. The faults at the end are each planted in the code under test.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from law_suite import (
    ALL_THREE,
    CLOUD,
    DEVICES,
    FITS,
    MANY,
    MISFITS,
    PAIRS,
    PLAIN,
    WRONG_RESIDUALS,
    P,
    Q,
    bank,
    chain_misfit,
    driven,
    settings_of,
)
from table_cloud import (
    CODEBOOK,
    CODES,
    LENGTH,
    BankNoise,
    NoiseBank,
    TableSession,
    drawing_from,
    law_p_value,
    make_picture,
    merged_p,
    row_of,
)
from torch import Tensor
from vector_law import RuleTable, chain, first_token_law, jacobi, laws

import ciar.decoding.acceptance as acceptance
import ciar.decoding.jacobi as jacobi_module
import ciar.decoding.strategies.sled as sled_module
import ciar.decoding.strategies.speculative as speculative_module
import ciar.decoding.verify as verify
from ciar.decoding.acceptance import Annealed, Grouped, Neighbourhood, Rule, Speculative, judged
from ciar.decoding.sampling import SamplingLaw, choose, one_hot
from ciar.decoding.strategy import Pass

# --- exact ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("device", DEVICES)
def test_speculative_is_exact(pair: str, device: str) -> None:
    """Known faults A1 and A2: whatever law the drafter really draws from, as long as it is the one told."""
    target, other = PAIRS[pair]
    same = device == "always"
    p, q = laws(CLOUD, target), laws(DEVICES[device], target if same else other)
    table = RuleTable(Speculative(), p, q)
    for window in (1, 2, 3, 4) if pair == "plain, plain" else (3,):
        tokens = chain(bank(), table, window)
        assert law_p_value(tokens, CLOUD.joint(target)) > FITS
        for name in ("speculative", "dssd"):
            np.testing.assert_array_equal(driven(settings_of(name, target, window), q, 100), tokens[:100])
    # Every token of picospec is judged: a chain without an end.
    endless = chain(bank(), table, LENGTH)
    assert law_p_value(endless, CLOUD.joint(target)) > FITS
    for window in (1, 2):
        np.testing.assert_array_equal(driven(settings_of("picospec", target, window), q, 60), endless[:60])


@pytest.mark.parametrize("pair", ["plain, plain", "all three, top-p", "entropy, plain"])
@pytest.mark.parametrize(("width", "guess"), [(1, "left"), (2, "random"), (3, "above"), (4, "left")])
def test_sjd_is_exact(pair: str, width: int, guess: str) -> None:
    target, _ = PAIRS[pair]
    p = laws(CLOUD, target)
    tokens = jacobi(bank(), p, width, guess)
    assert law_p_value(tokens, CLOUD.joint(target)) > FITS
    settings = settings_of("sjd", target, width, guess=guess)
    np.testing.assert_array_equal(driven(settings, p, 100), tokens[:100])


@pytest.mark.parametrize("pair", ["plain, plain", "all three, top-p", "entropy, plain"])
@pytest.mark.parametrize(("width", "guess"), [(1, "left"), (2, "random"), (3, "above"), (4, "left")])
def test_mc_sjd_is_exact(pair: str, width: int, guess: str) -> None:
    target, _ = PAIRS[pair]
    p = laws(CLOUD, target)
    tokens = jacobi(bank(), p, width, guess, coupled=True)
    assert law_p_value(tokens, CLOUD.joint(target)) > FITS
    settings = settings_of("mc-sjd", target, width, guess=guess)
    np.testing.assert_array_equal(driven(settings, p, 100), tokens[:100])


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("window", "confidence"), [(2, 0.3), (3, 0.1), (4, 0.5)])
def test_sled_is_exact(pair: str, window: int, confidence: float) -> None:
    """Whether a position is drafted depends on judged tokens alone."""
    target, other = PAIRS[pair]
    p, q = laws(CLOUD, target), laws(DEVICES["sometimes"], other)
    table = RuleTable(Speculative(), p, q)
    tokens = chain(bank(), table, window, confidence=confidence)
    assert law_p_value(tokens, CLOUD.joint(target)) > FITS
    settings = settings_of("sled", target, window, confidence=confidence)
    np.testing.assert_array_equal(driven(settings, q, 100), tokens[:100])
    if pair == "plain, plain":
        assert (tokens != chain(bank(), table, window)).any()  # the confidence changes what is drafted


def test_recoupled_tokens_have_the_new_law_and_stay_as_often_as_can_be() -> None:
    """P(stays) is sum(min(p, q)), one less the distance of the laws."""
    p, q = P[0], Q[0]
    n = 200_000
    generator = torch.Generator().manual_seed(0)
    old = torch.multinomial(q.exp(), n, replacement=True, generator=generator)
    chance = torch.rand(n, generator=generator, dtype=torch.float64)
    fresh = jacobi_module.recoupled(p.expand(n, -1), q.expand(n, -1), old, chance)
    counts = np.bincount(fresh.numpy(), minlength=CODES)
    assert merged_p(counts.astype(float), n * p.double().exp().numpy()) > FITS
    assert float((fresh == old).double().mean()) == pytest.approx(
        float(torch.minimum(p, q).exp().sum()), abs=0.005
    )
    sure = one_hot(3, CODES)
    assert (
        jacobi_module.recoupled(p.expand(9, -1), sure.expand(9, -1), old[:9] * 0 + 3, chance[:9]) < CODES
    ).all()


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("guess", ["left", "above", "random"])
def test_scd_gives_the_pictures_of_base(pair: str, width: int, guess: str) -> None:
    target, _ = PAIRS[pair]
    p = laws(CLOUD, target)
    found = driven(settings_of("scd", target, width, guess=guess), p, 40)
    np.testing.assert_array_equal(found, driven(settings_of("base", target), p, 40))


def test_a_greedy_cloud_gives_one_picture() -> None:
    greedy = SamplingLaw(temperature=0.0)
    q = laws(DEVICES["sometimes"], PLAIN)
    best = driven(settings_of("base", greedy), q, 1)[0]
    for name in ("speculative", "sled", "dssd", "picospec", "sjd", "mc-sjd", "scd", "lossless", "cool-sd"):
        assert (driven(settings_of(name, greedy), q, 20) == best).all()


# --- relaxed: one step's drift --------------------------------------------------------------------

RELAXED: dict[str, tuple[dict[str, Any], Callable[[int], Rule], int]] = {
    "cool-sd": ({"relaxation": 1.5, "decay": 0.7}, lambda w: Annealed(1.5, 0.7, w), 3),
    "lantern": (
        {"neighbours": 3, "bound": 0.3},
        lambda w: Neighbourhood(CODEBOOK, 3, 0.3, relative=False, kind="paper"),
        1,
    ),
    "lantern++": (
        {"neighbours": 4, "bound": 3.0, "redraw": "optimal"},
        lambda w: Neighbourhood(CODEBOOK, 4, 3.0, relative=True, kind="optimal"),
        1,
    ),
}


def drift(law: np.ndarray, p: Tensor) -> float:
    return float(0.5 * np.abs(law - p.double().exp().numpy()).sum())


@pytest.mark.parametrize("name", RELAXED)
def test_relaxed_chains_drift_by_their_formula(name: str) -> None:
    """The first token's measured law is the rule's, and the strategy gives those tokens."""
    options, make, depths = RELAXED[name]
    tokens = chain(bank(), RuleTable(make(3), P, Q, depths), 3)
    exact = judged(make(3), P[0], Q[0]).numpy()
    assert drift(exact, P[0]) > 0.03
    # The mean distance of eight frequencies of 200,000 draws is under 0.003.
    assert 0.5 * np.abs(first_token_law(tokens) - exact).sum() < 0.004
    assert drift(first_token_law(tokens), P[0]) == pytest.approx(drift(exact, P[0]), abs=0.004)
    np.testing.assert_array_equal(driven(settings_of(name, **options), Q), tokens[:150])


def test_gsd_drifts_by_its_formula() -> None:
    """Second token after a first that is final: judged in the pass after the one that drew it."""
    settings = settings_of("gsd", window=2, group=4, near=1.0, reach=3.0)
    found = driven(settings, P, 1500)
    # The first position is a guess without chance (a law of its own), so its law is a mixture of rules.
    rule = Grouped(CODEBOOK, 4, 1.0, 3.0)
    expected = np.mean([judged(rule, P[0], one_hot(token, CODES)).numpy() for token in range(CODES)], axis=0)
    assert drift(expected, P[0]) > 0.1
    counts = np.bincount(found[:, 0], minlength=CODES)
    assert merged_p(counts.astype(float), 1500 * expected) > FITS
    alone = settings_of("gsd", window=2, group=4, near=1.0, reach=0.0)
    np.testing.assert_array_equal(driven(alone, P), driven(settings_of("sjd", window=2), P))


@pytest.mark.parametrize("allowance", [0.0, 0.5, 2.0, 5.0])
def test_slack_drifts_by_its_formula(allowance: float) -> None:
    """A guess that knows nothing of the noise is tilted by exp(allowance); any guess by 1 - exp(-allowance).

    P(slack of x <= a) = e^a p / (1 + (e^a - 1) p) for Gumbel noise, so the law is p with the guess's
    weight multiplied by e^a.
    """
    p = P[0].double().exp().numpy()
    gumbels = bank().gumbels.view(-1, LENGTH, CODES)[:, 0]
    best = choose(P[0], gumbels)
    total = P[0] + gumbels
    gap = total.amax(1, keepdim=True) - total
    for guess in range(CODES):
        tokens = torch.where(gap[:, guess] <= allowance, guess, best).numpy()
        tilted = p * np.where(np.arange(CODES) == guess, np.exp(allowance), 1.0)
        measured = np.bincount(tokens, minlength=CODES) / MANY
        assert 0.5 * np.abs(measured - tilted / tilted.sum()).sum() < 0.004
    for table in DEVICES.values():
        guesses = choose(laws(table, PLAIN)[0], gumbels)
        kept = gap.gather(1, guesses[:, None])[:, 0] <= allowance
        measured = np.bincount(torch.where(kept, guesses, best).numpy(), minlength=CODES) / MANY
        assert drift(measured, P[0]) <= 1 - np.exp(-allowance) + 0.004


@pytest.mark.parametrize("name", ["slack", "scd-slack"])
def test_slack_strategies_keep_what_is_allowed(name: str) -> None:
    exact = driven(settings_of("base"), Q, 60)
    for allowance in (0.0, 1.0, 1e6):
        found = driven(settings_of(name, allowance=allowance), Q, 60)
        assert (found == exact).all() == (allowance == 0.0)
    if name == "slack":
        everything = driven(settings_of("device-only"), Q, 60)
        np.testing.assert_array_equal(found, everything)


def test_slack_for_certain_tokens_alone() -> None:
    """The gate is never certain here, so nothing is allowed; a gate that always is allows everything."""

    class AlwaysCertain:
        def certain(self, score: float) -> bool:
            return True

        def answered(self, accepted: bool) -> None:
            raise AssertionError("certain tokens are no answers")

    settings = settings_of("slack", allowance=3.0, allowed="certain")
    np.testing.assert_array_equal(driven(settings, Q, 60), driven(settings_of("base"), Q, 60))
    found = driven(settings, Q, 60, gate_type=AlwaysCertain)
    np.testing.assert_array_equal(found, driven(settings_of("slack", allowance=3.0), Q, 60))


def test_vvs_skips_every_other_chain_and_drifts_there_alone() -> None:
    """Window 1: token 0 verified, token 1 the bonus; if 0 stood, token 2 is skipped and 3 verified."""
    settings = settings_of("vvs", window=1)
    expected_q, expected_p = np.zeros(CODES), np.zeros(CODES)
    counts, verified = np.zeros(CODES), np.zeros(CODES)
    for i in range(2000):
        device, session = make_picture(CLOUD, settings, BankNoise(bank(), i), drawing_from(Q), device_laws=Q)
        skipped = [d == "device" for d in device.decided]
        assert skipped == [False, False, device.decided[0] == "accepted", False]
        if skipped[2]:
            assert len(session.passes) == 2  # of four tokens; the prefill counts for none
            counts[device.tokens[2]] += 1
            expected_q += Q[row_of(device.tokens[:2])].exp().numpy()
            verified[device.tokens[3]] += 1
            expected_p += P[row_of(device.tokens[:3])].exp().numpy()
    assert counts.sum() > 500
    assert merged_p(counts, expected_q) > FITS
    assert merged_p(verified, expected_p) > FITS
    np.testing.assert_array_equal(
        driven(settings_of("vvs", window=2, every=9), Q), driven(settings_of("speculative", window=2), Q)
    )


# --- bookkeeping ----------------------------------------------------------------------------------


@pytest.mark.parametrize("right", range(4))
@pytest.mark.parametrize("name", ["speculative", "dssd", "cool-sd", "lossless"])
def test_tokens_of_a_round(name: str, right: int) -> None:
    """Known fault A13: a draft that is right for its first tokens moves on by them and one more."""
    greedy = SamplingLaw(temperature=0.0)
    truth = driven(settings_of("base", greedy), Q, 1)[0].tolist()

    drafted = 0

    def drafter(tokens: list[int], noise: BankNoise) -> int:
        nonlocal drafted
        drafted += 1
        position = len(tokens)
        return truth[position] if position < right else (truth[position] + 1) % CODES

    device, session = make_picture(
        CLOUD,
        settings_of(name, greedy, window=3),
        BankNoise(bank(), 0),
        drafter,
        device_laws=torch.zeros_like(Q).log_softmax(-1),
    )
    assert device.tokens == truth
    assert device.decided[:right] == ["accepted"] * right
    if name != "lossless" and right < 3:
        assert device.decided[right] == "replaced"
        assert session.passes[0].ids == [*truth[:right], *((t + 1) % CODES for t in truth[right:3])]
        # The next round feeds the token that was put in place, and nothing that was fed before.
        assert (session.passes[1].start, session.passes[1].ids[0]) == (right, truth[right])
    judged_or_gone = len(device.decided) - device.decided.count("prefix") + device.discarded
    assert drafted == judged_or_gone


def test_acceptance_at_the_first_position_counts_every_round() -> None:
    """Known fault A14: with q uniform over the codes, token x stands with min(1, 8 p(x)), as counted."""
    flat = torch.zeros_like(Q).log_softmax(-1)
    decided = [
        make_picture(
            CLOUD, settings_of("speculative"), BankNoise(bank(), i), drawing_from(flat), device_laws=flat
        )[0].decided[0]
        for i in range(1000)
    ]
    expected = float(torch.minimum(P[0].exp(), flat[0].exp()).sum())
    assert set(decided) == {"accepted", "replaced"}
    assert decided.count("accepted") / 1000 == pytest.approx(expected, abs=0.04)


# --- planted faults -------------------------------------------------------------------------------


def table_misfit(noise: NoiseBank | None = None) -> bool:
    p, q = laws(CLOUD, ALL_THREE), laws(DEVICES["sometimes"], ALL_THREE)
    tokens = chain(noise or bank(), RuleTable(Speculative(), p, q), 3)
    return law_p_value(tokens, CLOUD.joint(ALL_THREE)) < MISFITS


def window_misfit(noise: NoiseBank | None = None) -> bool:
    tokens = jacobi(noise or bank(), laws(CLOUD, ALL_THREE), 3, "left")
    return law_p_value(tokens, CLOUD.joint(ALL_THREE)) < MISFITS


def sharing(**lanes: Any) -> NoiseBank:
    """The noise with some lanes read from where others are."""
    shared = copy.copy(bank())
    vars(shared).update(lanes)
    return shared


def sjd_misfit(count: int = 800, **values: Any) -> bool:
    found = driven(settings_of("sjd", ALL_THREE), Q, count, **values)
    return law_p_value(found, CLOUD.joint(ALL_THREE)) < MISFITS


def test_without_a_fault_the_checks_pass() -> None:
    assert not table_misfit()
    assert not window_misfit()
    assert not chain_misfit()
    assert not sjd_misfit()


def test_fault_unsure_tokens_are_made_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    """The unsure token at a draft's end gives way to the likeliest, and is judged as if it had been drawn."""
    settings = settings_of("sled", PLAIN, 4, confidence=0.2)
    q = laws(DEVICES["sometimes"], PLAIN)
    assert law_p_value(driven(settings, q, 800), CLOUD.joint(PLAIN)) > MISFITS
    plain = sled_module.draft_while_sure

    def likely(run: Any, most: int, least: float) -> Any:
        yield from plain(run, most, least)
        row = q[row_of(run.tokens[:-1])]
        if float(row[run.tokens[-1]]) < least:
            run.tokens[-1] = int(row.argmax())

    monkeypatch.setattr(sled_module, "draft_while_sure", likely)
    assert law_p_value(driven(settings, q, 800), CLOUD.joint(PLAIN)) < MISFITS


def test_fault_coupling_that_keeps_every_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts stay whatever their new law says, and are told as if drawn from it."""
    tokens_of = settings_of("mc-sjd", ALL_THREE)
    assert law_p_value(driven(tokens_of, Q, 800), CLOUD.joint(ALL_THREE)) > MISFITS
    monkeypatch.setattr(jacobi_module, "recoupled", lambda p, q, tokens, chance: tokens)
    assert law_p_value(driven(tokens_of, Q, 800), CLOUD.joint(ALL_THREE)) < MISFITS


@pytest.mark.parametrize("kind", WRONG_RESIDUALS)
def test_fault_wrong_residual(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(acceptance, "residual", WRONG_RESIDUALS[kind])
    assert table_misfit()
    assert window_misfit()
    assert chain_misfit()


def test_fault_one_token_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token that should be rejected stands."""

    class Lenient(Speculative):
        spent = False

        def accept(self, p: Tensor, q: Tensor, token: int, depth: int) -> float:
            chance = super().accept(p, q, token, depth)
            self.spent = self.spent and depth > 0
            if chance < 1.0 and not self.spent:
                self.spent = True
                return 1.0
            return chance

    monkeypatch.setattr(speculative_module, "Speculative", Lenient)
    assert chain_misfit()


@pytest.mark.parametrize("module", [verify, jacobi_module], ids=["chain", "window"])
def test_fault_laws_one_position_off(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    plain = verify.laws_from

    def shifted(run: Any, first: int, count: int, *, inject: bool = False) -> Any:
        laws = yield from plain(run, first, count, inject=inject)
        return laws.roll(1, dims=0)

    monkeypatch.setattr(module, "laws_from", shifted)
    assert chain_misfit() if module is verify else sjd_misfit()


def test_fault_stale_cells() -> None:
    """A rollback that does not overwrite its first cell: later laws follow the rejected token."""

    class Stale(TableSession):
        def run_pass(self, request: Pass) -> Tensor:
            if request.start < len(self.cells):
                request = Pass(request.start, [self.cells[request.start], *request.ids[1:]])
            return super().run_pass(request)

    assert chain_misfit(session_type=Stale)
    assert sjd_misfit(session_type=Stale)


def test_fault_raw_law_of_the_device() -> None:
    """Known fault A2: the law is told before temperature, top-k and top-p."""
    q = laws(DEVICES["sometimes"], ALL_THREE)
    raw = DEVICES["sometimes"].logits.log_softmax(-1)
    assert chain_misfit(q=raw, drafter=drawing_from(q))


def test_fault_greedy_drafts_with_a_soft_law() -> None:
    """Known fault A1: drafts by arg-max, told as if drawn."""
    q = laws(DEVICES["sometimes"], ALL_THREE)
    assert chain_misfit(drafter=lambda tokens, noise: int(q[row_of(tokens)].argmax()))


@pytest.mark.parametrize("lane", ["residual", "accept", "redraw"])
def test_fault_shared_noise(lane: str) -> None:
    """Known fault A6's kind: a redraw or a test reads the noise that a draft was drawn with."""
    gumbels, accepts = bank().gumbels, bank().accepts
    if lane == "residual":
        assert table_misfit(sharing(residuals=gumbels))
    elif lane == "accept":
        assert table_misfit(sharing(accepts=np.exp(-np.exp(-gumbels.amax(1).double().numpy()))))
    else:
        fresh = torch.from_numpy(accepts)[:, None].expand(-1, LENGTH + 1)
        assert window_misfit(sharing(fresh=fresh))


def test_fault_relaxation_that_calls_itself_exact() -> None:
    tokens = chain(bank(), RuleTable(Annealed(1.1, 0.7, 3), P, Q, 3), 3)
    assert law_p_value(tokens, CLOUD.joint(PLAIN)) < MISFITS
