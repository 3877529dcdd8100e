"""Chooses each strategy's settings on prompts of their own: the cheapest whose pictures stay good enough.

A strategy declares what is tried (``Strategy.grid``). The pictures are made and judged as ``ciar compare``
makes and judges them, of the prompts that calibration holds back, so that no setting is chosen by
what it is compared on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ciar.compare import parse_run
from ciar.decoding.strategy import Strategy, get_strategy
from ciar.errors import DataError, InputError
from ciar.models.bundle import Bundle
from ciar.quality import Judge, Judged, judge_each

#: What a token row costs beside a pass, in passes: on two cores a pass over 64 positions, 128 rows under
#: guidance, takes 2.7 times as long as one over a single position. On a GPU at small batch it is near 0.
ROW_COST = 0.0135
#: Largest relative change of the Frechet distance that a setting may bring.
LOSS_BOUND = 0.05


@dataclass(frozen=True)
class Trial:
    """One setting of a strategy on the calibration prompts.

    Attributes:
        label: as ``ciar compare --strategies`` reads it.
        passes, rows: cloud passes and token rows, a token.
        cost: passes, with the rows in units of a pass.
        loss: relative change of the Frechet distance against plain AR; 0 for an exact strategy, whose
            pictures differ from plain AR's by chance alone.
        measured: that change as it was measured, with its interval; None for plain AR itself.
    """

    label: str
    passes: float
    rows: float
    cost: float
    loss: float
    measured: tuple[float, float, float] | None = None

    @classmethod
    def of(cls, judged: Judged, *, exact: bool, row_cost: float) -> Trial:
        """The trial of a judged setting."""
        change = judged.frechet_change
        measured = None if change is None else (change.value, change.low, change.high)
        cost = judged.passes + row_cost * judged.rows
        loss = 0.0 if exact or change is None else change.value
        return cls(judged.label, judged.passes, judged.rows, cost, loss, measured)


def choose(trials: Sequence[Trial], bound: float) -> Trial:
    """The cheapest trial whose loss is at most ``bound``; where none is, the one that loses least.

    Equals are decided by the smaller loss, then by the order given: the default comes first.

    Args:
        trials: at least one.
    """
    within = [trial for trial in trials if trial.loss <= bound]
    if not within:
        return min(trials, key=lambda trial: (trial.loss, trial.cost))
    return min(within, key=lambda trial: (trial.cost, trial.loss))


def candidates(strategy: Strategy) -> list[str]:
    """The settings of a strategy that are tried: as it stands, and what it declares."""
    return [strategy.name, *(f"{strategy.name}:{setting}" for setting in strategy.grid)]


def prompts_digest(prompts: Sequence[str]) -> str:
    """Names a list of prompts: SHA-256, hexadecimal."""
    return hashlib.sha256("\n".join(prompts).encode()).hexdigest()


def tune(
    bundle: Bundle,
    the_judge: Judge,
    prompts: Sequence[str],
    names: Sequence[str],
    strategies: Sequence[str],
    *,
    bound: float = LOSS_BOUND,
    row_cost: float = ROW_COST,
    seed: int = 0,
    batch: int = 64,
    note: Callable[[str], None] | None = None,
    before: Mapping[str, Any] | None = None,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Tries every strategy's settings and chooses one for each.

    Args:
        prompts, names: of calibration, as for :func:`ciar.quality.judge`.
        strategies: names, without settings.
        bound: see :func:`choose`.
        row_cost: what a token row costs, in passes.
        before: a document of an earlier call. Its strategies are taken over where it was made the same way.
        keep: called with the document after each strategy that is tried.

    Returns:
        The document that :func:`load_settings` reads: how it was tuned, and under ``strategies`` for each
        its ``setting``, whether that is ``within`` the bound, and all ``trials``.

    Raises:
        InputError: a strategy is unknown.
    """
    tried = {name: candidates(get_strategy(name)) for name in strategies if name != "base"}
    how: dict[str, Any] = {
        "backbone": bundle.name,
        "weights": bundle.weights,
        "images": len(prompts),
        "seed": seed,
        "prompts_sha256": prompts_digest(prompts),
        "names": sorted(set(names)),
        "bound": bound,
        "row_cost": row_cost,
    }
    chosen = taken_over(how, before or {})
    document = how | {"strategies": chosen}
    missing = {name: group for name, group in tried.items() if name not in chosen}
    if not missing:
        return document
    labels = ["base", *(label for group in missing.values() for label in group)]
    runs = [parse_run(label) for label in labels]
    judged = judge_each(bundle, the_judge, prompts, names, runs, seed=seed, batch=batch, note=note)
    next(judged)  # plain AR, which the others are compared to
    for name, group in missing.items():
        exact = get_strategy(name).exact
        trials = [Trial.of(next(judged), exact=exact, row_cost=row_cost) for _ in group]
        best = choose(trials, bound)
        chosen[name] = {
            "setting": best.label,
            "within": best.loss <= bound,
            "trials": [vars(trial) for trial in trials],
        }
        if keep is not None:
            keep(document)
    return document


def taken_over(how: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Strategies of an earlier document that would come out the same; none where weights have no name."""
    if not how["weights"] or any(before.get(name) != value for name, value in how.items()):
        return {}
    with suppress(KeyError, TypeError, AttributeError, InputError):  # damaged, or of a strategy that is gone
        return {
            name: one
            for name, one in before["strategies"].items()
            if [trial["label"] for trial in one["trials"]] == candidates(get_strategy(name))
        }
    return {}


def load_settings(path: Path, *, weights: str, names: Sequence[str]) -> dict[str, str]:
    """The settings that a document of :func:`tune` chose: by strategy, a row of the comparison.

    Args:
        weights: of the backbone that is compared.
        names: of the prompts that are compared.

    Raises:
        DataError: the file is missing or no such document.
        InputError: it was tuned for other weights, or on names that are compared.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        chosen = {name: str(one["setting"]) for name, one in document["strategies"].items()}
        tuned_for, tuned_on = document["weights"], set(document["names"])
    except FileNotFoundError:
        raise DataError(f"{path} does not exist. Write it first: ciar compare --tune {path}") from None
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}). Pass the file that --tune wrote."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} holds no tuned settings ({type(error).__name__}: {error}). Write it anew: ciar compare "
            f"--tune {path}"
        ) from None
    if tuned_for != weights:
        raise InputError(
            f"{path} was tuned for other weights ({tuned_for}) than this backbone's ({weights}). Tune anew: "
            f"ciar compare --tune {path}"
        )
    if shared := sorted(tuned_on & set(names)):
        raise InputError(
            f"{path} was tuned on {len(shared)} names that are compared ({', '.join(shared[:3])}). Tune on "
            "others."
        )
    for name, label in chosen.items():
        if parse_run(label).settings["strategy"] != name:
            raise DataError(f"{path} gives {name} the setting {label!r} of another strategy.")
    return chosen
