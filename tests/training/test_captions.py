"""Captions: what their wording law is, and that the bank's features are those of the text."""

import json
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ciar.errors import DataError
from ciar.models.text import StaticTextEncoder
from ciar.training.captions import (
    CaptionBank,
    Wording,
    caption_text,
    indices_of,
    load_captions,
    plain_caption,
    usable_synonyms,
    worded,
    wording_of,
)
from ciar.training.data.emoji import Icon

WORDS = ["a", "an", "cat", "face", "orange", "kitty", "meow", "cow", "apple", "noto", "flat", "red"]
WORDS += ["fruit", "##s", "'", "-"]


def make_encoder(text_len: int = 6) -> StaticTextEncoder:
    vocabulary = ["[UNK]", *WORDS]
    table = torch.randn(len(vocabulary), 8, generator=torch.Generator().manual_seed(1))
    return StaticTextEncoder(vocabulary, table, text_len)


ICONS = [
    Icon("cat-face", "noto", "train", ("kitty", "meow cat", "cat face")),
    Icon("orange", "flat", "held_pair", ("fruit",)),
    Icon("cow", "noto", "held_name", ()),
    Icon("apples", "flat", "train", ("red fruit", "zzz")),
]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_plain_caption_is_name_and_style():
    assert plain_caption(ICONS[0]) == "cat face noto"
    assert plain_caption(ICONS[0], style=False) == "cat face"


def test_synonym_that_repeats_the_name_is_not_used():
    assert usable_synonyms(ICONS[0]) == ("kitty", "meow cat")


def test_shares_of_the_wordings():
    draws = torch.rand(20_000, 4, generator=generator()).tolist()
    wordings = [wording_of(3, row) for row in draws]
    share = {
        "style": sum(w.style for w in wordings),
        "article": sum(w.article for w in wordings),
        "alone": sum(not w.name for w in wordings),
        "added": sum(w.name and w.synonym is not None for w in wordings),
    }
    expected = {"style": 0.7, "article": 0.15, "alone": 0.1, "added": 0.2}
    for name, count in share.items():
        # Five standard deviations of a share of 20,000.
        assert count / len(wordings) == pytest.approx(expected[name], abs=0.017), name
    which = [w.synonym for w in wordings if w.synonym is not None]
    assert set(which) == {0, 1, 2}
    assert all(1_700 < which.count(i) < 2_300 for i in range(3))


def test_icon_without_synonyms_keeps_its_name():
    texts = {caption_text(ICONS[2], generator(seed)) for seed in range(200)}
    assert texts == {"cow", "cow noto", "a cow", "a cow noto"}


def test_article_fits_the_first_word():
    assert worded(ICONS[1], Wording(article=True, style=False)) == "an orange"
    assert worded(ICONS[1], Wording(name=False, synonym=0, article=True, style=False)) == "a fruit"
    assert worded(ICONS[0], Wording(synonym=0, article=True)) == "a cat face kitty noto"


@given(
    index=st.integers(0, 3),
    draws=st.lists(st.floats(0, 1, exclude_max=True), min_size=4, max_size=4),
)
def test_pieces_are_those_of_the_text(index: int, draws: list[float]):
    encoder = make_encoder(text_len=20)
    bank = CaptionBank(ICONS, encoder)
    wording = wording_of(len(usable_synonyms(ICONS[index])), draws)
    pieces = encoder.pieces(worded(ICONS[index], wording))
    known = [piece for piece in pieces if piece != 0]
    assert bank.pieces(index, wording) == (known or encoder.pieces(ICONS[index].style))


def test_bank_draws_the_captions_that_the_text_does():
    encoder = make_encoder()
    features, mask = CaptionBank(ICONS, encoder).batch([1], generator(5))
    expected = encoder.encode(caption_text(ICONS[1], generator(5)))
    length = int(expected.mask.sum())
    assert mask.tolist() == [[True] * length]
    torch.testing.assert_close(features[0], expected.features[-length:])


def test_batch_is_left_padded_and_cropped_to_its_longest():
    encoder = make_encoder()
    bank = CaptionBank(ICONS, encoder)
    features, mask = bank.fixed(torch.tensor([0, 2]))
    assert features.shape == (2, 3, 8)
    assert features.dtype == torch.float32
    assert mask.tolist() == [[True, True, True], [False, True, True]]
    assert features[1, 0].abs().max() == 0
    torch.testing.assert_close(features[1], encoder.encode("cow noto").features[-3:])
    assert bank.fixed([0, 2], style=False)[1].tolist() == [[True, True], [False, True]]
    torch.testing.assert_close(bank.texts(["cat face noto", "cow noto"])[0], features)


def test_long_caption_is_cut_to_the_text_slots():
    encoder = make_encoder(text_len=2)
    features, mask = CaptionBank(ICONS, encoder).fixed([0])
    assert mask.shape == (1, 2)
    torch.testing.assert_close(features[0], encoder.table[torch.tensor(encoder.pieces("cat face"))])


def test_batch_depends_on_the_generator_alone():
    bank, other = CaptionBank(ICONS, make_encoder()), CaptionBank(ICONS, make_encoder())
    torch.manual_seed(1)
    first, mask = bank.batch([0, 1, 2, 3] * 8, generator(3))
    torch.manual_seed(2)
    bank.batch([0], generator(9))
    second, second_mask = other.batch([0, 1, 2, 3] * 8, generator(3))
    assert torch.equal(first, second)
    assert torch.equal(mask, second_mask)
    changed, changed_mask = bank.batch([0, 1, 2, 3] * 8, generator(4))
    assert mask.shape != changed_mask.shape or not torch.equal(first, changed)


def test_unknown_name_falls_back_to_its_style_and_then_refuses():
    icons = [Icon("qqq", "noto", "train", ()), Icon("qqq", "xxx", "train", ())]
    bank = CaptionBank(icons, make_encoder())
    assert bank.pieces(0, Wording(style=False)) == bank.encoder.pieces("noto")
    with pytest.raises(DataError, match="qqq"):
        bank.pieces(1, Wording())


def test_empty_batch_has_no_rows():
    features, mask = CaptionBank(ICONS, make_encoder()).batch([], generator())
    assert features.shape == (0, 0, 8)
    assert mask.shape == (0, 0)


def test_a_batch_of_64_is_fast():
    bank = CaptionBank(ICONS * 100, make_encoder())
    index = torch.arange(64)
    bank.batch(index, generator())
    times = []
    for seed in range(20):
        start = time.perf_counter()
        bank.batch(index, generator(seed))
        times.append(time.perf_counter() - start)
    assert min(times) < 0.005


def test_captions_are_read_back(tmp_path: Path):
    records = [icon.__dict__ | {"synonyms": list(icon.synonyms)} for icon in ICONS]
    (tmp_path / "captions.json").write_text(json.dumps(records))
    assert load_captions(tmp_path) == ICONS
    assert indices_of(ICONS, "train").tolist() == [0, 3]
    assert indices_of(ICONS, "held_pair", "held_name").tolist() == [1, 2]


@pytest.mark.parametrize("content", [None, "{", "[1]", '[{"name": "cat"}]', '{"a": 1}'])
def test_bad_captions_file_is_refused(tmp_path: Path, content: str | None):
    if content is not None:
        (tmp_path / "captions.json").write_text(content)
    with pytest.raises(DataError, match="ciar train data"):
        load_captions(tmp_path)
