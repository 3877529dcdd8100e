"""The EAGLE drafter on one picture, and the cloud's passes over the trees that it drafts."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ciar.decoding.feature_rows import as_travelled, pack_rows, row_bytes, unpack_rows
from ciar.decoding.sampling import guide_rows
from ciar.decoding.strategy import GrowTree, TakeFeatures, TellFeatures, TreePass
from ciar.decoding.trees import ancestry
from ciar.errors import ProtocolError
from ciar.models.cache import KVCache
from ciar.models.eagle import EagleModel, pair_mask
from ciar.models.gpt import GPT
from ciar.models.inference import InferenceGPT
from ciar.protocol.messages import depths_of

#: Most bytes of features that one answer tells: well within a frame.
MOST_TOLD_BYTES = 1 << 19


class EagleDrafter:
    """The drafter's state for one picture: features that the cloud gave, and the nodes of one tree.

    Elements are the prompt's text rows and then the picture's tokens; the feature of one predicts the next.
    The drafter itself first runs when a tree is grown: a cloud whose device drafts keeps features alone.

    Args:
        eagle: the drafter.
        cloud: the cloud model that it was trained on; its layers are not used.
        scale: guidance.
        folded: whether hidden states come without the weights of the cloud's final norm, as the
            decoding form of the model gives them in float32.
        text: [rows, text, dim] the prompt's embedded rows.
        hidden: [rows, text, dim] the cloud's hidden states of these; None where they are still to come.
        text_mask: bool [rows, text], or None where no row has padding.
        kind: format in which features travel and are read, see ``decoding.feature_rows``.
    """

    def __init__(
        self,
        eagle: EagleModel,
        cloud: GPT,
        scale: float,
        *,
        folded: bool,
        text: Tensor,
        hidden: Tensor | None,
        text_mask: Tensor | None,
        kind: str = "float32",
    ) -> None:
        self.eagle, self.cloud, self.scale, self.folded, self.kind = eagle, cloud, scale, folded, kind
        rows, count, dim = text.shape
        self.text, self.first = text, cloud.config.text_len
        mask = torch.ones(rows, count, dtype=torch.bool, device=text.device)
        self.text_mask = pair_mask(mask if text_mask is None else text_mask)
        #: [rows, text + tokens, dim]; those of the first ``known`` elements are there.
        self.features = torch.zeros(
            rows, count + cloud.config.tokens, dim, dtype=text.dtype, device=text.device
        )
        self.known, self.fed, self.steps = 0, 0, 0
        self.cache: KVCache | None = None
        self.parents: list[int] = []
        self.root = self.nodes = text[:, :0]  # estimated features behind the known tokens, and of the tree
        self.waiting = self.root  # the cloud's features of the last pass's nodes
        if hidden is not None:
            self._put(0, self._feature(hidden))

    @property
    def seen(self) -> int:
        """Tokens whose features are there."""
        return self.known - self.text.shape[1]

    def saw(self, start: int, hidden: Tensor) -> None:
        """Takes the cloud's hidden states [rows, n, dim] of known tokens from ``start`` on."""
        self._put(self.text.shape[1] + start, self._feature(hidden))

    def hold(self, hidden: Tensor) -> None:
        """Takes the cloud's hidden states [rows, nodes, dim] of a tree, until a path of it is known."""
        self.waiting = hidden

    def keep(self, nodes: tuple[int, ...]) -> None:
        """Takes the held states of a path as those of known tokens."""
        if nodes:
            self.saw(self.seen, self.waiting[:, list(nodes)])

    def tell(self, op: TellFeatures) -> tuple[int, bytes]:
        """Answers a :class:`TellFeatures`."""
        rows, _, dim = self.features.shape
        most = max(1, MOST_TOLD_BYTES // (rows * row_bytes(op.kind, dim)))
        end = min(self.known, op.first + most)
        return end - op.first, pack_rows(self.features[:, op.first : end], op.kind)

    def take(self, op: TakeFeatures) -> None:
        """Takes features that the cloud has told.

        Raises:
            ProtocolError: they are damaged, or more than the picture has elements.
        """
        rows, room, dim = self.features.shape
        features = unpack_rows(op.data, rows, dim, op.kind).to(self.features)
        if self.known + features.shape[1] > room:
            raise ProtocolError("The cloud's features are more than the picture has tokens.")
        self._put(self.known, features)

    def _put(self, start: int, features: Tensor) -> None:
        self.known = start + features.shape[1]
        self.features[:, start : self.known] = features

    def _read_text(self) -> None:
        """Runs the drafter over the prompt."""
        rows, count, _ = self.text.shape
        config = replace(self.cloud.config, n_layer=1)
        device = self.text.device
        self.cache = KVCache.allocate(
            config, text_rows=count - 1, rows=rows, dtype=self.text.dtype, device=device
        )
        self.root = self.features[:, count - 1 : count]
        if count > 1:
            where = torch.arange(self.first - count + 1, self.first, device=device)
            own = torch.eye(count - 1, dtype=torch.bool, device=device)
            seen = torch.ones_like(own).tril() & self.text_mask[:, None] | own
            x = self.eagle.merge(self.text[:, 1:], self.features[:, : count - 1])
            self._run(self.cache, x, where, where, seen[:, None])

    def grow(self, tokens: list[int], op: GrowTree) -> Tensor:
        """Answers a :class:`GrowTree`: guided logits, float32 [max(1, n), vocab]."""
        hidden = self._extend(op) if op.ids else self._begin(tokens)
        return guide_rows(self.cloud.head(hidden), self.scale)

    def _begin(self, tokens: list[int]) -> Tensor:
        if self.seen < len(tokens) - 1:
            raise ProtocolError("The cloud's features of known tokens are missing. Open a new session.")
        if self.cache is None:
            self._read_text()
        begin, end, before = self.fed, len(tokens), self.text.shape[1] - 1
        self.parents, self.nodes = [], self.root[:, :0]
        if begin < end:
            ids = torch.tensor(tokens[begin:], device=self.features.device)
            x = self.eagle.merge(self._embedded(ids), self.features[:, before + begin : before + end])
            where = torch.arange(begin, end, device=ids.device)
            visible = torch.ones(end - begin, end, dtype=torch.bool, device=ids.device).tril(begin)
            where = where + self.first
            self.root = self._run(self._cells(), x, where, where, self._with_text(visible))[:, -1:]
            self.fed = end
            self.steps += end - begin
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
        where = known - 1 + depths + self.first
        hidden = self._run(self._cells(), x, where, cells + self.first, self._with_text(visible))
        self.steps += len(op.ids)
        self.nodes = torch.cat([self.nodes, hidden], dim=1)
        return hidden

    def _cells(self) -> KVCache:
        assert self.cache is not None, "a tree begins before it grows"
        return self.cache

    def _run(self, cache: KVCache, x: Tensor, positions: Tensor, cells: Tensor, mask: Tensor) -> Tensor:
        """The layer over the cache: [rows, n, dim] to estimated features [rows, n, dim]."""
        layer, rows = self.eagle.layer, len(x)
        q, k, v = layer.attention.project(layer.attention_norm(x), self.cloud.table[positions])
        self.cache = cache.with_room(int(cells.max()) + 1)
        keys, values = self.cache.write(0, cells.expand(rows, -1), torch.stack([k, v]))
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.cloud.norm(layer.finish(x, mixed))

    def _embedded(self, ids: Tensor) -> Tensor:
        return self.cloud.embed_tokens(ids).expand(len(self.features), -1, -1)

    def _with_text(self, visible: Tensor) -> Tensor:
        return over_text(visible, self.text_mask)

    def _feature(self, hidden: Tensor) -> Tensor:
        return as_travelled(hidden * self.cloud.norm.weight if self.folded else hidden, self.kind)


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
