"""Prompts for models that read text tokens: a prompt to rows of the model's own token table.

To the AR model these rows are caption features like any other's, so they can be made beforehand, and a
device model can read them. The prompt is framed as Anole was trained: begin of text, the words, the
separator behind a user's words, begin of a picture.

Source: Anole, arXiv 2407.06135, https://github.com/GAIR-NLP/anole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ciar.errors import CheckpointError, InputError
from ciar.models.chameleon import BEGIN_TEXT, ChameleonConfig
from ciar.models.checkpoint import read_tensors
from ciar.models.text import TextFeatures, check_prompt, cut_prompt
from ciar.models.text_features import left_padded
from ciar.models.text_kinds import TextConfig

#: Names of the files in a backbone's text folder.
TOKENIZER, TABLE = "tokenizer.json", "table.safetensors"
#: Names of the frame tokens: begin of text, separator, begin and end of a picture.
_BEGIN_TEXT, _SEPARATOR, _BEGIN_IMAGE, _END_IMAGE = "<s>", "<reserved08706>", "<racm3:break>", "<eoss>"
#: What no text is: frame tokens, reserved ones, image codes.
_CONTROL = re.compile(r"<(s|/s|pad|unk|image|eoss|racm3:break|reserved\d+)>|IMGIMG[A-J]+Z")


def code_name(code: int) -> str:
    """The token name of an image code: its decimal digits as letters, A is 0."""
    return "IMGIMG" + "".join(chr(ord("A") + int(digit)) for digit in str(code)) + "Z"


@dataclass(frozen=True)
class Frame:
    """Ids that a prompt is framed with."""

    begin_text: int
    separator: int
    begin_image: int


def open_tokenizer(path: Path) -> Any:
    """A tokenizer file, without padding and without cutting.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    from tokenizers import Tokenizer

    if not path.is_file():
        raise CheckpointError(f"{path} does not exist. It is published beside the weights.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions
        raise CheckpointError(f"{path} is no tokenizer ({error}). Download it again.") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def frame_of(ids: Mapping[str, int], source: object) -> Frame:
    """The frame ids of a vocabulary.

    Raises:
        CheckpointError: it has not all of them, so it is of another family.
    """
    lost = [name for name in (_BEGIN_TEXT, _SEPARATOR, _BEGIN_IMAGE) if name not in ids]
    if lost:
        raise CheckpointError(f"{source} is no tokenizer of Anole: it does not know {', '.join(lost)}.")
    return Frame(ids[_BEGIN_TEXT], ids[_SEPARATOR], ids[_BEGIN_IMAGE])


def check_vocabulary(ids: Mapping[str, int], config: ChameleonConfig, source: object) -> None:
    """Every image code and every frame token must have the id that the model is cut by.

    Args:
        ids: token names to ids.
        config: says which id each should have.
        source: for the message.

    Raises:
        CheckpointError: names up to three that have not.
    """
    expected = {code_name(code): config.first_code + code for code in range(config.vocab_size)}
    expected |= {
        _BEGIN_TEXT: BEGIN_TEXT,
        _SEPARATOR: config.separator,
        _BEGIN_IMAGE: config.begin_image,
        _END_IMAGE: config.end_image,
    }
    wrong = [
        f"{name} is {ids.get(name, 'missing')} and should be {own}"
        for name, own in expected.items()
        if ids.get(name) != own
    ]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"The tokens of {source} are not Anole's: {'; '.join(wrong[:3])}{more}. Use the tokenizer that "
            "is published with the weights."
        )


class TokenTextEncoder:
    """A tokenizer and the AR model's token table as a text encoder.

    Args:
        tokenizer: ``tokenizer.json`` of the Hugging Face layout, or Meta's ``text_tokenizer.json``.
        table: [tokens, dim], memory-mapped or not; rows are read as they are needed.
        text_len: text slots of the AR model, frame tokens included.

    Raises:
        CheckpointError: the tokenizer is missing, damaged, of another family, or larger than the table.
    """

    def __init__(self, tokenizer: Path, table: Tensor, text_len: int) -> None:
        self.text_len, self.caption_dim, self.table = text_len, table.shape[1], table
        self._tokenizer = open_tokenizer(tokenizer)
        #: Token names to ids.
        self.vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        self.frame = frame_of(self.vocabulary, tokenizer)
        if max(self.vocabulary.values()) >= len(table):
            raise CheckpointError(
                f"{tokenizer} knows more tokens than the model, which has {len(table)}. Use both from one "
                "place."
            )
        self._control = {i for name, i in self.vocabulary.items() if _CONTROL.fullmatch(name)}

    def prepare(self, prompt: str) -> str:
        """See :class:`~ciar.models.text.TextEncoder`."""
        return check_prompt(prompt)

    def ids(self, prompt: str) -> tuple[list[int], tuple[str, ...]]:
        """Token ids of a prompt in its frame, and warnings.

        Raises:
            InputError: nothing of the prompt is text.
        """
        prompt, warnings = cut_prompt(check_prompt(prompt))
        found: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        words = [i for i in found if i not in self._control]
        if not words:
            raise InputError(f"Nothing of the prompt {prompt[:60]!r} is text. Describe the picture in words.")
        if len(words) < len(found):
            warnings += (
                f"{len(found) - len(words)} control tokens or unknown characters in the prompt were left "
                "out.",
            )
        room = self.text_len - 3
        if len(words) > room:
            tail = self._tokenizer.decode(words[room:])
            warnings += (
                f"The prompt has {len(words)} text tokens and the limit is {room}; this was left out: "
                f"{tail[:200]!r}.",
            )
        frame = self.frame
        return [frame.begin_text, *words[:room], frame.separator, frame.begin_image], warnings

    def encode(self, prompt: str) -> TextFeatures:
        """Rows of the table for a prompt; one that is too long is cut, with a warning.

        Raises:
            InputError: nothing of the prompt is text.
        """
        ids, warnings = self.ids(prompt)
        return left_padded(self.table[ids], self.text_len, warnings)


def open_token_text(folder: Path, config: TextConfig) -> TokenTextEncoder:
    """The text encoder of a backbone's text folder.

    Raises:
        CheckpointError: a file is missing, damaged, or of another size.
    """
    table = read_tensors(folder / TABLE).get("table")
    if table is None or table.ndim != 2 or table.shape[1] != config.caption_dim:
        raise CheckpointError(f"{folder / TABLE} is not the table of this model. Convert the backbone again.")
    return TokenTextEncoder(folder / TOKENIZER, table, config.text_len)
