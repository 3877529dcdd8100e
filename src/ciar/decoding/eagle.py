"""The EAGLE drafter on one picture, and the cloud's passes over the trees that it drafts."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ciar.decoding.sampling import guide
from ciar.decoding.strategy import GrowTree, TreePass
from ciar.decoding.trees import ancestry, depths_of
from ciar.models.cache import KVCache
from ciar.models.eagle import EagleModel, pair_mask
from ciar.models.gpt import GPT
from ciar.models.inference import InferenceGPT


class EagleDrafter:
    """The drafter's state for one picture: features that the cloud gave, and the nodes of one tree.

    Args:
        eagle: the drafter.
        cloud: the cloud model that it was trained on.
        scale: guidance.
        folded: whether hidden states come without the weights of the cloud's final norm, as the
            decoding form of the model gives them in float32.
        text: [rows, text, dim] the prompt's embedded rows.
        hidden: [rows, text, dim] the cloud's hidden states of these.
        text_mask: bool [rows, text], or None where no row has padding.
    """

    def __init__(
        self,
        eagle: EagleModel,
        cloud: GPT,
        scale: float,
        *,
        folded: bool,
        text: Tensor,
        hidden: Tensor,
        text_mask: Tensor | None,
    ) -> None:
        self.eagle, self.cloud, self.scale, self.folded = eagle, cloud, scale, folded
        rows, count, dim = text.shape
        config = replace(cloud.config, n_layer=1)
        self.first = config.text_len
        mask = torch.ones(rows, count, dtype=torch.bool, device=text.device)
        self.text_mask = pair_mask(mask if text_mask is None else text_mask)
        self.cache = KVCache.allocate(
            config, text_rows=count - 1, rows=rows, dtype=text.dtype, device=text.device
        )
        features = self._feature(hidden)
        #: Entry i is the feature that predicts token i: [rows, tokens + 1, dim].
        self.features = torch.zeros(rows, config.tokens + 1, dim, dtype=text.dtype, device=text.device)
        self.features[:, 0] = features[:, -1]
        self.seen, self.fed = 0, 0
        self.root = features[:, -1:]  # estimated feature behind the known tokens
        self.parents: list[int] = []
        self.nodes = self.root[:, :0]  # [rows, nodes, dim] estimated features behind the tree's nodes
        self.waiting = self.root[:, :0]  # the cloud's features of the last pass's nodes
        if count > 1:
            where = torch.arange(self.first - count + 1, self.first, device=text.device)
            own = torch.eye(count - 1, dtype=torch.bool, device=text.device)
            seen = torch.ones_like(own).tril() & self.text_mask[:, None] | own
            self._run(eagle.merge(text[:, 1:], features[:, :-1]), where, where, seen[:, None])

    def saw(self, start: int, hidden: Tensor) -> None:
        """Takes the cloud's hidden states [rows, n, dim] of known tokens from ``start`` on."""
        end = start + hidden.shape[1]
        self.features[:, start + 1 : end + 1] = self._feature(hidden)
        self.seen = end

    def hold(self, hidden: Tensor) -> None:
        """Takes the cloud's hidden states [rows, nodes, dim] of a tree, until a path of it is known."""
        self.waiting = hidden

    def keep(self, nodes: tuple[int, ...]) -> None:
        """Takes the held states of a path as those of known tokens."""
        if nodes:
            self.saw(self.seen, self.waiting[:, list(nodes)])

    def grow(self, tokens: list[int], op: GrowTree) -> Tensor:
        """Answers a :class:`GrowTree`: guided logits, float32 [max(1, n), vocab]."""
        hidden = self._extend(op) if op.ids else self._begin(tokens)
        logits = self.cloud.head(hidden)
        return logits[0] if len(logits) == 1 else guide(logits[0], logits[1], self.scale)

    def _begin(self, tokens: list[int]) -> Tensor:
        assert self.seen >= len(tokens) - 1, "the cloud has seen every known token but the last"
        begin, end = self.fed, len(tokens)
        self.parents, self.nodes = [], self.root[:, :0]
        if begin < end:
            ids = torch.tensor(tokens[begin:], device=self.features.device)
            x = self.eagle.merge(self._embedded(ids), self.features[:, begin:end])
            where = torch.arange(begin, end, device=ids.device)
            visible = torch.ones(end - begin, end, dtype=torch.bool, device=ids.device).tril(begin)
            self.root = self._run(x, where + self.first, where + self.first, self._with_text(visible))[:, -1:]
            self.fed = end
        return self.root

    def _extend(self, op: GrowTree) -> Tensor:
        known, before = self.fed, len(self.parents)
        self.parents += op.parents
        device = self.features.device
        ids = torch.tensor(op.ids, device=device)
        behind = torch.cat([self.root, self.nodes], dim=1)[:, [parent + 1 for parent in op.parents]]
        x = self.eagle.merge(self._embedded(ids), behind)
        depths = torch.tensor(depths_of(self.parents)[before:], device=device)
        cells = known + torch.arange(before, len(self.parents), device=device)
        visible = F.pad(ancestry(self.parents)[before:], (known, 0), value=True).to(device)
        hidden = self._run(x, known - 1 + depths + self.first, cells + self.first, self._with_text(visible))
        self.nodes = torch.cat([self.nodes, hidden], dim=1)
        return hidden

    def _run(self, x: Tensor, positions: Tensor, cells: Tensor, mask: Tensor) -> Tensor:
        """The layer over the cache: [rows, n, dim] to estimated features [rows, n, dim]."""
        layer, rows = self.eagle.layer, len(x)
        q, k, v = layer.attention.project(layer.attention_norm(x), self.cloud.table[positions])
        self.cache = self.cache.with_room(int(cells.max()) + 1)
        keys, values = self.cache.write(0, cells.expand(rows, -1), torch.stack([k, v]))
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.cloud.norm(layer.finish(x, mixed))

    def _embedded(self, ids: Tensor) -> Tensor:
        return self.cloud.embed_tokens(ids).expand(len(self.features), -1, -1)

    def _with_text(self, visible: Tensor) -> Tensor:
        return over_text(visible, self.text_mask)

    def _feature(self, hidden: Tensor) -> Tensor:
        return hidden * self.cloud.norm.weight if self.folded else hidden


def over_text(visible: Tensor, text_mask: Tensor) -> Tensor:
    """A mask over text and picture, [rows, 1, n, text + cells]: bool [n, cells] behind bool [rows, text]."""
    rows, n = len(text_mask), len(visible)
    text = text_mask[:, None].expand(-1, n, -1)
    return torch.cat([text, visible.expand(rows, -1, -1)], dim=2)[:, None]


def tree_forward(model: InferenceGPT, cache: KVCache, request: TreePass, text_mask: Tensor | None) -> Tensor:
    """One forward over known tokens and the tree behind them.

    The nodes' keys are put into the cells behind the known tokens' own, in their order.

    Args:
        model: the cloud model.
        cache: with cells for all of them.
        request: what to feed.
        text_mask: bool [rows, text], or None where no row has padding.

    Returns:
        [rows, known + nodes, dim] hidden states.
    """
    rows, device, first = cache.rows, cache.cells.device, model.config.text_len
    known, nodes = len(request.ids), len(request.nodes)
    end = request.start + known
    x = model.embed_tokens(torch.tensor([request.ids + request.nodes], device=device))
    own = torch.arange(request.start, end)
    cells = torch.arange(request.start, end + nodes)
    positions = torch.cat([own, end - 1 + torch.tensor(depths_of(request.parents), dtype=torch.long)])
    visible = torch.ones(known + nodes, end + nodes, dtype=torch.bool).tril(request.start)
    visible[known:, end:] = ancestry(request.parents)
    text = first - cache.first
    seen = torch.ones(rows, text, dtype=torch.bool) if text_mask is None else text_mask
    mask = over_text(visible.to(device), seen.to(device))
    where, places = ((t + first).to(device).expand(rows, -1) for t in (positions, cells))
    return model.forward(x.expand(rows, -1, -1), where, cache, mask, places)


def keep_cells(cache: KVCache, first: int, known: int, nodes: tuple[int, ...]) -> None:
    """Moves a path's keys from the cells of the tree to those behind the known tokens.

    Args:
        first: position of the first image token.
        known: known tokens before the tree.
        nodes: the path's nodes.
    """
    sources = torch.tensor(nodes, dtype=torch.long, device=cache.cells.device)
    cache.move(sources + first + known, first + known)
