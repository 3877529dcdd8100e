"""Caption features by FLAN-T5, as LlamaGen's transformers were trained with.

The encoder runs once a prompt; its output is kept by the caption's digest. It runs in bfloat16 or
float32: in float16 its feed-forward layers overflow. Knows nothing of the AR model.

Source: LlamaGen, arXiv 2406.06525, section 2.2; FLAN-T5, arXiv 2210.11416.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ciar.errors import CheckpointError, InputError, NumericalError
from ciar.models.captions import clean_caption
from ciar.models.checkpoint import build_from, check_fit, read_tensors, shapes_of
from ciar.models.loading.layout import Part, quantised, read, understand
from ciar.models.loading.read import open_folder
from ciar.models.loading.write import write_tensors
from ciar.models.text import TextFeatures, check_prompt, cut_prompt
from ciar.models.text_features import left_padded

#: What the encoder may run in.
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
#: Prompts whose features stay in memory; each takes up to 1 MB with FLAN-T5-XL.
KEPT_PROMPTS = 64
#: The module knows its embeddings, ``shared.weight``, by a second name.
_SECOND_NAME = "encoder.embed_tokens.weight"
_NEEDS = "Reading prompts for LlamaGen needs transformers. Run: pip install 'ciar[t5]'"


def dtype_of(name: str) -> torch.dtype:
    """The type that an encoder runs in.

    Raises:
        InputError: it is neither ``bfloat16`` nor ``float32``.
    """
    if name not in DTYPES:
        raise InputError(
            f"The text encoder cannot run in {name}: float16 overflows in its feed-forward layers. Use "
            "bfloat16 or float32."
        )
    return DTYPES[name]


def read_config(folder: Path) -> dict[str, Any]:
    """The ``config.json`` of a T5 folder.

    Raises:
        CheckpointError: it is missing, damaged, or of another family.
    """
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kind = config.get("model_type")
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no config.json, so it is no T5 folder.") from None
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}). Download it again.") from None
    if kind != "t5":
        raise CheckpointError(f"{folder} holds a model of type {kind!r}, not t5. Use google/flan-t5-xl.")
    return config


def open_encoder(folder: Path) -> Part:
    """The encoder half of a T5 folder: checked, memory-mapped, nothing built.

    Raises:
        CheckpointError: a file is missing or damaged, the weights are quantised, or do not fit the
            config.
        InputError: transformers is not installed.
    """
    part = understand(open_folder(folder).tensors)
    if part.kind != "t5":
        raise CheckpointError(f"The weights in {folder} are no T5 text encoder. Use google/flan-t5-xl.")
    name = quantised(part.tensors)
    if name:
        raise CheckpointError(f"The text encoder in {folder} is quantised ({name}). Use the original files.")
    config = read_config(folder)
    with torch.device("meta"):
        own = shapes_of(_module(config).state_dict())
    del own[_SECOND_NAME]
    found = {name: list(value.shape) for name, value in part.tensors.items()}
    check_fit(own, found, folder, "Download the folder again.")
    return part


class T5TextEncoder:
    """A local FLAN-T5 folder as a text encoder.

    Args:
        folder: ``config.json``, ``tokenizer.json`` and the weights, in one file or in shards; a
            decoder beside the encoder is not read.
        text_len: text slots of the AR model.
        dtype: ``bfloat16`` (as LlamaGen's own sampler) or ``float32``.
        device: where the encoder runs.
        cache: a folder in which features are kept for the next process; None keeps them in memory
            alone.
        caption_dim: width that the AR model expects; None takes the encoder's.
        identity: digest of the weights, part of the name of what is kept.

    Raises:
        CheckpointError: a file is missing, damaged, or does not fit.
        InputError: the type is not usable.
    """

    def __init__(
        self,
        folder: Path,
        text_len: int = 120,
        dtype: str = "bfloat16",
        device: torch.device | str = "cpu",
        cache: Path | None = None,
        caption_dim: int | None = None,
        identity: str = "",
    ) -> None:
        self.folder, self.text_len, self.dtype = folder, text_len, dtype_of(dtype)
        self.device, self.cache, self.identity = torch.device(device), cache, identity
        self.config = read_config(folder)
        self.caption_dim = int(self.config["d_model"])
        if caption_dim not in (None, self.caption_dim):
            raise CheckpointError(
                f"{folder} is the wrong text encoder: its features are {self.caption_dim} wide and the model "
                f"reads {caption_dim}. LlamaGen needs google/flan-t5-xl (2048)."
            )
        self._tokenizer, self._end = _open_tokenizer(folder, self.config)
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self, prompt: str) -> str:
        """See :class:`~ciar.models.text.TextEncoder`. Cleaning is left to the encoder."""
        return check_prompt(prompt)

    def ids(self, prompt: str) -> tuple[list[int], str, tuple[str, ...]]:
        """Token ids of a prompt, the end token included; the cleaned caption; what was cut.

        Raises:
            InputError: nothing is left of the prompt after cleaning.
        """
        prompt, warnings = cut_prompt(check_prompt(prompt))
        caption = clean_caption(prompt)
        if not caption:
            raise InputError(
                f"Nothing is left of the prompt {prompt[:60]!r} once links, file names and numbers are taken "
                "out. Describe the picture in words."
            )
        ids: list[int] = self._tokenizer.encode(caption).ids
        if len(ids) > self.text_len:
            tail = self._tokenizer.decode(ids[self.text_len - 1 : -1])
            warnings += (
                f"The prompt has {len(ids)} text tokens and the limit is {self.text_len}; this was left out: "
                f"{tail[:200]!r}.",
            )
            ids = [*ids[: self.text_len - 1], self._end]
        return ids, caption, warnings

    def encode(self, prompt: str) -> TextFeatures:
        """Caption features of one prompt; a prompt that is too long is cut, with a warning.

        Raises:
            InputError: nothing is left of the prompt after cleaning, or a package is missing.
            NumericalError: the encoder's output is not finite.
        """
        ids, caption, warnings = self.ids(prompt)
        words = f"{self.identity} {self.dtype} {self.text_len} {caption}"
        key = hashlib.sha256(words.encode()).hexdigest()
        with self._lock:
            rows = self._kept.get(key)
            if rows is None:
                rows = self._from_disk(key, len(ids))
            if rows is None:
                rows = self._run(ids)
                self._to_disk(key, rows)
            self._kept[key] = rows
            self._kept.move_to_end(key)
            if len(self._kept) > KEPT_PROMPTS:
                self._kept.popitem(last=False)
        return left_padded(rows, self.text_len, warnings)

    @torch.inference_mode()
    def _run(self, ids: list[int]) -> Tensor:
        # Only the real tokens: padding is masked in the encoder and cut off behind it.
        tokens = torch.tensor([ids], device=self.device)
        out = self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state[0]
        if not bool(out.isfinite().all()):
            raise NumericalError(f"The text encoder in {self.folder} gave features that are not finite.")
        return out.cpu().clone()

    @cached_property
    def model(self) -> nn.Module:
        """The encoder; memory-mapped where the file holds the type that it runs in."""
        tensors = {name: read(value) for name, value in open_encoder(self.folder).tensors.items()}
        tensors[_SECOND_NAME] = tensors["shared.weight"]
        model = build_from(lambda: _module(self.config), tensors, self.folder, self.dtype)
        return model.to(self.device).eval().requires_grad_(False)

    def _from_disk(self, key: str, count: int) -> Tensor | None:
        if self.cache is None or not (self.cache / f"{key}.safetensors").is_file():
            return None
        with contextlib.suppress(CheckpointError):  # what is damaged is made again
            rows = read_tensors(self.cache / f"{key}.safetensors").get("rows")
            if rows is not None and list(rows.shape) == [count, self.caption_dim]:
                return rows
        return None

    def _to_disk(self, key: str, rows: Tensor) -> None:
        if self.cache is None:
            return
        self.cache.mkdir(parents=True, exist_ok=True)
        # Two processes may make the same features: each renames a whole file of its own into place.
        own = self.cache / f"{key}.{os.getpid()}"
        write_tensors(own, {"rows": rows}, rows.dtype)
        own.replace(self.cache / f"{key}.safetensors")


def _open_tokenizer(folder: Path, config: dict[str, Any]) -> tuple[Any, int]:
    """The tokenizer and the id of its end token, checked against the model's config."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no tokenizer.json. Download it beside the weights; spiece.model is not read."
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions
        raise CheckpointError(f"{path} is damaged ({error}). Download it again.") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    end = tokenizer.token_to_id("</s>")
    if end is None or end != config.get("eos_token_id", 1) or tokenizer.encode("a").ids[-1:] != [end]:
        raise CheckpointError(f"{path} does not end texts with </s> as T5's does. Use google/flan-t5-xl.")
    if tokenizer.get_vocab_size() > config["vocab_size"]:
        raise CheckpointError(f"{path} knows more tokens than the encoder. Use both from one folder.")
    return tokenizer, end


def _module(config: dict[str, Any]) -> nn.Module:
    try:
        from transformers import T5Config, T5EncoderModel
    except ImportError:
        raise InputError(_NEEDS) from None
    return T5EncoderModel(T5Config.from_dict(config))
