"""Captions of the data set: how they are worded, and their features in batches.

Knows how a caption is made from an icon's name, style and synonyms; knows nothing of pictures or of
what is trained on them. The backbone, the device model and the dual encoder share it, so all three
see captions of one law.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ciar.errors import DataError
from ciar.models.text import StaticTextEncoder
from ciar.training.data.emoji import Icon

#: Chance that a training caption ends with its style word.
STYLE_SHARE = 0.7
#: Chance that a synonym stands alone, and the further chance that one follows the name.
SYNONYM_ALONE_SHARE = 0.1
SYNONYM_ADDED_SHARE = 0.2
#: Chance that a caption begins with "a" or "an".
ARTICLE_SHARE = 0.15

#: Uniform numbers that one caption takes: synonym kind, which synonym, article, style.
_DRAWS = 4

Split = Literal["train", "held_name", "held_pair"]


@dataclass(frozen=True)
class Wording:
    """How one caption is worded.

    Attributes:
        name: whether the icon's name is in it.
        synonym: index of the synonym that stands alone or follows the name; None for none.
        article: whether it begins with "a" or "an".
        style: whether it ends with the style word.
    """

    name: bool = True
    synonym: int | None = None
    article: bool = False
    style: bool = True


def load_captions(data: Path) -> list[Icon]:
    """The icons of a data set, in the order of its pictures.

    Raises:
        DataError: ``captions.json`` is missing or is no list of icons.
    """
    path = data / "captions.json"
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
        return [Icon(r["name"], r["style"], r["split"], tuple(r["synonyms"])) for r in records]
    except FileNotFoundError:
        raise DataError(f"{path} does not exist. Build the data set first: ciar train data.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is no list of captions ({type(error).__name__}: {error}). Build the data set anew: "
            "ciar train data."
        ) from None


def indices_of(icons: Iterable[Icon], *splits: Split) -> Tensor:
    """Indices, int64, of the icons in any of the splits, ascending."""
    return torch.tensor([i for i, icon in enumerate(icons) if icon.split in splits], dtype=torch.int64)


def base_name(icon: Icon) -> str:
    """The icon's name as words."""
    return icon.name.replace("-", " ").strip()


def usable_synonyms(icon: Icon) -> tuple[str, ...]:
    """The icon's synonyms without those that repeat its name."""
    name = base_name(icon)
    return tuple(word for word in icon.synonyms if word.strip() and word.replace("-", " ").strip() != name)


def plain_caption(icon: Icon, style: bool = True) -> str:
    """The caption that held-out evaluation uses: the name, and the style word unless refused."""
    return f"{base_name(icon)} {icon.style}" if style else base_name(icon)


def caption_text(icon: Icon, generator: torch.Generator) -> str:
    """Draws one caption of an icon, as training sees it."""
    draws: list[float] = torch.rand(_DRAWS, generator=generator).tolist()
    return worded(icon, wording_of(len(usable_synonyms(icon)), draws))


def wording_of(synonyms: int, draws: Sequence[float]) -> Wording:
    """The wording that uniform numbers choose.

    Args:
        synonyms: how many usable synonyms the icon has.
        draws: four numbers in [0, 1): kind of synonym, which one, article, style.
    """
    kind, which, article, style = draws
    alone = synonyms > 0 and kind < SYNONYM_ALONE_SHARE
    added = synonyms > 0 and not alone and kind < SYNONYM_ALONE_SHARE + SYNONYM_ADDED_SHARE
    return Wording(
        name=not alone,
        synonym=min(int(which * synonyms), synonyms - 1) if alone or added else None,
        article=article < ARTICLE_SHARE,
        style=style < STYLE_SHARE,
    )


def worded(icon: Icon, wording: Wording) -> str:
    """The text of a wording."""
    words: list[str] = [base_name(icon)] if wording.name else []
    if wording.synonym is not None:
        words.append(usable_synonyms(icon)[wording.synonym])
    if wording.article:
        words.insert(0, article_of(words[0]))
    if wording.style:
        words.append(icon.style)
    return " ".join(words)


def article_of(text: str) -> str:
    """ "an" before a vowel letter, else "a"."""
    return "an" if text[:1].lower() in set("aeiou") else "a"


class CaptionBank:
    """Features of the captions of a data set, in batches.

    Word pieces are found once for each part of a caption (name, synonyms, style, article) and joined;
    no piece spans a space, so the joined pieces are those of the joined text.

    Args:
        icons: the icons that indices refer to.
        encoder: whose word pieces and table are used.
    """

    def __init__(self, icons: Sequence[Icon], encoder: StaticTextEncoder) -> None:
        self.icons = icons
        self.encoder = encoder
        self._of_text: dict[str, list[int]] = {}
        self._parts: dict[int, tuple[list[int], list[list[int]], list[int]]] = {}
        self._articles: dict[int, tuple[list[int], list[list[int]]]] = {}
        self._unknown = encoder.vocabulary.index("[UNK]")

    def __len__(self) -> int:
        return len(self.icons)

    def batch(self, indices: Iterable[int] | Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Features of freshly drawn captions, one for each index.

        Returns:
            features: float32 [batch, text, caption_dim], left-padded with zeros and cropped to the
                longest caption of the batch; the encoder's registers stand at the end of each.
            mask: bool [batch, text], True where there is text.
        """
        numbers = _numbers(indices)
        draws = torch.rand(len(numbers), _DRAWS, generator=generator).tolist()
        rows = []
        for index, row in zip(numbers, draws, strict=True):
            wording = wording_of(len(self._pieces_of(index)[1]), row)
            rows.append(self.pieces(index, wording))
        return self._features(rows)

    def fixed(self, indices: Iterable[int] | Tensor, style: bool = True) -> tuple[Tensor, Tensor]:
        """Features of the plain captions, as :meth:`batch` returns them."""
        wording = Wording(style=style)
        return self._features([self.pieces(index, wording) for index in _numbers(indices)])

    def mixed(self, indices: Iterable[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Features of plain captions, two in three with the style word; the same at every call."""
        return self._features([self.pieces(i, Wording(style=i % 3 != 0)) for i in _numbers(indices)])

    def texts(self, captions: Iterable[str]) -> tuple[Tensor, Tensor]:
        """Features of captions given as text, as :meth:`batch` returns them.

        Raises:
            DataError: a caption has no known word.
        """
        rows = []
        for caption in captions:
            pieces = self._known(caption)
            if not pieces:
                raise DataError(f"No word of the caption {caption!r} is known. Use English words.")
            rows.append(pieces[: self.encoder.room])
        return self._features(rows)

    def pieces(self, index: int, wording: Wording) -> list[int]:
        """Known word-piece ids of one caption, at most the encoder's room.

        Raises:
            DataError: no word of the caption is known.
        """
        name, synonyms, style = self._pieces_of(index)
        out = list(name) if wording.name else []
        if wording.synonym is not None:
            out += synonyms[wording.synonym]
        if wording.article:
            before_name, before_synonyms = self._articles_of(index)
            # Without the name a synonym is what the article stands before.
            out = (before_name if wording.name else before_synonyms[wording.synonym or 0]) + out
        if wording.style:
            out += style
        if not out:
            # A name without a known word (a foreign sign, say) still has its style.
            out = list(style)
        if not out:
            raise DataError(
                f"No word of the caption {worded(self.icons[index], wording)!r} is known to the text "
                "encoder. Rename the icon, or train the text encoder on its vocabulary."
            )
        return out[: self.encoder.room]

    def _pieces_of(self, index: int) -> tuple[list[int], list[list[int]], list[int]]:
        parts = self._parts.get(index)
        if parts is None:
            icon = self.icons[index]
            synonyms = [self._known(word) for word in usable_synonyms(icon)]
            parts = (self._known(base_name(icon)), synonyms, self._known(icon.style))
            self._parts[index] = parts
        return parts

    def _articles_of(self, index: int) -> tuple[list[int], list[list[int]]]:
        articles = self._articles.get(index)
        if articles is None:
            icon = self.icons[index]
            before = [self._known(article_of(word)) for word in usable_synonyms(icon)]
            articles = (self._known(article_of(base_name(icon))), before)
            self._articles[index] = articles
        return articles

    def _known(self, text: str) -> list[int]:
        pieces = self._of_text.get(text)
        if pieces is None:
            pieces = [piece for piece in self.encoder.pieces(text) if piece != self._unknown]
            self._of_text[text] = pieces
        return pieces

    def _features(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        longest = max((len(row) for row in rows), default=0)
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows]).view(len(rows), longest)
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        mask = torch.arange(longest)[None, :] >= (longest - lengths)[:, None]
        table = self.encoder.table
        ids, mask = ids.long().to(table.device), mask.to(table.device)
        features = table[ids] * mask[:, :, None]
        registers = self.encoder.registers.to(table.device)
        features = torch.cat([features, registers.expand(len(rows), -1, -1)], dim=1)
        return features, F.pad(mask, (0, len(registers)), value=True)


def _numbers(indices: Iterable[int] | Tensor) -> list[int]:
    return [int(i) for i in (indices.tolist() if isinstance(indices, Tensor) else indices)]
