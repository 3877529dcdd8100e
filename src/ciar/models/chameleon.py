"""Anole, the Chameleon transformer that draws: text tokens in, image codes out.

The trunk is that of ``transformers``; which of its class' features are used here is little: layers over
embedded inputs, an explicit mask, explicit positions, and the project's own cache in place of its own,
so that a rollback is writing again from an earlier position. Of the 65,536 rows of table and head only
those of the image codes are kept: a picture is exactly ``tokens`` codes between two frame tokens, so no
other choice is ever allowed, and the softmax over 8,192 logits is that over all with the rest masked.
Text is embedded by the text encoder (``models.token_text``), which has the whole table.

Sources: Anole, arXiv 2407.06135, https://github.com/GAIR-NLP/anole; Chameleon, arXiv 2405.09818.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ciar.errors import InputError
from ciar.models.cache import KVCache
from ciar.models.chameleon_vq import ChameleonVQ, to_pixels
from ciar.models.family import Family, Prompt
from ciar.models.gpt import GPTConfig
from ciar.models.text import TextFeatures

_NEEDS = "Anole runs on the Chameleon layers of transformers (4.45 or later). Run: pip install transformers"
#: Id of the token that begins every sequence. Public config files say 1, which is the padding.
BEGIN_TEXT = 0


@dataclass(frozen=True)
class ChameleonConfig:
    """Sizes of a Chameleon transformer that draws. The defaults are Anole-7B's.

    Attributes:
        dim, n_layer, n_head, ffn_hidden: of the trunk.
        vocab_size: image codes.
        grid: tokens of a picture's edge.
        text_len: most text tokens of a prompt, frame tokens included. The model has no such limit of
            its own; prompt and picture share ``max_positions``.
        text_vocab: tokens of the public table, text and image together.
        first_code: id of image code 0; code c has id ``first_code + c``.
        end_image, begin_image, separator: ids of the frame: behind a picture, before it, behind the
            user's words.
        rope_base, norm_eps: as of the trunk; queries and keys are normalised per head with 1e-5.
        max_positions: positions that the weights were trained for.
    """

    dim: int = 4096
    n_layer: int = 32
    n_head: int = 32
    ffn_hidden: int = 11008
    vocab_size: int = 8192
    grid: int = 32
    text_len: int = 512
    text_vocab: int = 65536
    first_code: int = 4
    end_image: int = 8196
    begin_image: int = 8197
    separator: int = 8710
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    max_positions: int = 4096

    def __post_init__(self) -> None:
        if self.text_len + self.tokens > self.max_positions:
            raise ValueError(
                f"text_len {self.text_len} and {self.tokens} image tokens are more than "
                f"{self.max_positions} positions"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_head

    @property
    def tokens(self) -> int:
        """Image tokens of a picture."""
        return self.grid**2

    @property
    def caption_dim(self) -> int:
        """Caption features are rows of the model's own table."""
        return self.dim

    @property
    def null_ids(self) -> tuple[int, int]:
        """The unconditional prompt."""
        return BEGIN_TEXT, self.begin_image

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ChameleonConfig:
        """Raises TypeError for an unknown name, ValueError when prompt and picture have no room."""
        return cls(**values)


class Chameleon(nn.Module):
    """The transformer as it is stored: trunk, and table and head of the image codes.

    Raises:
        InputError: transformers is not installed.
    """

    def __init__(self, config: ChameleonConfig) -> None:
        super().__init__()
        self.config = config
        self.model: Any = _trunk(config)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        #: [2, dim] the unconditional prompt, embedded.
        self.null_prompt = nn.Parameter(torch.zeros(len(config.null_ids), config.dim))

    def fill_buffers(self) -> None:
        """Computes what no file holds, after the model was built without memory."""
        config = self.config
        exponent = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        # Older versions of transformers have one rotation a layer, and not all have the second name.
        for module in self.model.modules():
            for name in ("inv_freq", "original_inv_freq"):
                if hasattr(module, name):
                    setattr(module, name, 1.0 / config.rope_base**exponent)


def _trunk(config: ChameleonConfig) -> nn.Module:
    try:
        from transformers import ChameleonConfig as TrunkConfig
        from transformers import ChameleonModel
    except ImportError:
        raise InputError(_NEEDS) from None
    # The class insists on an image encoder; the smallest one is made and thrown away.
    encoder = {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "resolution": 16}
    sizes: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_hidden,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_head,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "swin_norm": False,
        "vocabulary_map": {"<image>": 0},
        "vq_config": encoder,
    }
    model = ChameleonModel(TrunkConfig(**sizes))
    del model.vqmodel
    return model


@dataclass(frozen=True)
class ShiftedCache(KVCache):
    """A cache whose rows count their own positions.

    Attributes:
        shift: int64 [rows], padding in front of each row; None when there is none.
    """

    shift: Tensor | None = None

    def choose(self, rows: Tensor) -> ShiftedCache:
        """See :class:`~ciar.models.cache.KVCache`."""
        shift = None if self.shift is None else self.shift[rows]
        return replace(self, chosen=super().choose(rows).chosen, shift=shift)

    def with_room(self, end: int) -> ShiftedCache:
        """See :class:`~ciar.models.cache.KVCache`."""
        return replace(self, cells=super().with_room(end).cells)


class _Layers:
    """The cache as the layers of transformers ask for it."""

    def __init__(self, cache: KVCache, start: int | Tensor) -> None:
        self._cache, self._start = cache, start

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *rest: object, **named: object
    ) -> tuple[Tensor, Tensor]:
        return self._cache.write(layer, self._start, torch.stack([keys, values]))

    def get_seq_length(self, layer: int = 0) -> int:
        """Asked for by older versions, for a mask that they then do not make."""
        return self._start - self._cache.first if isinstance(self._start, int) else 0


def cache_argument(forward: Any) -> str:
    """What a trunk calls its cache: ``cache``, or ``past_key_values`` before transformers 5.24."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


class InferenceChameleon:
    """A frozen Chameleon, ready for decoding; a :class:`~ciar.models.family.CloudModel`."""

    def __init__(self, model: Chameleon) -> None:
        self.config = model.config
        self.trunk: Any = model.model
        self.embedding: Tensor = model.model.embed_tokens.weight.detach()
        self.output = model.lm_head.weight.detach()
        self.null = model.null_prompt.detach()
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self._cache_argument = cache_argument(type(self.trunk).forward)

    def read(
        self, texts: Sequence[TextFeatures], negatives: Sequence[TextFeatures] | None, guided: bool
    ) -> Prompt:
        """See :class:`~ciar.models.family.CloudModel`. Unconditional is the begin of a picture alone."""
        rows = [text.features[text.mask] for text in texts]
        if guided and negatives is None:
            rows += [self.null] * len(texts)
        elif guided and negatives is not None:
            rows += [text.features[text.mask] for text in negatives]
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        longest = int(lengths.max())
        x = torch.zeros(len(rows), longest, self.config.dim, dtype=self.dtype, device=self.device)
        for i, row in enumerate(rows):
            x[i, longest - len(row) :] = row.to(x)
        shift = longest - lengths
        padded = bool(shift.any())
        mask = torch.arange(longest, device=self.device) >= shift[:, None] if padded else None
        return Prompt(x, mask, self.new_cache(longest, len(rows), shift if padded else None))

    def new_cache(self, text_rows: int, rows: int, shift: Tensor | None = None) -> ShiftedCache:
        """A cache over ``text_rows`` text rows and all image tokens."""
        config = self.config
        length = text_rows + config.tokens
        shape = (config.n_layer, 2, rows, config.n_head, length, config.head_dim)
        cells = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return ShiftedCache(cells, config.text_len - text_rows, None, shift)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """Codes [...] to [..., dim]."""
        return self.embedding[ids]

    def forward(self, x: Tensor, start: int | Tensor, cache: KVCache, mask: Tensor | None = None) -> Tensor:
        """See :class:`~ciar.models.family.CloudModel`. A row's rotation counts from its own first token."""
        n, device = x.shape[1], x.device
        if isinstance(start, int):
            cells = torch.arange(start, start + n, device=device)[None]
            if mask is None:
                length = start + n - cache.first
                mask = torch.ones(1, 1, n, length, dtype=torch.bool, device=device).tril(length - n)
        else:
            cells = start if start.ndim == 2 else start[:, None] + torch.arange(n, device=device)
        assert mask is not None, "rows that start at different positions need a mask"
        positions = cells - cache.first  # [rows or 1, n]
        if isinstance(cache, ShiftedCache) and cache.shift is not None:
            positions = (positions - cache.shift[:, None]).clamp_min(0)
        # Additive: older versions of transformers take no other mask as it is.
        added = torch.zeros(mask.shape, dtype=x.dtype, device=device).masked_fill_(~mask, -torch.inf)
        layers = {self._cache_argument: _Layers(cache, start)}
        out = self.trunk(
            inputs_embeds=x, attention_mask=added, position_ids=positions, use_cache=True, **layers
        )
        hidden: Tensor = out.last_hidden_state
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of the image codes, float32 [..., vocab_size]."""
        return F.linear(hidden, self.output).float()


def published_shapes(config: ChameleonConfig) -> dict[str, list[int]]:
    """Names and shapes of the transformer in the public files, in the layout of transformers."""
    dim, hidden, head = config.dim, config.ffn_hidden, [config.n_head, config.head_dim]
    layer: dict[str, list[int]] = {
        "input_layernorm.weight": [dim],
        "post_attention_layernorm.weight": [dim],
        "mlp.gate_proj.weight": [hidden, dim],
        "mlp.up_proj.weight": [hidden, dim],
        "mlp.down_proj.weight": [dim, hidden],
        **{f"self_attn.{name}_proj.weight": [dim, dim] for name in "qkvo"},
        **{f"self_attn.{name}_norm.{part}": head for name in "qk" for part in ("weight", "bias")},
    }
    return {
        "model.embed_tokens.weight": [config.text_vocab, dim],
        "model.norm.weight": [dim],
        "lm_head.weight": [config.text_vocab, dim],
        **{f"model.layers.{i}.{name}": shape for i in range(config.n_layer) for name, shape in layer.items()},
    }


def stored_shapes(config: ChameleonConfig) -> dict[str, list[int]]:
    """Names and shapes of the transformer in a backbone folder."""
    codes = [config.vocab_size, config.dim]
    own = {"model.embed_tokens.weight": codes, "lm_head.weight": codes, "null_prompt": [2, config.dim]}
    return published_shapes(config) | own


def draft(config: ChameleonConfig) -> GPTConfig:
    """Sizes of a device model's trunk: a layer of LlamaGen's kind over the image codes, of the same width.

    A device reads pictures alone, and the frame of text tokens is fixed, so it needs nothing of the
    other 57,344 tokens: a prompt comes as rows of the model's table, which are caption features like
    any other's. The layer knows rows and columns of the picture, where Chameleon's knows one line.
    """
    return GPTConfig(
        dim=config.dim,
        n_layer=1,
        n_head=config.n_head,
        vocab_size=config.vocab_size,
        grid=config.grid,
        text_len=config.text_len,
        caption_dim=config.caption_dim,
        text_rotary="identity",
        rope_base=config.rope_base,
        norm_eps=config.norm_eps,
    )


def seeds(model: Chameleon) -> Mapping[str, Tensor]:
    """See :class:`~ciar.models.family.Family`.

    Queries and keys are left out: their scale is that of norms that the trunk does not have.
    """
    own = model.state_dict()
    layer = f"model.layers.{model.config.n_layer - 1}."
    named = {
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "output.weight": "lm_head.weight",
        "norm.weight": "model.norm.weight",
        "layers.0.attention.wv.weight": f"{layer}self_attn.v_proj.weight",
        "layers.0.attention.wo.weight": f"{layer}self_attn.o_proj.weight",
        "layers.0.feed_forward.w1.weight": f"{layer}mlp.gate_proj.weight",
        "layers.0.feed_forward.w3.weight": f"{layer}mlp.up_proj.weight",
        "layers.0.feed_forward.w2.weight": f"{layer}mlp.down_proj.weight",
        "layers.0.attention_norm.weight": f"{layer}input_layernorm.weight",
        "layers.0.ffn_norm.weight": f"{layer}post_attention_layernorm.weight",
    }
    return {name: own[theirs] for name, theirs in named.items()}


CHAMELEON = Family(
    name="chameleon",
    title="Chameleon (Anole)",
    config=ChameleonConfig.from_dict,
    model=Chameleon,
    decoding=InferenceChameleon,
    vq=ChameleonVQ,
    codes=lambda vq: vq.quantize.embedding.weight,
    pixels=to_pixels,
    stored=stored_shapes,
    published=published_shapes,
    draft=draft,
    seeds=seeds,
)
