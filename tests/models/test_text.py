"""The text encoder: cleaning, left padding, cuts with warnings, and that saving loses little."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import WORDS, tiny_text

from ciar.errors import CheckpointError, InputError
from ciar.models.text import MAX_PROMPT_CHARS, StaticTextEncoder, clean_prompt


@pytest.mark.parametrize(
    ("prompt", "clean"),
    [
        ("  a   cat\t\n", "a cat"),
        ("a\x00cat\x1b", "a cat"),
        ("\U0001f431", "cat face"),
        ("\u2764\ufe0f dog", "heavy black heart dog"),
        ("\u05d7\u05ea\u05d5\u05dc", "\u05d7\u05ea\u05d5\u05dc"),
        ("\u202ecat\u202c", "cat"),
    ],
)
def test_cleaning(prompt: str, clean: str) -> None:
    assert clean_prompt(prompt) == clean


@pytest.mark.parametrize("prompt", ["", " ", "\x00\x01", "\u200b\u200e"])
def test_empty_prompts_are_refused(prompt: str) -> None:
    with pytest.raises(InputError, match="prompt is empty"):
        clean_prompt(prompt)


def test_half_a_character_is_refused() -> None:
    with pytest.raises(InputError, match="lone surrogate"):
        clean_prompt("cat\ud800")


def test_no_text_is_refused() -> None:
    with pytest.raises(InputError, match="text, not int"):
        clean_prompt(5)  # type: ignore[arg-type]


@given(st.text())
def test_any_text_is_cleaned_or_refused(prompt: str) -> None:
    try:
        clean = clean_prompt(prompt)
    except InputError:
        return
    assert clean == " ".join(clean.split())
    assert clean_prompt(clean) == clean


def test_features_are_the_rows_of_the_table() -> None:
    encoder = tiny_text()
    text = encoder.encode("A Smiling cats")
    ids = [WORDS.index(w) for w in ("a", "smiling", "cat", "##s")]
    assert text.mask.tolist() == [False] * 4 + [True] * 4
    assert torch.equal(text.features[-4:], encoder.table[torch.tensor(ids)])
    assert (text.features[:4] == 0).all()
    assert text.warnings == ()


def test_unknown_words_are_named_or_refused() -> None:
    encoder = tiny_text()
    text = encoder.encode("zebra cat zebra")
    assert text.warnings == ("2 words of the prompt are unknown and were left out.",)
    assert int(text.mask.sum()) == 1
    with pytest.raises(InputError, match="'zebra'"):
        encoder.encode("zebra")


def test_a_long_prompt_is_cut_with_a_warning() -> None:
    text = tiny_text().encode("a red car with a smiling dog with sunglasses")
    assert text.mask.all()
    (warning,) = text.warnings
    assert "has 9 word pieces and the limit is 8" in warning
    assert "sunglasses" in warning
    huge = tiny_text().encode("cat " * 3000)
    assert f"first {MAX_PROMPT_CHARS} characters" in huge.warnings[0]
    assert "the limit is 8" in huge.warnings[1]


def with_registers(count: int) -> StaticTextEncoder:
    text = tiny_text()
    rows = torch.randn(count, text.caption_dim, generator=torch.Generator().manual_seed(3)).half().float()
    return StaticTextEncoder(text.vocabulary, text.table, text.text_len, rows)


@pytest.mark.parametrize("count", [8, 9])
def test_registers_that_leave_no_room_are_refused(tmp_path: Path, count: int) -> None:
    with pytest.raises(
        InputError, match=f"no room for a caption beside {count} registers. Use {count + 1} slots"
    ):
        with_registers(count)
    with_registers(7).save(tmp_path)
    (tmp_path / "text.json").write_text('{"kind": "static", "text_len": 7}')
    with pytest.raises(CheckpointError, match="no room for a caption"):
        StaticTextEncoder.load(tmp_path)


def test_registers_stand_after_every_caption_and_take_room_from_it(tmp_path: Path) -> None:
    encoder = with_registers(3)
    text = encoder.encode("red cat")
    assert text.mask.tolist() == [False] * 3 + [True] * 5
    assert torch.equal(text.features[-3:], encoder.registers)
    assert torch.equal(text.features[-5:-3], encoder.table[[WORDS.index("red"), WORDS.index("cat")]])
    assert "the limit is 5" in encoder.encode("a red car with a smiling dog").warnings[0]
    encoder.save(tmp_path)
    assert torch.equal(StaticTextEncoder.load(tmp_path).registers, encoder.registers)


@pytest.mark.parametrize("shape", [(3, 15), (3,), (8, 16), (0, 0)])
def test_registers_that_do_not_fit_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Of another width than the table, or so many that no slot is left for a caption."""
    encoder = with_registers(3)
    assert (encoder.caption_dim, encoder.text_len) == (16, 8)
    encoder.save(tmp_path)
    tensors = load_file(tmp_path / "text.safetensors")
    save_file(tensors | {"registers": torch.zeros(shape)}, tmp_path / "text.safetensors")
    with pytest.raises(CheckpointError, match="damaged"):
        StaticTextEncoder.load(tmp_path)


def test_what_only_reads_captions_sees_no_registers() -> None:
    bare = with_registers(3).without_registers()
    assert bare.text_len == bare.room == 5
    assert int(bare.encode("red cat").mask.sum()) == 2


def test_saved_and_read_back(tmp_path: Path) -> None:
    encoder = tiny_text()
    encoder.save(tmp_path)
    other = StaticTextEncoder.load(tmp_path)
    assert (other.vocabulary, other.text_len) == (encoder.vocabulary, encoder.text_len)
    # Half a step of int8, and float16's rounding of the scale.
    bound = encoder.table.abs().amax(dim=1, keepdim=True) * (0.5 / 127 + 2**-11 + 1e-6)
    assert ((other.table - encoder.table).abs() <= bound).all()
