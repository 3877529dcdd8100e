"""Calibrates the threshold of every gate to one share of uploads, on the method's own pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ciar.decoding.batch import Batch
from ciar.decoding.scorer import Scoring
from ciar.decoding.strategy import get_strategy
from ciar.intervals.calibration import quantile_threshold
from ciar.intervals.gates import BY_NAME, CONTENT_BLIND, share_threshold
from ciar.intervals.thresholds import ThresholdConfig
from ciar.models.device import DeviceModel
from ciar.protocol.messages import Settings
from ciar.training.distil import Material

#: A calibrated threshold whose share of uploads is off by less is good enough.
TOLERANCE = 0.005
#: Where it is off by more at the end (a score with few values), a budget takes its place.
WORST = 0.03


class _Recorder:
    """A fixed threshold that remembers the scores that it saw."""

    def __init__(self, value: float, seen: list[float]) -> None:
        self.value, self.seen = value, seen

    def certain(self, score: float) -> bool:
        self.seen.append(score)
        return score < self.value

    def answered(self, accepted: bool) -> None:
        """Changes nothing."""


def uploads_at(
    inputs: Material,
    device: DeviceModel,
    captions: list[int],
    base: Settings,
    score: str | Scoring,
    threshold: float,
) -> tuple[float, list[float]]:
    """Mean share of uploaded tokens of the method's own pictures at a threshold, and their scores."""
    features, mask = inputs.captions.mixed(captions)
    settings = [Settings(**{**base.__dict__, "seed": 10_000 + i}) for i in range(len(captions))]
    seen: list[float] = []
    gates = [_Recorder(threshold, seen) for _ in settings]
    strategy = get_strategy("ciar")
    pictures = Batch(inputs.cloud, device, features, mask, settings, strategy, list(gates), score).run()
    return float(np.mean([picture.ledger.upload_share for picture in pictures])), seen


def calibrate_threshold(
    inputs: Material,
    device: DeviceModel,
    captions: list[int],
    base: Settings,
    score: str | Scoring,
    share: float,
    rounds: int = 4,
    start: float = 1e-3,
) -> tuple[float, float]:
    """The fixed threshold at which the method itself uploads ``share`` of a picture's tokens.

    The device's contexts depend on the threshold, so it is set on the method's own pictures, by a few
    rounds of secant steps in the quantile.

    Args:
        captions: numbers of the captions that pictures are made of.
        base: settings of the pictures; each has a seed of its own.
        score: the gate.
        share: of all tokens, 0 to 1.
        rounds: pictures are made so often at most; at least 1.
        start: the first guess.

    Returns:
        The best threshold that was tried, and the share that it uploaded.
    """
    tokens = inputs.cloud.config.tokens
    wanted = share * tokens / max(tokens - math.floor(base.prefix_rate * tokens), 1)
    threshold, best = start, (start, math.inf)
    for number in range(rounds):
        uploaded, fresh = uploads_at(inputs, device, captions, base, score, threshold)
        if abs(uploaded - share) < abs(best[1] - share):
            best = (threshold, uploaded)
        if abs(uploaded - share) < TOLERANCE:
            break
        if number:
            wanted = min(0.98, max(0.005, wanted + (share - uploaded)))
        threshold = quantile_threshold(fresh, min(wanted, 1.0))
        if math.isinf(threshold):  # nothing to upload: just above every score, since JSON has no infinity
            threshold = max(fresh) + 1.0
    return best


def calibrate_thresholds(
    inputs: Material,
    device: DeviceModel,
    captions: list[int],
    base: Settings,
    gates: Sequence[Scoring],
    share: float,
    rounds: int,
    records: Mapping[str, np.ndarray],
) -> dict[str, ThresholdConfig]:
    """Thresholds of several gates, all to one share of uploads.

    Gates that are blind to the content have exact ones. A gate whose scores are too coarse for the
    share gets a budget, which counts.

    Args:
        gates: which.
        share: of all tokens, 0 to 1.
        rounds: as in :func:`calibrate_threshold`.
        records: by gate, teacher-forced scores [pictures, tokens]: the first guess.
    """
    tokens = inputs.cloud.config.tokens
    prefix = math.floor(base.prefix_rate * tokens)
    judged_share = min(1.0, share * tokens / max(tokens - prefix, 1))
    out: dict[str, ThresholdConfig] = {}
    for scoring in gates:
        name = scoring.name
        if name in CONTENT_BLIND or BY_NAME[name].bounds[0] == BY_NAME[name].bounds[1]:
            out[name] = share_threshold(name, judged_share)
            continue
        start = quantile_threshold(records[name][:, prefix:], judged_share)
        value, uploaded = calibrate_threshold(
            inputs, device, captions, base, scoring, share, rounds, min(start, 1e30)
        )
        if abs(uploaded - share) > WORST:
            out[name] = share_threshold(name, judged_share)
        else:
            out[name] = ThresholdConfig(kind="fixed", value=value, share=judged_share)
    return out
