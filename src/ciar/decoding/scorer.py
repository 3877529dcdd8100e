"""Runs any gate's score on pictures: from a name to an object that reads positions and gives numbers.

A score of a position is a function of the prompt, the seed and the tokens before it, and of nothing
else. Some scorers remember what they computed for earlier positions (the laws of a window), but only as
a cache: they compare the tokens and compute anew what a rollback, a patch or a fresh session made stale.
So a picture that is taken up again after a lost connection gets the scores that it would have got.

One scorer serves any number of pictures, so that batches stay batched. Knows nothing of thresholds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log, pi
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ciar.decoding.gate import LAW_SCORES, TopLogits, gate_score, law_summary, needs_radius, top_logits
from ciar.errors import InputError
from ciar.intervals.correlation import softmax_correlation, square_window, temporal_window
from ciar.intervals.credal import entropy_gap, vertex_gap
from ciar.intervals.gates import gate_named
from ciar.intervals.learned import LearnedGate
from ciar.intervals.scores import DraftLaw
from ciar.models.bundle import Bundle
from ciar.models.checkpoint import load_strict, read_tensors
from ciar.models.device import DeviceModel
from ciar.noise import uniform

#: Lane of the noise that gates draw from, far from the small numbers that choices and tests use.
GATE_LANE = 0x67617465
#: Temperatures of U-HLM's draws, 0 to the largest.
DRAWS, LARGEST_TEMPERATURE = 20, 2.0


class Reading(NamedTuple):
    """What the device model says at one position of each of some pictures.

    Attributes:
        pictures: [rows] number of each picture, as in the ``keys`` of the scorer.
        tokens: for each row the tokens before the position; their number is the position.
        proposals: [rows] the device's choice at the position.
        hidden: [rows, dim] state that the choice was made from.
        centre: float32 [rows, vocab] centre logits.
        top: the most likely codes, [rows, K].
        states: for each row the hidden states [at least position + 1, dim]; entry i predicts token i.
    """

    pictures: Sequence[int]
    tokens: Sequence[Sequence[int]]
    proposals: Sequence[int]
    hidden: Tensor
    centre: Tensor
    top: TopLogits
    states: Sequence[Tensor]


class Scorer(Protocol):
    """The score of a gate, for the pictures that it was made for."""

    def __call__(self, reading: Reading) -> list[float]:
        """One score a row; larger is less certain."""
        ...


@dataclass(frozen=True)
class Scoring:
    """Which score, and what it needs beside the device model.

    Attributes:
        name: a name of :data:`ciar.intervals.gates.BY_NAME`, or ``oracle``.
        share: ``periodic``: share of the judged tokens that are uploaded.
        learned: ``learned``: the trained head.
        oracle: ``oracle``: gives the true distance of a reading's laws, float32 [rows]; for evaluation
            alone, since it needs the cloud's law at every position (:mod:`ciar.decoding.oracle`).
    """

    name: str = "interval"
    share: float = 0.30
    learned: LearnedGate | None = None
    oracle: Callable[[Reading], Tensor] | None = None


def scoring_of(bundle: Bundle, name: str, share: float = 0.30) -> Scoring:
    """A backbone's score by name, with the learned head of its device model where that is asked for.

    Args:
        bundle: the backbone.
        name: which score.
        share: ``periodic``: share of the judged tokens that are uploaded.

    Raises:
        CheckpointError: the head's file is damaged or belongs to another device model.
    """
    path = learned_file(bundle.folder, bundle.defaults.device)
    if name != "learned" or not path.is_file():
        return Scoring(name, share)
    gate = load_learned(path, bundle.device_model)
    return Scoring(name, share, gate.to(bundle.device))


def learned_file(folder: Path, stem: str = "device") -> Path:
    """Where the learned gate of a device model lies, if it has one."""
    return folder / f"{stem}-gate.safetensors"


def load_learned(path: Path, model: DeviceModel) -> LearnedGate:
    """Reads a learned gate.

    Raises:
        CheckpointError: the file is missing, damaged, or belongs to another device model.
    """
    tensors = read_tensors(path)
    hidden = len(tensors["first.bias"]) if "first.bias" in tensors else 1
    gate = LearnedGate(model.config.trunk.dim, len(LAW_SCORES), hidden)
    load_strict(gate, tensors, path)
    return gate.eval().requires_grad_(False)


def make_scorer(scoring: Scoring | str, model: DeviceModel, keys: Sequence[tuple[int, int]]) -> Scorer:
    """The scorer of some pictures.

    Args:
        scoring: which score; a name alone takes the defaults.
        model: the device model that the readings come from.
        keys: (seed, image) of each picture.

    Raises:
        InputError: there is no such score, or what it needs is not given.
    """
    if isinstance(scoring, str):
        scoring = Scoring(scoring)
    name = scoring.name
    if name == "oracle":
        if scoring.oracle is None:
            raise InputError("The score 'oracle' needs the cloud's law; it is for evaluation alone.")
        return _Oracle(scoring.oracle)
    gate_named(name)
    if name in LAW_SCORES:
        return _OfLaw(name, model)
    if name == "learned":
        if scoring.learned is None:
            raise InputError(
                "This backbone has no learned gate. Train one with ciar train gate and assemble again, or "
                "choose another --score."
            )
        return _Learned(scoring.learned, model)
    if name == "random":
        return _Random(keys)
    if name == "periodic":
        return _Periodic(scoring.share)
    if name.startswith("entropy-lens"):
        return _Lens(model, name)
    if name == "softmaxcorr-1":
        return lambda reading: [0.0] * len(reading.tokens)  # whatever the law: see intervals.correlation
    if name.startswith("softmaxcorr"):
        return _Correlation(model, _windows(name, model.config.trunk.grid), len(keys))
    if name.startswith("discrete"):
        return _Discrete(model, int(name.split("-")[1]), vertices=name.endswith("vertices"))
    return _Disagreement(keys, drawn=name == "u-hlm")


class _OfLaw:
    """Scores of one law."""

    def __init__(self, name: str, model: DeviceModel) -> None:
        self.name, self.head, self.radius = name, model.head, needs_radius(name)

    def __call__(self, reading: Reading) -> list[float]:
        top = reading.top
        radius = self.head.radius_at(reading.hidden, top.indices) if self.radius else None
        return _numbers(gate_score(self.name, top, radius))


class _Learned:
    """The trained head on the hidden state and all scores of the law."""

    def __init__(self, gate: LearnedGate, model: DeviceModel) -> None:
        self.gate, self.head = gate, model.head

    def __call__(self, reading: Reading) -> list[float]:
        radius = self.head.radius_at(reading.hidden, reading.top.indices)
        return _numbers(self.gate(learned_inputs(reading.hidden, reading.top, radius)))


def learned_inputs(hidden: Tensor, top: TopLogits, radius: Tensor) -> Tensor:
    """What the learned gate reads, float32 [..., dim + len(LAW_SCORES)]."""
    return torch.cat([hidden.float(), law_summary(top, radius)], dim=-1)


class _Random:
    """A uniform variate in (0, 1) of seed, image and position."""

    def __init__(self, keys: Sequence[tuple[int, int]]) -> None:
        self.keys = keys

    def __call__(self, reading: Reading) -> list[float]:
        return [
            float(uniform(*self.keys[picture], len(tokens), 0, GATE_LANE))
            for picture, tokens in zip(reading.pictures, reading.tokens, strict=True)
        ]


class _Periodic:
    """Evenly spaced uploads: gaps are the two whole numbers around ``1 / share``.

    The score counts down from 1 to 0 as a phase goes round; it is above ``1 - share`` once every
    ``1 / share`` positions. The phase starts where no whole share puts a position on the threshold.
    """

    def __init__(self, share: float) -> None:
        if not 0.0 <= share <= 1.0:
            raise InputError(f"share must lie between 0 and 1, not {share}.")
        self.share = share

    def __call__(self, reading: Reading) -> list[float]:
        return [1.0 - (len(tokens) * self.share + 1.0 / pi) % 1.0 for tokens in reading.tokens]


class _Lens:
    """Entropy profile of the device trunk at its two ends, in units of ``log V``.

    Before the layers there is the embedding of the last token, read through the trunk's own norm and
    head (the logit lens). Before the first token nothing has been read, which counts as full entropy.
    With one layer these two points are the whole profile; of a deeper trunk the inner points are left out.
    """

    def __init__(self, model: DeviceModel, name: str) -> None:
        self.model, self.name = model, name
        self.unit = log(model.config.trunk.vocab_size)

    def __call__(self, reading: Reading) -> list[float]:
        after = gate_score("entropy", reading.top) / self.unit
        if self.name == "entropy-lens":
            return _numbers(after)
        before = self._before(reading)
        return _numbers(after - before if self.name == "entropy-lens-delta" else 0.5 * (after + before))

    def _before(self, reading: Reading) -> Tensor:
        trunk = self.model.trunk
        last = [tokens[-1] if tokens else 0 for tokens in reading.tokens]
        blank = torch.tensor([not tokens for tokens in reading.tokens], device=reading.hidden.device)
        x = trunk.norm(trunk.embed_tokens(torch.tensor(last, device=reading.hidden.device)))
        entropy = gate_score("entropy", top_logits(self.model.head.centre_logits(x))) / self.unit
        return torch.where(blank, 1.0, entropy)


@dataclass
class _Laws:
    """Remembered laws of one picture: by position the most likely codes and their probabilities."""

    tokens: list[int]
    rows: dict[int, tuple[Tensor, Tensor]]


class _Correlation:
    """SoftmaxCorr over a window of positions."""

    def __init__(self, model: DeviceModel, window: Callable[[int], list[int]], pictures: int) -> None:
        self.head, self.window = model.head, window
        self.vocab = model.config.trunk.vocab_size
        self.known = [_Laws([], {}) for _ in range(pictures)]

    def __call__(self, reading: Reading) -> list[float]:
        top = reading.top
        probs = (top.values - top.log_mass.unsqueeze(-1)).exp()
        out = []
        for row, (picture, tokens) in enumerate(zip(reading.pictures, reading.tokens, strict=True)):
            known = self.known[picture]
            self._forget(known, tokens)
            position = len(tokens)
            known.rows[position] = (top.indices[row], probs[row])
            window = self.window(position)
            self._fill(known, [i for i in window if i not in known.rows], reading.states[row])
            dense = probs.new_zeros(len(window), self.vocab)
            indices = torch.stack([known.rows[i][0] for i in window])
            dense.scatter_(1, indices, torch.stack([known.rows[i][1] for i in window]))
            out.append(float(softmax_correlation(dense)))
        return out

    @staticmethod
    def _forget(known: _Laws, tokens: Sequence[int]) -> None:
        """Drops the laws that other tokens than these led to."""
        if list(tokens[: len(known.tokens)]) != known.tokens:
            pairs = zip(known.tokens, [*tokens, -1], strict=False)
            common = next(i for i, (a, b) in enumerate(pairs) if a != b)
            # The law at position i depends on the tokens before it.
            known.rows = {i: row for i, row in known.rows.items() if i <= common}
        known.tokens = list(tokens)

    def _fill(self, known: _Laws, missing: list[int], states: Tensor) -> None:
        """Laws of positions that were never proposed at: a prefix, or a picture taken up again."""
        if missing:
            top = top_logits(self.head.centre_logits(states[missing]))
            probs = (top.values - top.log_mass.unsqueeze(-1)).exp()
            known.rows |= {i: (top.indices[n], probs[n]) for n, i in enumerate(missing)}


def _windows(name: str, grid: int) -> Callable[[int], list[int]]:
    if name == "softmaxcorr-2d":
        return lambda position: square_window(position, grid)
    return temporal_window


class _Discrete:
    """Entropy gap of the pooled credal set; needs the radii of the whole vocabulary."""

    def __init__(self, model: DeviceModel, k: int, *, vertices: bool) -> None:
        self.head, self.k, self.gap = model.head, k, vertex_gap if vertices else entropy_gap

    def __call__(self, reading: Reading) -> list[float]:
        law = DraftLaw(reading.centre, self.head.radii(reading.hidden))
        return _numbers(self.gap(law, self.k))


class _Disagreement:
    """U-HLM: how often draws at other temperatures differ from the proposal.

    Twenty temperatures from 0 to 2, evenly; the draws come from the most likely codes, which is the
    law itself when it keeps no more than those. ``u-hlm`` draws once at each temperature, as
    published; ``u-hlm-expected`` is the mean over all draws, without their noise and without ties.
    """

    def __init__(self, keys: Sequence[tuple[int, int]], *, drawn: bool) -> None:
        self.keys, self.drawn = keys, drawn

    def __call__(self, reading: Reading) -> list[float]:
        values, indices = reading.top.values, reading.top.indices
        temperatures = torch.linspace(0.0, LARGEST_TEMPERATURE, DRAWS, device=values.device)[1:]
        laws = (values.unsqueeze(-2) / temperatures[:, None]).softmax(-1)  # [rows, DRAWS - 1, K]
        same = indices == torch.tensor(reading.proposals, device=values.device)[:, None]
        if self.drawn:
            levels = torch.stack(
                [self._uniforms(*pair) for pair in zip(reading.pictures, reading.tokens, strict=True)]
            ).to(values)
            cumulated = laws.cumsum(-1)
            drawn = (cumulated < levels.unsqueeze(-1) * cumulated[..., -1:]).sum(-1)
            agreeing = same.gather(-1, drawn.clamp_max(values.shape[-1] - 1)).sum(-1).float()
        else:
            agreeing = (laws * same.unsqueeze(-2)).sum((-2, -1))
        agreeing = agreeing + same[:, 0]  # at temperature 0 the most likely code is drawn
        return _numbers(1.0 - agreeing / DRAWS)

    def _uniforms(self, picture: int, tokens: Sequence[int]) -> Tensor:
        numbers = range(1, DRAWS)
        return torch.from_numpy(uniform(*self.keys[picture], len(tokens), list(numbers), GATE_LANE))


class _Oracle:
    """The true distance, from whoever knows the cloud's law."""

    def __init__(self, distance: Callable[[Reading], Tensor]) -> None:
        self.distance = distance

    def __call__(self, reading: Reading) -> list[float]:
        return _numbers(self.distance(reading))


def _numbers(scores: Tensor) -> list[float]:
    values: list[float] = scores.tolist()
    return values
