"""The upper bound of any gate: the true total variation between the device's law and the cloud's.

It runs the cloud model at every position that the device proposes for, which is what a gate is there to
avoid; nothing of that is counted in a ledger. For evaluation alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ciar.decoding.batch import RaggedTrunk
from ciar.decoding.sampling import SamplingLaw, guide, to_law
from ciar.decoding.scorer import Reading
from ciar.intervals.scores import total_variation
from ciar.models.families import for_decoding
from ciar.models.family import CloudModel
from ciar.models.text import rows_of


def distance(cloud_logits: Tensor, device_logits: Tensor, law: SamplingLaw) -> Tensor:
    """Total variation between two processed laws.

    Args:
        cloud_logits: guided logits [..., vocab].
        device_logits: centre logits [..., vocab].
        law: how both become laws.

    Returns:
        float32 [...], 0 to 1.
    """
    p = to_law(cloud_logits, law, what="the cloud model")
    q = to_law(device_logits, law, what="the device model")
    return total_variation(p.exp(), q.exp())


class Oracle:
    """True distances for the readings of a batch; give it to a ``Scoring`` named ``oracle``.

    The cloud's law is the one without interval features.

    Args:
        cloud: the cloud model, of any family.
        features: float32 [pictures, text, caption_dim], left-padded, as the batch has them.
        mask: bool [pictures, text].
        guidance: scale.
        law: the sampling law of both models.
    """

    def __init__(
        self,
        cloud: nn.Module | CloudModel,
        features: Tensor,
        mask: Tensor,
        guidance: float,
        law: SamplingLaw,
    ) -> None:
        self.cloud, self.scale, self.law = for_decoding(cloud), guidance, law
        self.count, self.guided = len(features), 1 if guidance == 1.0 else 2
        self.trunk = RaggedTrunk(self.cloud, rows_of(features, mask), self.guided == 2)
        self.fed: list[list[int]] = [[] for _ in range(self.count)]
        #: Row of hidden states that predict the token after ``fed``, conditional rows first.
        self.last = self.trunk.first_hidden.clone()

    def __call__(self, reading: Reading) -> Tensor:
        """float32 [rows] total variation at each position."""
        self._feed(reading)
        rows = torch.tensor(reading.pictures, device=self.last.device)
        logits = self.trunk.model.head(self.last[rows])
        if self.guided == 2:
            logits = guide(logits, self.trunk.model.head(self.last[rows + self.count]), self.scale)
        return distance(logits, reading.centre, self.law)

    def _feed(self, reading: Reading) -> None:
        """Brings the caches to the end of the tokens, in one pass over what is new."""
        todo: list[tuple[int, int, list[int]]] = []
        for picture, sequence in zip(reading.pictures, reading.tokens, strict=True):
            fed, tokens = self.fed[picture], list(sequence)
            if fed == tokens:
                continue
            self.fed[picture] = tokens
            pairs = enumerate(zip(fed, tokens, strict=False))
            known = next((i for i, (a, b) in pairs if a != b), min(len(fed), len(tokens)))
            if tokens:  # where nothing is new, the last token again: its state was overwritten
                known = min(known, len(tokens) - 1)
                todo.append((picture, known, tokens[known:]))
            else:
                own = [picture + i * self.count for i in range(self.guided)]
                self.last[own] = self.trunk.first_hidden[own]
        if not todo:
            return
        device = self.last.device
        block = torch.zeros(len(todo), max(len(ids) for _, _, ids in todo), dtype=torch.long, device=device)
        for i, (_, _, ids) in enumerate(todo):
            block[i, : len(ids)] = torch.tensor(ids)
        rows = torch.tensor([picture for picture, _, _ in todo], device=device)
        rows = torch.cat([rows + i * self.count for i in range(self.guided)])
        starts = torch.tensor([known for _, known, _ in todo] * self.guided, device=device)
        ends = torch.tensor([len(ids) - 1 for _, _, ids in todo] * self.guided, device=device)
        x = self.cloud.embed_tokens(block).repeat(self.guided, 1, 1)
        hidden = self.trunk.feed(rows, starts, x)
        self.last[rows] = hidden[torch.arange(len(rows), device=device), ends]
