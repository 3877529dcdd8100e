"""The tokenizer's codes as relaxed strategies see them: distances and neighbours."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress

import torch
from torch import Tensor

from ciar.errors import InputError

#: Tokens whose neighbours are kept: 16 MB at 4,096 codes.
_KEPT = 1024


class Codebook:
    """Codes and their neighbours, found when asked for and kept.

    Args:
        codes: float32 [vocab, dim], as they are decoded (unit rows in LlamaGen's tokenizers).
    """

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes.float()
        # One order a token serves every count; a server keeps it for all its sessions.
        self._orders: OrderedDict[int, Tensor] = OrderedDict()

    def distances(self, token: int) -> Tensor:
        """float32 [vocab] Euclidean distances of all codes to a token's."""
        # Differences, not dot products: equal codes are at distance 0 and order is exact near it.
        return torch.linalg.vector_norm(self.codes - self.codes[token], dim=-1)

    def nearest(self, token: int, count: int) -> Tensor:
        """int64 [count] the codes nearest to a token's, nearest first, without itself.

        Raises:
            InputError: there are not so many.
        """
        if not 1 <= count < len(self.codes):
            raise InputError(
                f"neighbours is {count}; with this codebook it must be 1 to {len(self.codes) - 1}."
            )
        order = self._orders.get(token)
        if order is None:
            away = self.distances(token)
            away[token] = -1.0
            # A stable sort, so that codes at the same distance come in the same order everywhere.
            order = away.argsort(stable=True)[1:].to(torch.int32)
            self._orders[token] = order
            while len(self._orders) > _KEPT:
                # Another session may have been quicker.
                with suppress(KeyError):
                    self._orders.popitem(last=False)
        return order[:count].long()
