"""Files of ``torch.save``: an allow-listed, weights-only read, never full unpickling.

Trainers wrap the weights in a dict with the optimizer and an ``argparse.Namespace``; the Namespace
is the one class that is allowed beside tensors and plain values.
"""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ciar.errors import CheckpointError
from ciar.models.loading.sniff import Container

#: Where the weights are, in this order; the samplers of LlamaGen prefer ``model`` to ``ema`` too.
WRAPPERS = ("model", "module", "state_dict", "ema")


@dataclass(frozen=True)
class Unwrapped:
    """The weights of a file, and what lay around them.

    Attributes:
        tensors: under the names that the file uses.
        wrapper: the key that they were under; "" for a bare dict.
        beside: the other keys of the outer dict.
        arguments: the trainer's arguments, where it kept them.
    """

    tensors: dict[str, Tensor]
    wrapper: str
    beside: tuple[str, ...]
    arguments: dict[str, Any]


def read_torch(path: Path, container: Container) -> Unwrapped:
    """Reads a ``.pt`` file; a zip archive is memory-mapped, so nothing is copied yet.

    Raises:
        CheckpointError: the file is damaged, holds objects other than tensors and plain values, or
            holds no dict of tensors.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", mmap=container == "torch", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        held = f" ({named[1]})" if named else ""
        raise CheckpointError(
            f"{path} holds objects beside tensors{held}, or is damaged. ciar does not unpickle code: save "
            "the bare weights again with torch.save(model.state_dict(), file)."
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
        words = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(f"{path} is damaged ({words}). Download or copy it again.") from None
    return unwrap(content, path)


def unwrap(content: Any, path: Path) -> Unwrapped:
    """Finds the weights in what a file held.

    Raises:
        CheckpointError: there is no dict of tensors in it.
    """
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a dict of weights.")
    arguments = content.get("args")
    facts = dict(vars(arguments)) if isinstance(arguments, argparse.Namespace) else {}
    for wrapper in WRAPPERS:
        inner = content.get(wrapper)
        if isinstance(inner, Mapping) and inner:
            beside = tuple(sorted(str(key) for key in content if key != wrapper))
            return Unwrapped(_only_tensors(inner, path), wrapper, beside, facts)
    return Unwrapped(_only_tensors(content, path), "", (), facts)


def _only_tensors(values: Mapping[Any, Any], path: Path) -> dict[str, Tensor]:
    others = [str(key) for key, value in values.items() if not isinstance(value, Tensor)]
    if others or not values:
        held = f"it holds {', '.join(others[:10])}" if others else "it holds nothing"
        raise CheckpointError(f"{path} is no dict of weights, bare or under {', '.join(WRAPPERS)}: {held}.")
    return {str(key): value for key, value in values.items()}
