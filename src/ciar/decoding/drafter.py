"""Runs the device model over the tokens of one picture; used by the device and, for interval
features and speculative sampling, by the cloud's own copy."""

from __future__ import annotations

import torch
from torch import Tensor

from ciar.models.device import DeviceModel, DeviceTrunk
from ciar.models.text import TextFeatures


class Drafter:
    """The device model's state for one picture.

    Whatever tokens it is asked about, it keeps the cells of the longest prefix that it has already
    fed and feeds the rest in one block: a rollback costs the changed tokens and nothing else.

    Args:
        model: the device model.
        trunk: its trunk, ready for decoding.
        text: the prompt's features in the device's own text encoder.
    """

    def __init__(self, model: DeviceModel, trunk: DeviceTrunk, text: TextFeatures) -> None:
        self.model, self.trunk = model, trunk
        config = model.config.trunk
        self.fed: list[int] = []
        self.steps = 0
        #: Entry i is the hidden state that predicts token i.
        self.states = torch.zeros(config.tokens + 1, config.dim, device=trunk.device, dtype=trunk.dtype)
        with torch.inference_mode():
            prompt = trunk.read([text], None, False)
            self.cache = prompt.cache
            hidden = trunk.forward(prompt.x, config.text_len - prompt.x.shape[1], self.cache)
            self.states[0] = hidden[0, -1]

    def feed(self, tokens: list[int]) -> None:
        """Brings the state to the end of ``tokens``."""
        known = len(self.fed)
        if self.fed != tokens[:known]:
            known = next(i for i, (a, b) in enumerate(zip(self.fed, [*tokens, -1], strict=False)) if a != b)
        if known < len(tokens):
            trunk = self.trunk
            fresh = torch.tensor([tokens[known:]], device=self.states.device)
            with torch.inference_mode():
                hidden = trunk.forward(trunk.embed_tokens(fresh), trunk.config.text_len + known, self.cache)
                self.states[known + 1 : len(tokens) + 1] = hidden[0]
            self.steps += len(tokens) - known
        self.fed = list(tokens)

    def hidden(self, tokens: list[int]) -> Tensor:
        """[dim] hidden state that predicts the token after ``tokens``."""
        self.feed(tokens)
        return self.states[len(tokens)]

    @torch.inference_mode()
    def features(self, start: int, count: int) -> Tensor:
        """[count, feature_dim] interval features of the tokens at ``start`` on (already fed)."""
        return self.model.features(self.states[start : start + count])
