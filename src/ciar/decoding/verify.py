"""Steps that the cloud halves of strategies share: sampling its own tokens, and repairing windows."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from ciar.decoding.sampling import choose, slack, to_law
from ciar.decoding.strategy import CloudRun, Pass
from ciar.ledger import Decider


def next_law(run: CloudRun, *, inject: bool = False) -> Generator[Pass, Tensor, Tensor]:
    """The cloud's law of the position after the known tokens, in one pass.

    Feeds every known token whose keys are missing, and at least the last one.

    Returns:
        float32 [vocab] log-probabilities.
    """
    known = len(run.tokens)
    if known == 0:
        logits = yield Pass(0, [])
    else:
        start = min(run.fed, known - 1)
        flags = tuple(inject and run.decided[i] in ("device", "accepted") for i in range(start, known))
        logits = yield Pass(start, run.tokens[start:], flags)
        run.fed = known
    return to_law(logits[-1], run.law, what=f"the cloud model at position {known}")


def sample_own(run: CloudRun, count: int, decider: Decider = "prefix") -> Generator[Pass, Tensor, None]:
    """The cloud makes the next ``count`` tokens itself, one pass a token: plain AR."""
    for _ in range(count):
        law = yield from next_law(run)
        run.tokens.append(int(choose(law, run.noise.gumbel(len(run.tokens), 1)[0])))
        run.decided.append(decider)


def repair_window(
    run: CloudRun, guesses: list[int], allowances: list[float]
) -> Generator[Pass, Tensor, tuple[list[int], int]]:
    """Verifies a window of guesses and repairs it until nothing changes.

    Coupled Jacobi iteration: a pass gives the cloud's choice y at every position of the window.
    Guesses stand while their slack is within their allowance; the first that does not is replaced
    by y and is final, and so are those before it. Later guesses are kept where they are still
    within their allowance and replaced by y where not, and the next sweep starts behind the last
    final one. With allowance 0 the fixed point is exactly plain AR. Source: DESIGN section 2;
    arXiv 2510.24211.

    Args:
        run: the session; ``run.tokens`` ends where the window begins.
        guesses: proposed tokens of the window.
        allowances: slack allowed at each of them.

    Returns:
        The window's final tokens, and the number of sweeps. ``run.tokens`` is extended by them.
    """
    begin = len(run.tokens)
    count = len(guesses)
    window = list(guesses)
    noise = run.noise.gumbel(begin, count)
    allowed = torch.tensor(allowances, dtype=torch.float32)
    final, sweeps = 0, 0
    while final < count:
        # Feed everything whose keys are stale: the last final token and the guesses after it.
        known = begin + final
        run.tokens[begin:] = window[:-1]
        start = min(run.fed, max(known - 1, 0))
        ids = run.tokens[start:]
        pieces: list[Tensor] = []
        if known == 0:  # position 0 is predicted by the text, which the prefill has read
            pieces.append((yield Pass(0, [])))
        if ids:
            pieces.append((yield Pass(start, ids)))
        law = to_law(
            torch.cat(pieces)[-(count - final) :], run.law, what=f"the cloud model at positions {known} on"
        )
        sweeps += 1
        here = torch.tensor(window[final:])
        gap = slack(law, noise[final:], here)
        keep = gap <= allowed[final:]
        choice = choose(law, noise[final:])
        fresh = torch.where(keep, here, choice).tolist()
        stands = keep.tolist()
        changed = next((i for i, ok in enumerate(stands) if not ok), None)
        window[final:] = fresh
        # Up to and including the first replaced position, verdicts rest on final tokens alone.
        advanced = (count - final) if changed is None else changed + 1
        final += advanced
        # Keys are good for final tokens that were fed unchanged: all before the first replaced one.
        run.fed = begin + (count - 1 if changed is None else final - 1)
    run.tokens[begin:] = window
    return window, sweeps
