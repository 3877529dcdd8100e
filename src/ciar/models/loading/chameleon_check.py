"""Is a Chameleon checkpoint the one that draws, and what part of it is kept?

What could only be inferred of the public files is asserted here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ciar.errors import CheckpointError
from ciar.models.chameleon import ChameleonConfig
from ciar.models.loading.layout import Stored, read
from ciar.models.loading.read import Opened

_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def check_chameleon(opened: Opened, tensors: Mapping[str, Stored], config: ChameleonConfig) -> None:
    """The head must know image codes, and the files beside the weights must describe the same network.

    Args:
        opened: the checkpoint.
        tensors: its transformer, of the right names and shapes.
        config: what it is loaded as.

    Raises:
        CheckpointError: it is a Chameleon that cannot draw, or another network of the same shapes.
    """
    rows = read(tensors[_HEAD])[config.first_code : config.first_code + config.vocab_size].float()
    if not bool(rows.abs().amax(dim=1).gt(0).all()):
        raise CheckpointError(
            f"The image rows of {_HEAD} in {opened.path} are empty, so it cannot draw: it is a Chameleon for "
            "text. Use Anole."
        )
    folder = opened.path if opened.path.is_dir() else opened.path.parent
    for name in ("config.json", "params.json"):
        _check_facts(folder / name, config)


def _check_facts(path: Path, config: ChameleonConfig) -> None:
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        rope = facts.get("rope_parameters") or {}
        facts = facts | {"rope_theta": rope.get("rope_theta", facts.get("rope_theta"))}
    except FileNotFoundError:
        return
    except (ValueError, AttributeError, TypeError):
        raise CheckpointError(f"{path} is damaged. Download it again.") from None
    expected = {
        "swin_norm": False,
        "qk_normalization": True,
        "rms_norm_eps": config.norm_eps,
        "norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "num_attention_heads": config.n_head,
        "n_heads": config.n_head,
        "attention_bias": False,
        "mlp_bias": False,
    }
    for name, own in expected.items():
        found = facts.get(name)
        if found is not None and found != own:
            raise CheckpointError(
                f"{path} says that {name} is {found}, and this model has {own}: the weights are of another "
                "network. Use Anole-7b."
            )


def kept(tensors: Mapping[str, Stored], config: ChameleonConfig) -> dict[str, Stored]:
    """The transformer as it is stored: table and head of the image codes, and the unconditional prompt."""
    codes = slice(config.first_code, config.first_code + config.vocab_size)
    table = table_of(tensors)
    own = {
        _TABLE: table[codes],
        _HEAD: read(tensors[_HEAD])[codes],
        "null_prompt": table[list(config.null_ids)],
    }
    return {**tensors, **own}


def table_of(tensors: Mapping[str, Stored]) -> torch.Tensor:
    """The whole token table, [text_vocab, dim], which embeds prompts."""
    return read(tensors[_TABLE])
