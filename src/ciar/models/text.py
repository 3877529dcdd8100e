"""Text encoders: a prompt to caption features for the AR model's text slots.

The embedded encoder is a table of word-piece vectors, distilled from a sentence model, so it knows
tens of thousands of words that no caption contains. Others are in ``models.t5`` (FLAN-T5) and
``models.text_features`` (features made beforehand). Knows nothing of the AR model.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ciar.errors import CheckpointError, InputError

#: Longest prompt, in characters, that is looked at; what lies beyond is cut with a warning.
MAX_PROMPT_CHARS = 2000


@dataclass(frozen=True)
class TextFeatures:
    """Caption features, left-padded.

    Attributes:
        features: float32 [text_len, caption_dim]; rows of padding are zero.
        mask: bool [text_len]; True where there is text.
        warnings: sentences about what was cut or replaced.
    """

    features: Tensor
    mask: Tensor
    warnings: tuple[str, ...] = ()


def rows_of(features: Tensor, mask: Tensor) -> list[TextFeatures]:
    """Features [rows, text, caption_dim] and mask [rows, text] of several prompts, one by one."""
    return [TextFeatures(*row) for row in zip(features, mask, strict=True)]


def side_by_side(texts: Sequence[TextFeatures]) -> tuple[Tensor, Tensor]:
    """Features of several prompts, cropped to the longest.

    Returns:
        features: float32 [prompts, text, caption_dim], left-padded.
        mask: bool [prompts, text].
    """
    longest = max(int(text.mask.sum()) for text in texts)
    return (
        torch.stack([text.features[-longest:].float() for text in texts]),
        torch.stack([text.mask[-longest:] for text in texts]),
    )


class TextEncoder(Protocol):
    """What a pipeline needs of a text encoder."""

    text_len: int
    caption_dim: int

    def prepare(self, prompt: str) -> str:
        """What travels of a prompt: the other side's encoder makes the same features of it.

        Raises:
            InputError: the prompt is not usable, whatever the encoder knows.
        """
        ...

    def encode(self, prompt: str) -> TextFeatures:
        """Caption features of one prompt.

        Raises:
            InputError: nothing can be made of the prompt.
        """
        ...


def check_prompt(prompt: str) -> str:
    """The prompt without white space around it.

    Raises:
        InputError: the prompt is no text, no valid Unicode, or empty.
    """
    if not isinstance(prompt, str):
        raise InputError(f"A prompt is text, not {type(prompt).__name__}. Pass a string.")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"The prompt holds half a character (a lone surrogate) at {error.start}. Type it again."
        ) from None
    bare = prompt.strip()
    if not bare:
        raise InputError('The prompt is empty. Say what to draw, for example "a smiling cat".')
    return bare


def cut_prompt(prompt: str) -> tuple[str, tuple[str, ...]]:
    """As much of a prompt as is looked at, and a warning when that is not all."""
    if len(prompt) <= MAX_PROMPT_CHARS:
        return prompt, ()
    return prompt[:MAX_PROMPT_CHARS], (f"The prompt was cut to its first {MAX_PROMPT_CHARS} characters.",)


def clean_prompt(prompt: str) -> str:
    """Makes a prompt safe to tokenize: spells symbols out, drops control characters, folds space.

    An emoji becomes its Unicode name, so that "🐱" asks for a cat face.

    Raises:
        InputError: the prompt is no text, no valid Unicode, empty, or nothing but white space.
    """
    prompt = check_prompt(prompt)
    out: list[str] = []
    for char in prompt:
        category = unicodedata.category(char)
        if category in ("So", "Sk") or 0x1F000 <= ord(char) <= 0x1FAFF:
            out.append(f" {unicodedata.name(char, '').lower()} ")
        elif category.startswith("C") or 0xFE00 <= ord(char) <= 0xFE0F:
            out.append(" ")
        else:
            out.append(char)
    cleaned = " ".join("".join(out).split())
    if not cleaned:
        raise InputError('The prompt is empty. Say what to draw, for example "a smiling cat".')
    return cleaned


class StaticTextEncoder:
    """One row of a word-piece table for each word piece of the prompt.

    Args:
        vocabulary: word pieces in the order of the table's rows.
        table: float32 [pieces, caption_dim].
        text_len: text slots of the AR model.
        registers: float32 [registers, caption_dim], rows that stand after every caption: room in which
            the AR model works out what the caption asks for, before it draws. None for none.

    Raises:
        InputError: the registers leave no text slot for a caption.
    """

    def __init__(
        self, vocabulary: list[str], table: Tensor, text_len: int, registers: Tensor | None = None
    ) -> None:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

        self.text_len = text_len
        self.registers = table.new_zeros(0, table.shape[1]) if registers is None else registers
        if self.room < 1:
            raise InputError(
                f"{text_len} text slots leave no room for a caption beside {len(self.registers)} registers. "
                f"Use {len(self.registers) + 1} slots or more."
            )
        self.caption_dim = table.shape[1]
        self.table = table
        self.vocabulary = vocabulary
        ids = {piece: i for i, piece in enumerate(vocabulary)}
        self._unknown = ids["[UNK]"]
        self._tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
        self._tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    @property
    def room(self) -> int:
        """Most word pieces of a caption."""
        return self.text_len - len(self.registers)

    def without_registers(self) -> StaticTextEncoder:
        """The same encoder for what reads captions and draws nothing."""
        return StaticTextEncoder(self.vocabulary, self.table, self.room)

    def pieces(self, prompt: str) -> list[int]:
        """Word-piece ids of a cleaned prompt."""
        return self._tokenizer.encode(prompt, add_special_tokens=False).ids

    def prepare(self, prompt: str) -> str:
        """See :class:`TextEncoder`."""
        return clean_prompt(prompt)

    def encode(self, prompt: str) -> TextFeatures:
        """Caption features of one prompt.

        A prompt longer than :attr:`room` word pieces is cut, with a warning that names the limit.

        Raises:
            InputError: the prompt is empty, or none of its words is known.
        """
        prompt, cut = cut_prompt(clean_prompt(prompt))
        warnings = list(cut)
        ids = self.pieces(prompt)
        known = [i for i in ids if i != self._unknown]
        if not known:
            raise InputError(
                f"No word of the prompt {prompt[:60]!r} is known to the text encoder, which reads "
                "English. Describe the picture in English words."
            )
        if len(known) < len(ids):
            warnings.append(f"{len(ids) - len(known)} words of the prompt are unknown and were left out.")
        if len(known) > self.room:
            tail = self._tokenizer.decode(known[self.room :])
            warnings.append(
                f"The prompt has {len(known)} word pieces and the limit is {self.room}; "
                f"this was left out: {tail[:200]!r}."
            )
            known = known[: self.room]
        return self.from_pieces(known, tuple(warnings))

    def from_pieces(self, ids: list[int], warnings: tuple[str, ...] = ()) -> TextFeatures:
        """Left-padded features of at most :attr:`room` word pieces, and the registers."""
        features = torch.zeros(self.text_len, self.caption_dim)
        mask = torch.zeros(self.text_len, dtype=torch.bool)
        rows = torch.cat([self.table[torch.tensor(ids, dtype=torch.int64)], self.registers])
        if len(rows):
            features[-len(rows) :] = rows
            mask[-len(rows) :] = True
        return TextFeatures(features, mask, warnings)

    def save(self, folder: Path) -> None:
        """Writes ``vocabulary.txt``, an int8 table with one scale a row, and the registers in float16."""
        from safetensors.torch import save_file

        scale = self.table.abs().amax(dim=1).clamp_min(1e-8) / 127.0
        tensors = {"table": (self.table / scale[:, None]).round().to(torch.int8), "scale": scale.half()}
        if len(self.registers):
            tensors["registers"] = self.registers.half()
        save_file(tensors, folder / "text.safetensors")
        (folder / "vocabulary.txt").write_text("\n".join(self.vocabulary), encoding="utf-8")
        (folder / "text.json").write_text(json.dumps({"kind": "static", "text_len": self.text_len}) + "\n")

    @classmethod
    def load(cls, folder: Path) -> StaticTextEncoder:
        """Reads what :meth:`save` wrote.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        from ciar.models.checkpoint import read_tensors

        tensors = read_tensors(folder / "text.safetensors")
        try:
            settings: dict[str, Any] = json.loads((folder / "text.json").read_text())
            table = tensors["table"].float() * tensors["scale"].float()[:, None]
            vocabulary = (folder / "vocabulary.txt").read_text(encoding="utf-8").split("\n")
            registers = tensors["registers"].float() if "registers" in tensors else None
            if registers is not None and registers.shape[1:] != table.shape[1:]:
                raise ValueError(f"registers {tuple(registers.shape)}, table {tuple(table.shape)}")
            return cls(vocabulary, table, settings["text_len"], registers)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"The text encoder in {folder} is incomplete or damaged ({error}). Restore its files."
            ) from None
