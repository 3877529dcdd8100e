"""Caption cleaning against the reference's own results (golden), and what must hold for any text."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
from golden_data import described
from hypothesis import given
from hypothesis import strategies as st

from ciar.errors import InputError
from ciar.models.captions import clean_caption

PAIRS = described("text_cleaning")["pairs"]


@pytest.mark.parametrize(("text", "cleaned"), PAIRS)
def test_reference_pairs(text: str, cleaned: str) -> None:
    assert clean_caption(text) == cleaned


def test_the_second_pass_matters() -> None:
    assert [text for text, cleaned in PAIRS if clean_caption(text, passes=1) != cleaned]


@given(st.text(max_size=80))
def test_any_text_is_cleaned(text: str) -> None:
    cleaned = clean_caption(text)
    assert cleaned == cleaned.strip()
    assert "\n" not in cleaned


@pytest.mark.parametrize("text", ["http://x", "photo.png", "<![if", "<", "&#xfffffff;", "%zz", "a/b.html"])
def test_markup_and_names_of_files_neither_fail_nor_warn(text: str) -> None:
    assert isinstance(clean_caption(text), str)


@pytest.mark.parametrize("package", ["bs4", "ftfy"])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == package:
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"pip install 'ciar\[t5\]'"):
        clean_caption("a cat")
