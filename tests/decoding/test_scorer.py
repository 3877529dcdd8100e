"""Every gate on pictures: the definition over the whole vocabulary, and no memory but the tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tiny import tiny_device, tiny_text
from torch import Tensor

from ciar.decoding.gate import LAW_SCORES, SCORE_NAMES, top_logits
from ciar.decoding.scorer import GATE_LANE, Reading, Scoring, make_scorer
from ciar.errors import InputError
from ciar.intervals.credal import entropy_gap, vertex_gap
from ciar.intervals.gates import BY_NAME
from ciar.intervals.learned import LearnedGate
from ciar.intervals.scores import SCORES, DraftLaw
from ciar.noise import uniform

DEVICE = tiny_device().requires_grad_(False)
KEYS = [(7, 0), (7, 1), (2**63, 5)]
TOKENS = 16


def learned_gate() -> LearnedGate:
    torch.manual_seed(11)
    gate = LearnedGate(DEVICE.config.trunk.dim, len(LAW_SCORES), 8)
    gate.standardise(torch.randn(50, DEVICE.config.trunk.dim + len(LAW_SCORES)) * 2 + 1)
    return gate.requires_grad_(False)


GATE = learned_gate()


def scoring(name: str, share: float = 0.3) -> Scoring:
    return Scoring(name, share, GATE if name == "learned" else None)


def states_of(tokens: list[list[int]]) -> Tensor:
    """[pictures, n + 1, dim] hidden states of equally long sequences, all of one prompt."""
    text = tiny_text().encode("a red cat")
    features, mask = (x.expand(len(tokens), *x.shape) for x in (text.features, text.mask))
    with torch.inference_mode():
        return DEVICE.train_hidden(
            features, mask, torch.tensor(tokens, dtype=torch.long).reshape(len(tokens), -1)
        )


def reading_of(pictures: list[int], tokens: list[list[int]], proposals: list[int]) -> Reading:
    """What the device says at one position, from scratch."""
    states = states_of(tokens)
    hidden = states[:, -1]
    centre = DEVICE.head.centre_logits(hidden)
    return Reading(pictures, tokens, proposals, hidden, centre, top_logits(centre), list(states))


def sequences(seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(64, (len(KEYS), TOKENS), generator=generator).tolist()


# --- definitions, in float64 and over the whole vocabulary -----------------------------------------


def softmax(z: np.ndarray) -> np.ndarray:
    return np.exp(z - np.logaddexp.reduce(z, -1, keepdims=True))


def laws(states: np.ndarray) -> np.ndarray:
    return softmax(states @ DEVICE.head.centre.weight.double().numpy().T)


def entropies(p: np.ndarray) -> np.ndarray:
    return -(p * np.log(p)).sum(-1) / np.log(64)


def naive_before(tokens: list[int]) -> float:
    if not tokens:
        return 1.0
    x = DEVICE.trunk.tok_embeddings.weight[tokens[-1]].double().numpy()
    x = x / np.sqrt((x**2).mean() + 1e-5) * DEVICE.trunk.norm.weight.double().numpy()
    return float(entropies(laws(x[None]))[0])


def naive_correlation(p: np.ndarray) -> float:
    c = p.T @ p / len(p)
    return float(1 - np.trace(c) / np.sqrt(len(p)) / np.linalg.norm(c))


def naive_square(position: int) -> list[int]:
    near = [i for i in range(position + 1) if abs(i % 4 - position % 4) <= 2]
    return [i for i in near if i // 4 >= position // 4 - 2]


def naive_disagreement(
    z: np.ndarray, proposal: int, key: tuple[int, int], position: int, drawn: bool
) -> float:
    agree = float(z.argmax() == proposal)
    order = np.argsort(-z)
    for k in range(1, 20):
        p = softmax(z * 19 / (2 * k))[order]
        if drawn:
            level = float(uniform(*key, position, k, GATE_LANE))
            agree += float(order[min(int((p.cumsum() < level).sum()), 63)] == proposal)
        else:
            agree += p[list(order).index(proposal)]
    return 1 - agree / 20


def naive(name: str, reading: Reading, row: int) -> float:
    """The score of one row, read off the definitions."""
    states = reading.states[row].double().numpy()
    tokens, key = list(reading.tokens[row]), KEYS[reading.pictures[row]]
    position = len(tokens)
    p = laws(states[: position + 1])
    law = DraftLaw(reading.centre[row], DEVICE.head(reading.hidden[row]).radius)
    if name in LAW_SCORES:
        return float(SCORES[name](law))
    if name.startswith("entropy-lens"):
        after, before = float(entropies(p)[-1]), naive_before(tokens)
        return {"entropy-lens": after, "entropy-lens-mean": (after + before) / 2}.get(name, after - before)
    if name.startswith("softmaxcorr"):
        windows = {
            "softmaxcorr": list(range(max(0, position - 15), position + 1)),
            "softmaxcorr-1": [position],
        }
        return naive_correlation(p[windows.get(name, naive_square(position))])
    if name.startswith("discrete"):  # the credal set has tests of its own
        gap = vertex_gap if name.endswith("vertices") else entropy_gap
        return float(gap(law, int(name.split("-")[1])))
    if name.startswith("u-hlm"):
        z = states[position] @ DEVICE.head.centre.weight.double().numpy().T
        return naive_disagreement(z, reading.proposals[row], key, position, drawn=name == "u-hlm")
    if name == "learned":
        summary = [float(SCORES[one](law)) for one in LAW_SCORES]
        x = (np.append(states[position], summary) - GATE.mean.numpy()) / GATE.scale.numpy()
        x = GATE.first.weight.numpy() @ x + GATE.first.bias.numpy()
        x = GATE.last.weight.numpy() @ (x / (1 + np.exp(-x))) + GATE.last.bias.numpy()
        return float(1 / (1 + np.exp(-x[0])))
    if name == "random":
        return float(uniform(*key, position, 0, GATE_LANE))
    return float(1 - (position * 0.3 + 1 / np.pi) % 1)


@pytest.mark.parametrize("name", SCORE_NAMES)
def test_scores_are_their_definitions(name: str) -> None:
    scorer = make_scorer(scoring(name), DEVICE, KEYS)
    whole = sequences()
    low, high = BY_NAME[name].bounds
    for position in (0, 1, 5, 9, 15):
        tokens = [one[:position] for one in whole]
        reading = reading_of([0, 1, 2], tokens, [one[position] for one in whole])
        found = scorer(reading)
        expected = [naive(name, reading, row) for row in range(3)]
        np.testing.assert_allclose(found, expected, atol=3e-4, rtol=3e-4)
        assert all(low <= score <= high for score in found)


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCORE_NAMES)
def test_a_score_is_a_function_of_the_tokens_alone(name: str) -> None:
    """Forwards, rollbacks, patches longer than what was drafted, jumps: as a fresh scorer has it."""
    scorer = make_scorer(scoring(name), DEVICE, KEYS)
    first, second = sequences(1)[0], sequences(2)[0]
    mixed = first[:4] + second[4:]
    path = [first[:n] for n in (2, 3, 4, 5, 9)]
    path += [mixed[:n] for n in (5, 8, 14, 6, 4, 0)] + [second[:3], first[:15]]
    for tokens in path:
        reading = reading_of([1], [tokens], [3])
        fresh = make_scorer(scoring(name), DEVICE, KEYS)
        assert scorer(reading) == pytest.approx(fresh(reading), abs=1e-5), len(tokens)


@pytest.mark.parametrize("name", SCORE_NAMES)
def test_pictures_do_not_mix(name: str) -> None:
    """Any subset of pictures, in any steps, gives what each picture gives alone."""
    whole = sequences(4)
    together = make_scorer(scoring(name), DEVICE, KEYS)
    alone = [make_scorer(scoring(name), DEVICE, KEYS) for _ in KEYS]
    for position, pictures in ((3, [0, 2]), (4, [1]), (4, [0, 1, 2]), (5, [1, 2])):
        tokens = [whole[i][:position] for i in pictures]
        found = together(reading_of(pictures, tokens, [1] * len(pictures)))
        for score, i, own in zip(found, pictures, tokens, strict=True):
            assert score == pytest.approx(alone[i](reading_of([i], [own], [1]))[0], abs=1e-5)


# --- the blind ones -------------------------------------------------------------------------------


def blind(name: str, share: float, key: tuple[int, int] = (1, 0), count: int = 3000) -> list[float]:
    """Scores at many positions: these gates look at nothing else."""
    scorer = make_scorer(Scoring(name, share), DEVICE, [key])
    hidden = torch.zeros(1, DEVICE.config.trunk.dim)
    centre = DEVICE.head.centre_logits(hidden)
    top = top_logits(centre)
    rows = [Reading([0], [range(t)], [0], hidden, centre, top, [hidden]) for t in range(count)]
    return [scorer(row)[0] for row in rows]


@pytest.mark.parametrize("share", [0.0, 0.07, 0.25, 0.3, 0.5, 0.62, 1.0])
def test_periodic_uploads_are_evenly_spaced(share: float) -> None:
    asked = [t for t, score in enumerate(blind("periodic", share)) if score >= 1.0 - share]
    assert len(asked) == pytest.approx(3000 * share, abs=1)
    if share:
        assert set(np.diff(asked)) <= {int(np.floor(1 / share)), int(np.ceil(1 / share))}


def test_random_scores_are_uniform_and_the_seeds() -> None:
    scores = np.array(blind("random", 0.3))
    assert ((scores > 0) & (scores < 1)).all()
    assert np.abs(np.sort(scores) - np.linspace(0, 1, 3000)).max() < 1.63 / np.sqrt(3000)  # 1 % Kolmogorov
    assert abs(np.corrcoef(scores[:-1], scores[1:])[0, 1]) < 0.06
    assert scores.tolist() == blind("random", 0.3)
    for key in ((2, 0), (1, 1)):
        assert abs(np.corrcoef(scores, blind("random", 0.3, key))[0, 1]) < 0.06


def test_the_noise_of_gates_is_not_that_of_choices() -> None:
    scores = np.array(blind("random", 0.3, count=500))
    for lane in range(8):
        other = uniform(1, 0, np.arange(500), 0, lane)
        assert abs(np.corrcoef(scores, other)[0, 1]) < 0.2


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: make_scorer("magic", DEVICE, KEYS), "no score 'magic'"),
        (lambda: make_scorer("learned", DEVICE, KEYS), "no learned gate"),
        (lambda: make_scorer("oracle", DEVICE, KEYS), "evaluation alone"),
        (lambda: make_scorer(Scoring("periodic", 1.5), DEVICE, KEYS), "share must"),
    ],
)
def test_what_cannot_be_scored_is_said(make: Callable[[], object], match: str) -> None:
    with pytest.raises(InputError, match=match):
        make()
