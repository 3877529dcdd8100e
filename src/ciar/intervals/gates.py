"""Every gate that ``--score`` takes: what it is, where it comes from, what it costs and what it needs.

A gate is CIAR's own loop with a score: tokens whose score is below the threshold stay on the device.
This is the table; formulas are in :mod:`ciar.intervals.scores` and its neighbours, and what runs them on
a picture is :mod:`ciar.decoding.scorer`. Plain Python: no torch, no NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass

from ciar.errors import InputError
from ciar.intervals.thresholds import ThresholdConfig


@dataclass(frozen=True)
class Gate:
    """One row of the table.

    Attributes:
        name: what ``--score`` calls it.
        summary: one line.
        source: paper.
        cost: multiplications a position, beside the device step and its centre logits, to the order. V
            is the vocabulary, d the width, r the rank of the radius head, k the classes, K = 128 the
            most likely codes.
        training: what must be trained for it, beside the device model and a threshold.
        bounds: the lowest and the highest score that it can give.
    """

    name: str
    summary: str
    source: str
    cost: str
    training: str = "none"
    bounds: tuple[float, float] = (0.0, float("inf"))


_CIAR = "CIAR, arXiv 2603.25463"
_LENS = "Entropy-Lens, arXiv 2502.16570"
_CORR = "SoftmaxCorr, arXiv 2406.09908"
_DISCRETE = "CIAR's ablation; credal wrapper, arXiv 2405.15047"
_UHLM = "U-HLM, arXiv 2412.12687"
_INF = float("inf")

#: Every gate, the paper's first.
GATES: tuple[Gate, ...] = (
    Gate("interval", "total width times spread of the intervals", _CIAR, "r (d + K)", "the radius head"),
    Gate("interval-frozen", "the same with every radius 1", "ablation", "K"),
    Gate("interval-l1", "total width of the intervals", _CIAR, "r (d + K)", "the radius head"),
    Gate("entropy", "entropy of the device's law", "common", "K"),
    Gate("max-prob", "1 - largest probability", "common", "1", bounds=(0.0, 1.0)),
    Gate("margin", "second largest minus largest logit", "common", "1", bounds=(-_INF, 0.0)),
    Gate("collision", "chance that two draws differ", "common", "K", bounds=(0.0, 1.0)),
    Gate("entropy-lens", "entropy after the last layer, of log V", _LENS, "K", bounds=(0.0, 1.0)),
    Gate("entropy-lens-mean", "mean entropy before and after the layers", _LENS, "d V", bounds=(0.0, 1.0)),
    Gate("entropy-lens-delta", "entropy after the layers minus before", _LENS, "d V", bounds=(-1.0, 1.0)),
    Gate("softmaxcorr", "last 16 laws: confident and diverse?", _CORR, "16^2 V", bounds=(0.0, 1.0)),
    Gate("softmaxcorr-2d", "the same over the 13 nearest positions", _CORR, "13^2 V", bounds=(0.0, 1.0)),
    Gate("softmaxcorr-1", "the same over one law: always 0", _CORR, "0", bounds=(0.0, 0.0)),
    Gate(
        "discrete-100",
        "entropy gap of 100 intervals and a rest",
        _DISCRETE,
        "r V + k log k",
        "the radius head",
    ),
    Gate(
        "discrete-300",
        "entropy gap of 300 intervals and a rest",
        _DISCRETE,
        "r V + k log k",
        "the radius head",
    ),
    Gate(
        "discrete-100-vertices",
        "the same from 64 sampled extreme points",
        _DISCRETE,
        "r V + 64 k",
        "the radius head",
    ),
    Gate(
        "discrete-300-vertices",
        "the same from 64 sampled extreme points",
        _DISCRETE,
        "r V + 64 k",
        "the radius head",
    ),
    Gate("u-hlm", "how many of 20 tempered draws differ", _UHLM, "20 K", bounds=(0.0, 1.0)),
    Gate("u-hlm-expected", "the same, expected over the draws", _UHLM, "20 K", bounds=(0.0, 1.0)),
    Gate(
        "learned",
        "predicted distance to the cloud's law",
        "SpecDec++, arXiv 2405.19715",
        "r (d + K) + 32 d",
        "a small head (ciar train gate)",
        (0.0, 1.0),
    ),
    Gate("random", "a uniform variate of the seed", "CIAR's ablation", "0", bounds=(0.0, 1.0)),
    Gate("periodic", "every 1/share-th token", "control", "0", bounds=(0.0, 1.0)),
)

#: Name -> row.
BY_NAME: dict[str, Gate] = {gate.name: gate for gate in GATES}
#: Gates that look at no model: their threshold follows from the share alone.
CONTENT_BLIND = ("random", "periodic")


def gate_named(name: str) -> Gate:
    """The row of a name.

    Raises:
        InputError: there is none; the message lists those that exist.
    """
    if name not in BY_NAME:
        raise InputError(f"There is no score {name!r}. The scores are: {', '.join(sorted(BY_NAME))}.")
    return BY_NAME[name]


def share_threshold(name: str, share: float) -> ThresholdConfig:
    """A threshold that uploads a share of the judged tokens where nothing was calibrated.

    Args:
        name: the gate.
        share: 0 to 1, of the tokens after the prefix.

    Returns:
        The exact fixed threshold of a gate that is blind to the content; else a budget, which counts.

    Raises:
        InputError: there is no such gate, or ``share`` is out of range.
    """
    gate_named(name)
    if name in CONTENT_BLIND:
        return ThresholdConfig(kind="fixed", value=1.0 - share, share=share)
    return ThresholdConfig(kind="budget", share=share)
