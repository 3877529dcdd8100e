"""EAGLE's drafter: one layer that continues the cloud model's own features.

It reads, at each token, the feature from which the cloud predicted that token and the token's embedding,
and estimates the feature that the cloud will have next. Embeddings, final norm and head are the cloud's,
frozen; the drafter's own weights are one matrix and one layer. Under guidance it runs both rows.

Here a pair stands at the position of its token, the layer begins with its norm (the public code's first
layer has none), and the estimate passes through the cloud's final norm, as the feature did.

Source: EAGLE, arXiv 2401.15077, section 3; https://github.com/SafeAILab/EAGLE.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ciar.models.gpt import GPT, Block, GPTConfig, sequence_mask


class EagleModel(nn.Module):
    """The drafter's own weights.

    Args:
        config: sizes of the cloud model.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.dim, config.dim)
        self.layer = Block(config)

    def start_from(self, cloud: GPT) -> None:
        """Starts as the sum of feature and embedding, and the cloud's last layer."""
        self.layer.load_state_dict(cloud.layers[-1].state_dict())
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(self.config.dim).repeat(1, 2))
            self.fc.bias.zero_()

    def merge(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Inputs of the layer [..., dim]: of tokens' embeddings and the features that predicted them."""
        return self.fc(torch.cat([embedded, features], dim=-1))

    def estimate(self, cloud: GPT, x: Tensor, features: Tensor, text_mask: Tensor) -> Tensor:
        """Teacher-forced estimates over whole sequences, without a cache.

        Args:
            cloud: whose norm and rotary table are used.
            x: [rows, text + n, dim] the embedded sequences, text and tokens.
            features: [rows, text + n, dim] the cloud's normalised hidden states of these.
            text_mask: bool [rows, text], left-padded.

        Returns:
            [rows, n, dim] estimates of the features of the n tokens, ``features[:, -n:]``.
        """
        text, length = text_mask.shape[1], x.shape[1]
        first = cloud.config.text_len - text + 1
        table = cloud.table[first : first + length - 1]
        merged = self.merge(x[:, 1:], features[:, :-1])
        mask = sequence_mask(pair_mask(text_mask), length - 1)
        q, k, v = self.layer.attention.project(self.layer.attention_norm(merged), table)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return cloud.norm(self.layer.finish(merged, mixed))[:, text - 1 :]


def pair_mask(text_mask: Tensor) -> Tensor:
    """Which pairs of neighbouring text rows are no padding: bool [rows, text] to [rows, text - 1]."""
    return text_mask[:, 1:] & text_mask[:, :-1]
