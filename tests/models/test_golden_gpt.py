"""The transformer against reference numbers of the public implementation (tests/golden)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from drive import finish_cloud
from golden_data import (
    CLOSE,
    CLOSE_GUIDED,
    GPT_T120,
    GPT_TINY,
    SCALE,
    described,
    golden_gpt,
    left_padded,
    prompts,
    tensors,
)
from torch import Tensor

from ciar.cloud.engine import CloudEngine
from ciar.decoding.sampling import guide
from ciar.decoding.strategy import Pass
from ciar.models.cache import KVCache
from ciar.models.gpt import GPT, GPTConfig, rotary_table, rotate, sequence_mask
from ciar.models.inference import InferenceGPT

IO = tensors("llamagen_gpt_tiny_io")
TEXT, TOKENS = GPT_TINY.text_len, GPT_TINY.tokens


@pytest.fixture(scope="module")
def model() -> GPT:
    return golden_gpt("llamagen_gpt_tiny", GPT_TINY)


@pytest.fixture(scope="module")
def decoder(model: GPT) -> InferenceGPT:
    return InferenceGPT(model)


@pytest.fixture(scope="module")
def text_rows(model: GPT) -> Tensor:
    """Features of [prompt 0, prompt 1, null, null]."""
    null = model.cls_embedding.uncond_embedding.expand_as(IO["in/caption_embs"])
    return torch.cat([IO["in/caption_embs"], null])


MASK = sequence_mask(IO["in/emb_masks"].bool().repeat(2, 1), TEXT + TOKENS)  # [4, 1, 24, 24]


def prefilled(decoder: InferenceGPT, text_rows: Tensor) -> tuple[KVCache, Tensor]:
    """A cache that has read the text, and the hidden states [rows, text, dim]."""
    cache = decoder.new_cache(TEXT, len(text_rows))
    return cache, decoder.forward(decoder.embed_text(text_rows), 0, cache, MASK[:, :, :TEXT, :TEXT])


def fed(decoder: InferenceGPT, cache: KVCache, tokens: Tensor, start: int) -> Tensor:
    """Raw logits [rows, n, vocab] after feeding image tokens [rows, n] at ``start``."""
    first, end = TEXT + start, TEXT + start + tokens.shape[1]
    hidden = decoder.forward(decoder.embed_tokens(tokens), first, cache, MASK[:, :, first:end, :end])
    return decoder.head(hidden)


@pytest.mark.parametrize(
    ("name", "rows", "config"),
    [
        ("rope/grid4_hd16_T8", None, GPT_TINY),
        ("rope/grid16_hd64_T120", None, GPTConfig()),
        ("rope/grid32_hd64_T120_rows", "rope/grid32_rows", GPTConfig(grid=32)),
        (
            "rope/grid24_hd100_T120_rows",
            [120, 145, 400, 695],
            GPTConfig(dim=3200, n_layer=24, n_head=32, grid=24),
        ),
    ],
)
def test_rotary_table(name: str, rows: str | list[int] | None, config: GPTConfig) -> None:
    golden = tensors("llamagen_rope")
    table = rotary_table(config)
    if rows is not None:
        table = table[golden[rows] if isinstance(rows, str) else rows]
    # Powers and sines differ in the last place from one processor to another.
    torch.testing.assert_close(table, golden[name], rtol=0.0, atol=5e-6)


def test_rotation() -> None:
    golden = tensors("llamagen_rope")
    x = golden["apply/x"].transpose(1, 2)  # to [rows, heads, n, head_dim]
    turned = rotate(x, rotary_table(GPT_TINY)).transpose(1, 2)
    torch.testing.assert_close(turned, golden["apply/out"], atol=1e-6, rtol=0.0)
    assert (turned[:, :TEXT] == 0).all()


def test_caption_mlp(model: GPT, text_rows: Tensor) -> None:
    torch.testing.assert_close(model.embed_text(text_rows), IO["cond/cap_proj_out"], **CLOSE)


def test_mask_rule() -> None:
    assert torch.equal(MASK[:, 0], IO["mask/causal_mask"])


def test_prefill(decoder: InferenceGPT, text_rows: Tensor) -> None:
    _, hidden = prefilled(decoder, text_rows)
    torch.testing.assert_close(decoder.head(hidden), IO["prefill/logits"], **CLOSE)


@pytest.mark.parametrize("blocks", [[1] * 15, [6, 9], [15]])
def test_cached_decode_and_cache(decoder: InferenceGPT, text_rows: Tensor, blocks: list[int]) -> None:
    cache, _ = prefilled(decoder, text_rows)
    tokens = IO["in/tokens"].repeat(2, 1)
    logits, start = [], 0
    for count in blocks:
        logits.append(fed(decoder, cache, tokens[:, start : start + count], start))
        start += count
    torch.testing.assert_close(torch.cat(logits, dim=1), IO["decode/logits"], **CLOSE)
    for layer in range(GPT_TINY.n_layer):
        torch.testing.assert_close(cache.cells[layer, 0], IO[f"cache/k{layer}"], **CLOSE)
        torch.testing.assert_close(cache.cells[layer, 1], IO[f"cache/v{layer}"], **CLOSE)
    assert (cache.cells[:, 0, :, :, :TEXT] == 0).all()


def test_cached_decode_without_mask(decoder: InferenceGPT, text_rows: Tensor) -> None:
    cache = decoder.new_cache(TEXT, 2)
    hidden = decoder.forward(decoder.embed_text(text_rows[:2]), 0, cache)
    torch.testing.assert_close(decoder.head(hidden), IO["nomask/prefill_logits"], **CLOSE)
    tokens = IO["in/tokens"]
    logits = [
        decoder.head(decoder.forward(decoder.embed_tokens(tokens[:, i : i + n]), TEXT + i, cache))
        for i, n in ((0, 1), (1, 8), (9, 6))
    ]
    torch.testing.assert_close(torch.cat(logits, dim=1), IO["nomask/decode_logits"], **CLOSE)


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [1, 3]])
def test_rows_at_different_positions(decoder: InferenceGPT, text_rows: Tensor, rows: list[int]) -> None:
    """Rows of one block may start anywhere, and may be some of the cache's rows."""
    cache, _ = prefilled(decoder, text_rows)
    tokens = IO["in/tokens"].repeat(2, 1)
    fed(decoder, cache, tokens[:, :10], 0)
    before = cache.cells.clone()
    starts, n = torch.tensor([3, 0, 7, 10])[rows], 4
    own = TEXT + starts[:, None] + torch.arange(n)
    length = int(own.max()) + 1
    mask = torch.stack([MASK[row, :, cells, :length] for row, cells in zip(rows, own, strict=True)])
    where = list(zip(rows, starts.tolist(), strict=True))
    ids = torch.stack([tokens[row, start : start + n] for row, start in where])
    chosen = cache.choose(torch.tensor(rows))
    logits = decoder.head(decoder.forward(decoder.embed_tokens(ids), TEXT + starts, chosen, mask))
    expected = torch.stack([IO["decode/logits"][row, start : start + n] for row, start in where])
    torch.testing.assert_close(logits, expected, **CLOSE)
    others = [row for row in range(4) if row not in rows]
    assert torch.equal(cache.cells[:, :, others], before[:, :, others])


def test_uncached_forward(model: GPT, text_rows: Tensor) -> None:
    features, mask = IO["in/caption_embs"], IO["in/emb_masks"].bool()
    logits = model.head(model.train_hidden(features, mask, IO["in/tokens"]))
    torch.testing.assert_close(logits, IO["full/logits_masked"][:, TEXT - 1 :], **CLOSE)
    trained = model.head(model.train_hidden(features, mask, IO["in/tokens"][:, :-1]))
    torch.testing.assert_close(trained, IO["train/logits"], **CLOSE)
    loss = F.cross_entropy(trained.flatten(0, 1), IO["in/tokens"].flatten())
    torch.testing.assert_close(loss[None], IO["train/loss"], **CLOSE)


def test_cropped_padding_changes_nothing(model: GPT) -> None:
    """What is padding in the whole batch may be cut off on the left."""
    features, mask = IO["in/caption_embs"], IO["in/emb_masks"].bool()
    for row in range(2):
        valid = int(mask[row].sum())
        cropped = model.train_hidden(
            features[row : row + 1, -valid:], mask[row : row + 1, -valid:], IO["in/tokens"][row : row + 1]
        )
        torch.testing.assert_close(model.head(cropped)[0], IO["full/logits_masked"][row, TEXT - 1 :], **CLOSE)


def test_guidance() -> None:
    logits = torch.cat([IO["prefill/logits"][:, -1:], IO["decode/logits"]], dim=1)
    conditional, unconditional = logits.chunk(2)
    torch.testing.assert_close(guide(conditional, unconditional, SCALE), IO["cfg/logits"], **CLOSE_GUIDED)
    torch.testing.assert_close(guide(conditional, unconditional, 0.0), unconditional, atol=0.0, rtol=0.0)


@pytest.mark.parametrize("chunks", [[1] * 15, [4, 1, 10]])
def test_engine_gives_the_guided_logits(model: GPT, chunks: list[int]) -> None:
    """The engine crops padding, keeps two rows and combines them: same numbers."""
    engine = CloudEngine(model)
    for row, text in enumerate(prompts(IO["in/caption_embs"], IO["in/emb_masks"])):
        slot = engine.open(text, None, SCALE, text)
        torch.testing.assert_close(slot.prefill, IO["cfg/logits"][row, 0], **CLOSE_GUIDED)
        start = 0
        for count in chunks:
            ids = IO["in/tokens"][row, start : start + count].tolist()
            logits = engine.run(slot, Pass(start, ids))
            expected = IO["cfg/logits"][row, start + 1 : start + 1 + count]
            torch.testing.assert_close(logits, expected, **CLOSE_GUIDED)
            start += count


@pytest.mark.parametrize(("scale", "name"), [(7.5, "gen/greedy_cfg7.5"), (1.0, "gen/greedy_cfg1")])
@pytest.mark.parametrize("strategy", ["base", "lossless"])
def test_greedy_generation(model: GPT, scale: float, name: str, strategy: str) -> None:
    for row, text in enumerate(prompts(IO["in/caption_embs"], IO["in/emb_masks"])):
        tokens, slot = finish_cloud(CloudEngine(model), text, strategy, guidance=scale, temperature=0.0)
        assert tokens == IO[name][row].tolist()
        rows = 1 if scale == 1.0 else 2
        assert slot.cache.rows == rows
        if strategy == "base":
            assert (slot.passes, slot.token_rows) == (TOKENS, rows * TOKENS)


def test_greedy_generation_without_padding_mask(model: GPT) -> None:
    everything = torch.ones_like(IO["in/emb_masks"])
    for row, text in enumerate(prompts(IO["in/caption_embs"], everything)):
        tokens, _ = finish_cloud(CloudEngine(model), text, "base", guidance=SCALE, temperature=0.0)
        assert tokens == IO["gen/greedy_cfg7.5_nomask"][row].tolist()


def test_guided_logits_along_the_greedy_path(model: GPT) -> None:
    engine = CloudEngine(model)
    for row, text in enumerate(prompts(IO["in/caption_embs"], IO["in/emb_masks"])):
        slot = engine.open(text, None, SCALE, text)
        path = IO["gen/greedy_cfg7.5"][row].tolist()
        logits = torch.cat([slot.prefill[None], engine.run(slot, Pass(0, path[:-1]))])
        torch.testing.assert_close(logits, IO["gen/greedy_cfg7.5_logits"][row], **CLOSE_GUIDED)


def test_120_text_positions() -> None:
    """The real text length, with prompts of 13 and of 120 valid rows."""
    model, io = golden_gpt("llamagen_gpt_t120", GPT_T120), tensors("llamagen_gpt_t120_io")
    features, mask = left_padded(io["in/t5_out"], io["in/t5_mask"])
    assert mask.sum(dim=1).tolist() == [13, 120]
    conditional, unconditional = io["prefill/logits_last"].chunk(2)
    for row, text in enumerate(prompts(features, mask)):
        engine = CloudEngine(model)
        unguided = engine.open(text, None, 1.0, text)
        torch.testing.assert_close(unguided.prefill, conditional[row], **CLOSE)
        torch.testing.assert_close(engine.open(text, None, 0.0, text).prefill, unconditional[row], **CLOSE)
        slot = engine.open(text, None, SCALE, text)
        path = io["gen/greedy_cfg7.5"][row].tolist()
        logits = torch.cat([slot.prefill[None], engine.run(slot, Pass(0, path[:-1]))])
        torch.testing.assert_close(logits, io["gen/greedy_cfg7.5_logits"][row], **CLOSE_GUIDED)
        assert finish_cloud(engine, text, "base", guidance=SCALE, temperature=0.0)[0] == path


def test_full_size_names_and_shapes() -> None:
    listed = described("full_size_shapes")["llamagen_gpt_xl_t2i"]
    expected: dict[str, list[int]] = {}
    for key, shape in listed["keys"].items():
        for layer in range(listed["n_layer"] if "{i}" in key else 1):
            expected[key.replace("{i}", str(layer))] = shape
    assert len(expected) == listed["n_keys"]
    with torch.device("meta"):
        for grid in (16, 32):
            own = {k: list(v.shape) for k, v in GPT(GPTConfig(grid=grid)).state_dict().items()}
            assert own == expected
