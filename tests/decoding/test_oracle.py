"""The oracle: true distances at every position, whatever rolls back; the bound that gates are held to."""

from __future__ import annotations

import pytest
import torch
from table_cloud import LawTable
from tiny import tiny_device, tiny_gpt, tiny_text
from torch import Tensor

from ciar.decoding.batch import Batch
from ciar.decoding.gate import top_logits
from ciar.decoding.oracle import Oracle, distance
from ciar.decoding.sampling import SamplingLaw
from ciar.decoding.scorer import Reading, Scoring, make_scorer
from ciar.decoding.strategy import get_strategy
from ciar.intervals.thresholds import ThresholdConfig
from ciar.protocol.messages import Settings
from ciar.training.teacher import guided_logits

CLOUD, DEVICE = tiny_gpt().requires_grad_(False), tiny_device().requires_grad_(False)
LAW = SamplingLaw(top_k=20)
PROMPTS = ("a red cat", "dog", "a smiling dog with sunglasses")


def texts() -> tuple[Tensor, Tensor]:
    encoded = [tiny_text().encode(prompt) for prompt in PROMPTS]
    return torch.stack([t.features for t in encoded]), torch.stack([t.mask for t in encoded])


def test_distance_is_total_variation_of_the_processed_laws() -> None:
    law = SamplingLaw(0.7, 5, 0.9)
    p, q = LawTable.random(3), LawTable.random(4)
    expected = 0.5 * abs(p.conditionals(law) - q.conditionals(law)).sum(1)
    torch.testing.assert_close(
        distance(p.logits, q.logits, law), torch.from_numpy(expected).float(), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_distances_after_any_history(scale: float) -> None:
    features, mask = texts()
    oracle = Oracle(CLOUD, features, mask, scale, LAW)
    scorer = make_scorer(Scoring("oracle", oracle=oracle), DEVICE, [(0, i) for i in range(3)])
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(64, (3, 16), generator=generator)
    other = codes.clone()
    other[:, 4] = (other[:, 4] + 1) % 64
    for sequence, length, pictures in (
        (codes, 0, [0, 1, 2]),
        (codes, 1, [0, 2]),
        (codes, 7, [0, 1, 2]),
        (other, 7, [1, 2]),
        (other, 5, [0, 1, 2]),
        (codes, 5, [1]),
        (other, 15, [0, 2]),
        (codes, 0, [2]),
    ):
        rows = torch.tensor(pictures)
        known = sequence[rows, :length]
        with torch.inference_mode():
            hidden = DEVICE.train_hidden(features[rows], mask[rows], known)[:, -1]
            centre = DEVICE.head.centre_logits(hidden)
            # One token more, of which the last law is not read.
            cloud = guided_logits(CLOUD, features[rows], mask[rows], sequence[rows, : length + 1], scale)[
                :, length
            ]
            top = top_logits(centre)
            reading = Reading(pictures, known.tolist(), [0] * len(rows), hidden, centre, top, [])
            found = scorer(reading)
        torch.testing.assert_close(torch.tensor(found), distance(cloud, centre, LAW), atol=1e-4, rtol=1e-3)


def test_the_oracle_as_the_gate_of_a_batch() -> None:
    """Uploaded are the tokens whose true distance is large; nothing of the oracle's own cost is counted."""
    features, mask = texts()
    settings = [Settings("ciar", seed=i, guidance=3.0, top_k=20, injection=False) for i in range(3)]
    spent: list[float] = []

    class Gate:
        def certain(self, score: float) -> bool:
            spent.append(score)
            return score < 0.93

        def answered(self, accepted: bool) -> None:
            """Changes nothing."""

    scoring = Scoring("oracle", oracle=Oracle(CLOUD, features, mask, 3.0, LAW))
    pictures = Batch(
        CLOUD, DEVICE, features, mask, settings, get_strategy("ciar"), [Gate() for _ in settings], scoring
    ).run()
    uploaded = sum(p.ledger.counts["accepted"] + p.ledger.counts["replaced"] for p in pictures)
    assert uploaded == sum(score >= 0.93 for score in spent)
    assert 0 < uploaded < len(spent)
    for picture in pictures:
        counts = picture.ledger.counts
        assert picture.ledger.cloud_passes == 1 + counts["accepted"] + counts["replaced"]
    zero = [ThresholdConfig("fixed", value=0.0).start(16) for _ in settings]
    everything = Batch(
        CLOUD, DEVICE, features, mask, settings, get_strategy("ciar"), list(zero), scoring
    ).run()
    assert all(p.ledger.counts["device"] == 0 for p in everything)
