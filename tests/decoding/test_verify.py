"""Windows and their repair: how far a sweep gets, what it feeds again, what it costs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_cloud import (
    CODES,
    LENGTH,
    BankNoise,
    LawTable,
    NoiseBank,
    TableSession,
    make_picture,
    row_of,
)

from ciar.decoding.sampling import SamplingLaw, choose, slack, to_law
from ciar.decoding.strategy import CloudRun, Pass
from ciar.decoding.verify import repair_window, sample_own
from ciar.protocol.messages import Draft, Settings

TABLE = LawTable.random(4)
BANK = NoiseBank(64)
LAW = to_law(TABLE.logits, SamplingLaw())


def session_of(picture: int = 0, table: LawTable = TABLE, temperature: float = 1.0) -> TableSession:
    made = Settings("lossless", temperature=temperature)
    run = CloudRun(made, SamplingLaw(temperature), LENGTH, CODES, BankNoise(BANK, picture))
    return TableSession(table, run)


def plain(picture: int, tokens: list[int] | None = None) -> list[int]:
    """Plain AR's picture, or its continuation of some tokens."""
    tokens = list(tokens or [])
    noise = BankNoise(BANK, picture)
    while len(tokens) < LENGTH:
        tokens.append(int(choose(LAW[row_of(tokens)], noise.gumbel(len(tokens), 1)[0])))
    return tokens


def repair(session: TableSession, guesses: list[int], allowances: list[float]) -> tuple[list[int], int]:
    half = repair_window(session.run, guesses, allowances)
    try:
        request = next(half)
        while True:
            request = half.send(session.run_pass(request))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


@pytest.mark.parametrize("right", range(LENGTH + 1))
def test_a_sweep_gets_one_token_further_than_the_guesses_were_right(right: int) -> None:
    """Known fault A13: the cloud's own token after the last right guess is not lost."""
    for picture in range(16):
        session, truth = session_of(picture), plain(picture)
        guesses = [*truth[:right], *((t + 1) % CODES for t in truth[right:])]
        tokens, sweeps = repair(session, guesses, [0.0] * LENGTH)
        assert tokens == session.run.tokens == truth
        assert session.passes[0] == Pass(0, guesses[:-1], want=len(guesses) - 1)
        if right == LENGTH:
            assert sweeps == 1
        if right < LENGTH - 1:
            # The second sweep starts by feeding the token that the cloud put in place of the wrong one.
            assert session.passes[1].start == right
            assert session.passes[1].ids[0] == truth[right]


@given(
    picture=st.integers(0, 63),
    windows=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4), min_size=1, max_size=4),
    drawn=st.integers(0, 3),
)
@settings(deadline=None)
def test_any_windows_give_plain_ar_and_honest_cells(
    picture: int, windows: list[list[int]], drawn: int
) -> None:
    """After every window, cells before ``fed`` hold the final tokens; the tokens are plain AR's."""
    session = session_of(picture)
    run = session.run
    half = sample_own(run, drawn)
    reply = None
    while True:
        try:
            request = half.send(reply)  # type: ignore[arg-type]
        except StopIteration:
            break
        reply = session.run_pass(request)
    for guesses in windows:
        guesses = guesses[: LENGTH - len(run.tokens)]
        if guesses:
            _, sweeps = repair(session, guesses, [0.0] * len(guesses))
            assert 1 <= sweeps <= len(guesses)
        assert run.tokens == plain(picture)[: len(run.tokens)]
        assert max(len(run.tokens) - 1, 0) == run.fed
        assert session.cells[: run.fed] == run.tokens[: run.fed]


@given(
    picture=st.integers(0, 63),
    guesses=st.lists(st.integers(0, 7), min_size=LENGTH, max_size=LENGTH),
    allowance=st.sampled_from([0.0, 0.5, 1.5, 4.0, math.inf]),
)
@settings(deadline=None)
def test_every_token_is_within_its_allowance(picture: int, guesses: list[int], allowance: float) -> None:
    session = session_of(picture)
    tokens, sweeps = repair(session, guesses, [allowance] * LENGTH)
    noise = BankNoise(BANK, picture).gumbel(0, LENGTH)
    laws = LAW[[row_of(tokens[:n]) for n in range(LENGTH)]]
    gaps = slack(laws, noise, torch.tensor(tokens))
    assert (gaps <= allowance).all()
    if allowance == math.inf:
        assert (tokens, sweeps) == (guesses, 1)


def test_allowances_are_per_position() -> None:
    truth = plain(5)
    guesses = [(t + 1) % CODES for t in truth]
    session = session_of(5)
    tokens, _ = repair(session, guesses, [0.0, math.inf, 0.0, 0.0])
    assert tokens[:2] == [truth[0], guesses[1]]
    assert tokens == plain(5, tokens[:2])


# --- the cost of drafts --------------------------------------------------------------------------


def successor() -> LawTable:
    """A cloud without chance: the first token is 0, each later one the code after its left neighbour.

    A guess that follows a wrong neighbour is then wrong for one sweep after another.
    """
    logits = torch.zeros_like(TABLE.logits)
    for row in range(len(logits)):
        # (row - 1) % 8 is the last token of the prefix, whatever its length.
        logits[row, ((row - 1) % CODES + 1) % CODES if row else 0] = 9.0
    return LawTable(logits)


@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_passes_of_a_drafter_that_is_always_right(window: int) -> None:
    """One pass a window; a first window of one token is answered by the prefill alone."""
    session = drafted(window, wrong=False)
    assert len(session.passes) == math.ceil(LENGTH / window) - (window == 1)
    # Each window feeds its guesses but the last, and from the second on the token before them.
    assert sum(len(p.ids) for p in session.passes) == LENGTH - 1


@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_passes_of_a_drafter_that_is_always_wrong(window: int) -> None:
    """Each sweep makes one token final, so there are as many sweeps as tokens: never more than base."""
    session = drafted(window, wrong=True)
    assert len(session.passes) == LENGTH - (window == 1)


def drafted(window: int, *, wrong: bool) -> TableSession:
    device, session = make_picture(
        successor(),
        Settings("lossless", temperature=0.0, window=window),
        BankNoise(BANK, 0),
        lambda tokens, noise: (len(tokens) + wrong) % CODES,
    )
    assert device.tokens == [0, 1, 2, 3]
    assert device.decided == [["accepted", "replaced"][wrong]] * LENGTH
    return session


def test_acceptance_counts_every_round() -> None:
    """Known fault A14: a drafter that is right with probability 0.6 is reported as such."""
    generator = torch.Generator().manual_seed(0)
    rounds = accepted = 0
    for picture in range(64):
        truth = plain(picture)
        for _ in range(20):
            session = session_of(picture)
            for position in range(LENGTH):
                right = bool(torch.rand((), generator=generator) < 0.6)
                guess = truth[position] if right else (truth[position] + 3) % CODES
                session.answer(Draft(position, position, (guess,), (False,)))
            decided = session.run.decided
            assert decided.count("accepted") + decided.count("replaced") == LENGTH
            rounds += LENGTH
            accepted += decided.count("accepted")
    assert rounds == 5120
    assert accepted / rounds == pytest.approx(0.6, abs=0.02)
