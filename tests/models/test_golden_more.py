"""More reference numbers of the transformer: layers, left padding, sampled runs, bfloat16."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from golden_data import CLOSE, GPT_TINY, SCALE, golden_gpt, left_padded, prompts, tensors
from torch import Tensor

from ciar.cloud.engine import CloudEngine
from ciar.decoding.sampling import SamplingLaw, to_law
from ciar.decoding.strategy import Pass
from ciar.models.checkpoint import build_from
from ciar.models.gpt import GPT, sequence_mask
from ciar.models.inference import InferenceGPT
from ciar.models.text_features import left_padded as own_left_padded

IO, MORE = tensors("llamagen_gpt_tiny_io"), tensors("llamagen_gpt_tiny_more")
TEXT, TOKENS = GPT_TINY.text_len, GPT_TINY.tokens


@pytest.fixture(scope="module")
def model() -> GPT:
    return golden_gpt("llamagen_gpt_tiny", GPT_TINY)


def test_left_padding_of_the_text_encoders_output() -> None:
    """What padding holds of the encoder's output is cut off; valid rows come last."""
    features, mask = left_padded(MORE["in/t5_out"], MORE["in/t5_mask"])
    assert torch.equal(features, IO["in/caption_embs"])
    assert torch.equal(mask, IO["in/emb_masks"].bool())
    for row, valid in enumerate(MORE["in/t5_mask"].sum(dim=1).tolist()):
        text = own_left_padded(MORE["in/t5_out"][row, :valid], TEXT)
        assert torch.equal(text.features, IO["in/caption_embs"][row])
        assert torch.equal(text.mask, IO["in/emb_masks"][row].bool())


def test_every_layer_of_the_prefill(model: GPT) -> None:
    null = model.cls_embedding.uncond_embedding.expand_as(IO["in/caption_embs"])
    x = model.embed_text(torch.cat([IO["in/caption_embs"], null]))
    mask = sequence_mask(IO["in/emb_masks"].bool().repeat(2, 1), TEXT)
    for layer, block in enumerate(model.blocks):
        q, k, v = block.attention.project(block.attention_norm(x), model.table[:TEXT])
        x = block.finish(x, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        torch.testing.assert_close(x, MORE[f"prefill/hidden_after_layer{layer}"], **CLOSE)


def test_uncached_forward_without_padding_mask(model: GPT) -> None:
    everything = torch.ones(2, TEXT, dtype=torch.bool)
    rows = [model.embed_text(IO["in/caption_embs"]), model.embed_tokens(IO["in/tokens"])]
    logits = model.head(model.hidden_of(torch.cat(rows, dim=1), everything))
    torch.testing.assert_close(logits, MORE["full/logits"], **CLOSE)


class Run:
    """One prompt's logits position by position, with guidance and without."""

    def __init__(self, model: GPT, row: int, scale: float) -> None:
        text = prompts(IO["in/caption_embs"], IO["in/emb_masks"])[row]
        self.engine = CloudEngine(model)
        self.slots = {wanted: self.engine.open(text, None, wanted, text) for wanted in {scale, 1.0}}
        self.tokens: list[int] = []

    def logits(self, scale: float) -> Tensor:
        """Of the next position; every slot is fed, so that either can be asked for at any time."""
        if not self.tokens:
            return self.slots[scale].prefill
        start = len(self.tokens) - 1
        fed = {s: self.engine.run(slot, Pass(start, self.tokens[-1:]))[-1] for s, slot in self.slots.items()}
        return fed[scale]


@pytest.mark.parametrize("row", [0, 1])
def test_guidance_on_an_interval(model: GPT, row: int) -> None:
    """Guidance for the first seven tokens, the conditional logits alone for the rest."""
    run = Run(model, row, SCALE)
    for position in range(TOKENS):
        run.tokens.append(int(run.logits(SCALE if position <= 6 else 1.0).argmax()))
    assert run.tokens == MORE["gen/greedy_cfg7.5_interval5"][row].tolist()


def test_sampled_runs(model: GPT) -> None:
    """The reference's own draws, from our laws: top-k 1, and top-k with top-p and a temperature."""
    for name, scale, law in (
        ("gen/topk1_cfg7.5", SCALE, SamplingLaw(top_k=1)),
        ("gen/seed0_topk50_topp0.9_t0.8", 3.0, SamplingLaw(0.8, 50, 0.9)),
    ):
        generator = torch.Generator().manual_seed(0)
        runs = [Run(model, row, scale) for row in range(2)]
        for _ in range(TOKENS):
            laws = torch.stack([to_law(run.logits(scale), law).exp() for run in runs])
            for run, token in zip(runs, torch.multinomial(laws, 1, generator=generator), strict=True):
                run.tokens.append(int(token))
        assert [run.tokens for run in runs] == MORE[name].tolist()


def test_bfloat16_keeps_the_rotary_table_in_float32() -> None:
    weights = tensors("llamagen_gpt_tiny")
    model = build_from(lambda: GPT(GPT_TINY), weights, "golden", torch.bfloat16).eval()
    assert model.table.dtype == torch.float32
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    decoder = InferenceGPT(model.requires_grad_(False))
    null = model.cls_embedding.uncond_embedding.expand(2, -1, -1)
    rows = torch.cat([IO["in/caption_embs"].bfloat16(), null])
    mask = sequence_mask(IO["in/emb_masks"].bool().repeat(2, 1), TEXT)
    hidden = decoder.forward(decoder.embed_text(rows), 0, decoder.new_cache(TEXT, 4), mask)
    torch.testing.assert_close(
        decoder.head(hidden[:, -1]), MORE["bf16/prefill_logits_last"], atol=0.15, rtol=0.0
    )
