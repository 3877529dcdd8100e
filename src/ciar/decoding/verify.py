"""Steps that the cloud halves of strategies share: laws, own tokens, windows and chains."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from ciar.decoding.acceptance import Rule
from ciar.decoding.budget import Judge, within
from ciar.decoding.sampling import choose, slack, to_law
from ciar.decoding.strategy import CloudRun, DeviceLaw, Pass
from ciar.ledger import Decider


def laws_from(
    run: CloudRun, first: int, count: int, *, inject: bool = False
) -> Generator[Pass, Tensor, Tensor]:
    """The cloud's laws of consecutive positions, in one pass.

    Feeds every token before the last of them whose keys are missing, and at least the one before the
    first; position 0 is predicted by the text, which the prefill has read.

    Args:
        run: its tokens, known and guessed, reach to ``first + count - 1`` at least.
        first: first position.
        count: positions, at least 1.
        inject: whether interval features are added to the device's tokens.

    Returns:
        float32 [count, vocab] log-probabilities. ``run.fed`` counts all that was fed as good; whoever
        takes a fed token back sets it back.
    """
    end = first + count - 1
    start = min(run.fed, max(first - 1, 0))
    ids = run.tokens[start:end]
    pieces: list[Tensor] = []
    if first == 0:
        pieces.append((yield Pass(0, [])))
    if ids:
        flags = tuple(run.decided[i] in ("device", "accepted") for i in range(start, end)) if inject else ()
        pieces.append((yield Pass(start, ids, flags, want=min(count, len(ids)))))
        run.fed = end
    return to_law(torch.cat(pieces)[-count:], run.law, what=f"the cloud model at positions {first} on")


def next_law(run: CloudRun, *, inject: bool = False) -> Generator[Pass, Tensor, Tensor]:
    """The cloud's law of the position after the known tokens: float32 [vocab]."""
    laws = yield from laws_from(run, len(run.tokens), 1, inject=inject)
    return laws[0]


def sample_own(run: CloudRun, count: int, decider: Decider = "prefix") -> Generator[Pass, Tensor, None]:
    """The cloud makes the next ``count`` tokens itself, one pass a token: plain AR."""
    for _ in range(count):
        law = yield from next_law(run)
        run.tokens.append(int(choose(law, run.noise.gumbel(len(run.tokens), 1)[0])))
        run.decided.append(decider)


def sweep(run: CloudRun, guesses: list[int], judge: Judge) -> Generator[Pass, Tensor, tuple[int, list[int]]]:
    """One sweep of coupled Jacobi iteration over guesses at the positions after the known tokens.

    A pass gives the cloud's choice y at every position. Guesses stand while their slack is within
    their allowance; the first that does not is replaced by y and is final, and so are those before
    it, since their verdicts rest on final tokens alone. Later guesses are replaced by y where they
    are beyond their allowance too, as better guesses. Source: DESIGN section 2; arXiv 2510.24211.

    Args:
        run: the session; unchanged but for ``fed``.
        guesses: at least one.
        judge: which of them stand.

    Returns:
        How many positions are final, at least 1, and the tokens of all of them.
    """
    first, count = len(run.tokens), len(guesses)
    run.tokens += guesses
    law = yield from laws_from(run, first, count)
    del run.tokens[first:]
    noise = run.noise.gumbel(first, count)
    here = torch.tensor(guesses, device=law.device)
    gaps: list[float] = slack(law, noise, here).tolist()
    choices: list[int] = choose(law, noise).tolist()
    keep = judge(range(count), gaps, True)
    fresh = [guess if ok else own for guess, own, ok in zip(guesses, choices, keep, strict=True)]
    changed = next((i for i, ok in enumerate(keep) if not ok), None)
    if changed is None:
        return count, fresh
    # Keys are good for final tokens that were fed unchanged: all before the first replaced one.
    run.fed = min(run.fed, first + changed)
    return changed + 1, fresh


def repair_window(
    run: CloudRun, guesses: list[int], allowances: list[float]
) -> Generator[Pass, Tensor, tuple[list[int], int]]:
    """Verifies a window of guesses and repairs it until nothing changes: sweeps behind the last final one.

    With allowance 0 the fixed point is exactly plain AR.

    Args:
        run: the session; ``run.tokens`` ends where the window begins.
        guesses: proposed tokens of the window.
        allowances: slack allowed at each of them.

    Returns:
        The window's final tokens, and the number of sweeps. ``run.tokens`` is extended by them.
    """
    begin, sweeps = len(run.tokens), 0
    window = list(guesses)
    while window:
        final, fresh = yield from sweep(run, window, within(allowances[-len(window) :]))
        run.tokens += fresh[:final]
        window = fresh[final:]
        sweeps += 1
    return run.tokens[begin:], sweeps


def verify_chain(run: CloudRun, guesses: list[int], rule: Rule) -> Generator[Any, Any, int]:
    """Verifies a chain of drafted tokens by an acceptance rule, in one pass.

    Tokens stand up to the first that is rejected; one from the rule's redraw takes its place, and
    what follows is dropped. Where all stand, the pass has also given the law of the next position,
    and a token of the cloud's own is the bonus. Source: arXiv 2211.17192, algorithm 1.

    The law that the tokens were drawn from comes from the cloud's own copy of the device model.

    Args:
        run: the session; extended by what stands and the cloud's own token.
        guesses: drafted tokens, at least one.
        rule: when a token stands.

    Returns:
        How many of the guesses stand.
    """
    first, count = len(run.tokens), len(guesses)
    bonus = first + count < run.total
    run.tokens += guesses
    q: Tensor = yield DeviceLaw(first, count)
    p = yield from laws_from(run, first, count + bonus)
    stand = 0
    while stand < count and run.noise.accept(first + stand) < rule.accept(
        p[stand], q[stand], guesses[stand], stand
    ):
        stand += 1
    del run.tokens[first + stand :]
    run.decided += ["accepted"] * stand
    run.fed = min(run.fed, first + stand)
    if stand < count:
        law = rule.redraw(p[stand], q[stand], guesses[stand])
        run.tokens.append(int(choose(law, run.noise.residual(first + stand))))
        run.decided.append("replaced")
    elif bonus:
        run.tokens.append(int(choose(p[count], run.noise.gumbel(first + count, 1)[0])))
        run.decided.append("prefix")
    return stand
