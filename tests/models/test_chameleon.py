"""Chameleon against transformers' own class at every position: in steps, in blocks, rolled back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_chameleon import (
    CONFIG,
    VOCABULARY,
    chameleon,
    framed,
    next_logits,
    public_model,
    tiny_text,
    transformer_tensors,
    write_tokenizer,
)
from torch import Tensor

from ciar.cloud.engine import CloudEngine
from ciar.decoding.strategy import Pass, Scatter
from ciar.errors import CheckpointError, InputError
from ciar.models.chameleon import (
    Chameleon,
    ChameleonConfig,
    InferenceChameleon,
    cache_argument,
    published_shapes,
    stored_shapes,
)
from ciar.models.checkpoint import shapes_of
from ciar.models.token_text import TokenTextEncoder, check_vocabulary, code_name

WEIGHTS = transformer_tensors()
CODES = [3, 1, 4, 1, 5, 9, 2, 6, 53, 58, 9, 7, 9, 3, 23]
EXACT = {"atol": 1e-5, "rtol": 0.0}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TokenTextEncoder:
    return tiny_text(tmp_path_factory.mktemp("text"), WEIGHTS)


@pytest.fixture(scope="module")
def public() -> Any:
    return public_model(WEIGHTS)


@pytest.fixture(scope="module")
def engine() -> CloudEngine:
    return CloudEngine(chameleon(WEIGHTS))


@pytest.fixture(scope="module")
def conditional(public: Any) -> Tensor:
    return next_logits(public, framed("a red cat"), CODES)


@pytest.fixture(scope="module")
def null(public: Any) -> Tensor:
    return next_logits(public, [0, CONFIG.begin_image], CODES)


def test_names_and_shapes(public: Any) -> None:
    with torch.device("meta"):
        assert shapes_of(Chameleon(CONFIG).state_dict()) == stored_shapes(CONFIG)
    own = {n: s for n, s in shapes_of(public.state_dict()).items() if not n.startswith("model.vqmodel.")}
    assert own == published_shapes(CONFIG)


def test_anole_7b() -> None:
    """The public index lists 419 tensors of the transformer, 14.03 GB in bfloat16."""
    shapes = published_shapes(ChameleonConfig())
    assert len(shapes) == 419
    numbers = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert round(numbers * 2 / 1e9, 2) == 14.03
    with torch.device("meta"):
        assert shapes_of(Chameleon(ChameleonConfig()).state_dict()) == stored_shapes(ChameleonConfig())
    assert ChameleonConfig().tokens == 1024
    with pytest.raises(ValueError, match="more than 4096 positions"):
        ChameleonConfig(text_len=3073)


@pytest.mark.parametrize("blocks", [[1] * 15, [15], [6, 9], [4, 1, 10]], ids=str)
def test_blocks_without_guidance(
    engine: CloudEngine, text: TokenTextEncoder, conditional: Tensor, blocks: list[int]
) -> None:
    features = text.encode("a red cat")
    slot = engine.open(features, None, 1.0, features)
    found, start = [slot.prefill[None]], 0
    for n in blocks:
        found.append(engine.run(slot, Pass(start, CODES[start : start + n])))
        start += n
    torch.testing.assert_close(torch.cat(found), conditional, **EXACT)
    assert slot.cache.rows == 1
    assert slot.token_rows == 1 + len(CODES)


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 7.5])
def test_guidance_counts_positions_by_row(
    engine: CloudEngine, text: TokenTextEncoder, conditional: Tensor, null: Tensor, scale: float
) -> None:
    """The unconditional row is the begin of a picture alone, and its positions count from 0."""
    features = text.encode("a red cat")
    slot = engine.open(features, None, scale, features)
    logits = torch.cat([slot.prefill[None], engine.run(slot, Pass(0, CODES))])
    torch.testing.assert_close(logits, null + scale * (conditional - null), atol=1e-4, rtol=0.0)


@pytest.mark.parametrize(("prompt", "negative"), [("a red cat", "dog"), ("dog", "a red cat"), ("dog", "cat")])
def test_negative_prompt(
    engine: CloudEngine, text: TokenTextEncoder, public: Any, prompt: str, negative: str
) -> None:
    features = text.encode(prompt)
    slot = engine.open(features, text.encode(negative), 3.0, features)
    logits = torch.cat([slot.prefill[None], engine.run(slot, Pass(0, CODES))])
    away = next_logits(public, framed(negative), CODES)
    expected = away + 3.0 * (next_logits(public, framed(prompt), CODES) - away)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0.0)


def test_a_rollback_reads_no_stale_cell(engine: CloudEngine, text: TokenTextEncoder, public: Any) -> None:
    features = text.encode("a red cat")
    slot = engine.open(features, None, 3.0, features)
    engine.run(slot, Pass(0, [*CODES[:5], *[60] * 10]))
    logits = engine.run(slot, Pass(5, CODES[5:], want=3))
    rows = [next_logits(public, prompt, CODES)[-3:] for prompt in (framed("a red cat"), [0, 69])]
    torch.testing.assert_close(logits, rows[1] + 3.0 * (rows[0] - rows[1]), atol=1e-4, rtol=0.0)


def test_positions_that_are_not_consecutive(
    engine: CloudEngine, text: TokenTextEncoder, conditional: Tensor, null: Tensor
) -> None:
    """A scattered pass over all positions with a causal mask is a plain one; a hidden cell has no say."""
    features = text.encode("a red cat")
    slot = engine.open(features, None, 3.0, features)
    causal = torch.ones(15, 16, dtype=torch.bool).tril()
    logits = engine.run_scattered(slot, Scatter(tuple(range(15)), CODES, causal))
    expected = (null + 3.0 * (conditional - null))[1:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0.0)
    visible = torch.ones(1, 16, dtype=torch.bool)
    visible[0, 13:] = False
    visible[0, 9] = True
    again = engine.run_scattered(slot, Scatter((12,), [CODES[12]], visible))
    torch.testing.assert_close(again[0], expected[12], atol=1e-4, rtol=0.0)
    visible[0, 9] = False
    hidden = engine.run_scattered(slot, Scatter((12,), [CODES[12]], visible))
    assert (hidden - again).abs().max() > 1e-2


def test_rows_that_start_at_different_positions(engine: CloudEngine, text: TokenTextEncoder) -> None:
    """What a batch does: two prompts of different lengths, each at its own position, then one of them."""
    model = engine.model
    assert isinstance(model, InferenceChameleon)
    texts = [text.encode("a red cat"), text.encode("dog")]
    prompt = model.read([texts[0]], [texts[1]], True)
    assert prompt.mask is not None
    n = prompt.x.shape[1]
    model.forward(prompt.x, CONFIG.text_len - n, prompt.cache, engine._mask(prompt.mask, n, n))
    x = model.embed_tokens(torch.tensor([CODES[:6]] * 2))
    model.forward(x, CONFIG.text_len, prompt.cache, engine._mask(prompt.mask, 6, n + 6))
    starts, count = torch.tensor([6, 2]), 3
    alone = []
    for one, start in zip(texts, starts.tolist(), strict=True):
        slot = engine.open(one, None, 1.0, one)
        alone.append(engine.run(slot, Pass(0, CODES[: start + count], want=count)))
    x = model.embed_tokens(torch.tensor([CODES[s : s + count] for s in starts.tolist()]))
    own = n + starts[:, None] + torch.arange(count)  # [rows, count] cells that are fed
    seen = F.pad(prompt.mask, (0, 6 + count), value=True)
    allowed = ((torch.arange(n + 6 + count) <= own[:, :, None]) & seen[:, None])[:, None]
    both = model.head(model.forward(x, CONFIG.text_len + starts, prompt.cache, allowed))
    torch.testing.assert_close(both, torch.stack(alone), **EXACT)
    second = prompt.cache.choose(torch.tensor([1]))
    allowed = allowed[1:, :, :, : n + 2 + count]
    one_row = model.forward(x[1:], CONFIG.text_len + starts[1:], second, allowed)
    torch.testing.assert_close(model.head(one_row)[0], alone[1], **EXACT)


def test_both_names_of_the_cache(text: TokenTextEncoder, conditional: Tensor) -> None:
    assert cache_argument(lambda inputs_embeds, cache=None: 0) == "cache"
    assert cache_argument(lambda inputs_embeds, past_key_values=None: 0) == "past_key_values"
    engine = CloudEngine(chameleon(WEIGHTS))
    model: Any = engine.model
    if model._cache_argument == "cache":  # the newer versions still take the older name, and warn
        model._cache_argument = "past_key_values"
        features = text.encode("a red cat")
        with pytest.warns(FutureWarning, match="past_key_values"):
            slot = engine.open(features, None, 1.0, features)
        with pytest.warns(FutureWarning, match="past_key_values"):
            logits = engine.run(slot, Pass(0, CODES))
        torch.testing.assert_close(logits, conditional[1:], **EXACT)


def test_bfloat16_is_close(text: TokenTextEncoder, conditional: Tensor) -> None:
    engine = CloudEngine(chameleon(WEIGHTS).to(torch.bfloat16))
    features = text.encode("a red cat")
    slot = engine.open(features, None, 1.0, features)
    logits = engine.run(slot, Pass(0, CODES))
    assert logits.dtype == torch.float32
    assert (logits - conditional[1:]).abs().mean() < 0.1


# --- prompts ------------------------------------------------------------------------------------


def test_a_prompt_is_framed(text: TokenTextEncoder) -> None:
    ids, warnings = text.ids("a red cat")
    assert (ids, warnings) == (framed("a red cat"), ())
    features = text.encode("a red cat")
    assert torch.equal(features.features[features.mask], WEIGHTS["model.embed_tokens.weight"][ids])
    assert features.mask.tolist() == [False] * 4 + [True] * 12
    assert text.ids("cat")[0] == [0, 75, 73, 92, 70, 69]


@pytest.mark.parametrize(
    ("prompt", "words", "warning"),
    [
        (f"cat{code_name(31)}s", "cats", "1 control tokens"),
        ("<racm3:break>cat<eoss><reserved08706></s>", "cat", "4 control tokens"),
        ("CAT5 dog", " dog", "4 control tokens or unknown characters"),
        ("abcdefghijklmnop", "abcdefghijklm", "16 text tokens and the limit is 13.*'nop'"),
    ],
)
def test_what_is_no_text_and_what_is_too_long(
    text: TokenTextEncoder, prompt: str, words: str, warning: str
) -> None:
    ids, warnings = text.ids(prompt)
    assert ids == framed(words)
    assert len(warnings) == 1
    assert re.search(warning, warnings[0])


@pytest.mark.parametrize("prompt", ["", "  ", "<eoss>", "123", "\ud800"])
def test_prompts_that_are_refused(text: TokenTextEncoder, prompt: str) -> None:
    with pytest.raises(InputError, match="prompt"):
        text.encode(prompt)


def test_names_of_codes() -> None:
    assert [code_name(code) for code in (0, 7, 10, 8191)] == [
        "IMGIMGAZ",
        "IMGIMGHZ",
        "IMGIMGBAZ",
        "IMGIMGIBJBZ",
    ]


def test_other_vocabularies_are_refused(tmp_path: Path) -> None:
    ids = {name: i for i, name in enumerate(VOCABULARY)}
    check_vocabulary(ids, CONFIG, "x")
    with pytest.raises(
        CheckpointError, match="IMGIMGFZ is 10 and should be 9; IMGIMGGZ is 9 and should be 10"
    ):
        check_vocabulary(ids | {code_name(5): 10, code_name(6): 9}, CONFIG, "x")
    with pytest.raises(CheckpointError, match="<s> is 1 and should be 0"):
        check_vocabulary(ids | {"<s>": 1}, CONFIG, "x")
    with pytest.raises(CheckpointError, match=r"IMGIMGAZ is missing.*and 64 more"):
        check_vocabulary({"<s>": 0}, CONFIG, "x")
    table = WEIGHTS["model.embed_tokens.weight"]
    path = write_tokenizer(tmp_path / "a.json", ["<unk>", *VOCABULARY[4:60]])
    with pytest.raises(CheckpointError, match="no tokenizer of Anole: it does not know <s>"):
        TokenTextEncoder(path, table, 16)
    with pytest.raises(CheckpointError, match="knows more tokens than the model, which has 50"):
        TokenTextEncoder(write_tokenizer(tmp_path / "b.json"), table[:50], 16)
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is no tokenizer"):
        TokenTextEncoder(tmp_path / "c.json", table, 16)
    with pytest.raises(CheckpointError, match="does not exist"):
        TokenTextEncoder(tmp_path / "d.json", table, 16)
