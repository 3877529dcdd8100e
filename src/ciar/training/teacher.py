"""The teacher's side of distillation: guided laws of the cloud, cached on disk; drifted prefixes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ciar.decoding.sampling import SamplingLaw, choose, guide, to_law
from ciar.models.device import DeviceModel, DeviceTrunk
from ciar.models.families import for_decoding
from ciar.models.family import CloudModel
from ciar.models.gpt import GPT
from ciar.models.text import rows_of
from ciar.training.caches import Cache
from ciar.training.losses import Target

#: Teacher codes kept a position; the processed law of the emoji backbone has this support.
TEACHER_TOP_K = 128
#: Positions that a model in its decoding form runs at a time.
POSITIONS = 64
#: Features and mask of the captions of some pictures.
FeaturesOf = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass
class TeacherSet:
    """Sequences with the teacher's guided law at each of their positions.

    Attributes:
        codes: int64 [sequences, tokens].
        pictures: int64 [sequences] which caption belongs to each.
        indices: uint16 [sequences, tokens, K] on disk.
        logits: float16 [sequences, tokens, K] guided logits of these codes, relative to the largest.
    """

    codes: Tensor
    pictures: Tensor
    indices: np.ndarray
    logits: np.ndarray

    def target(self, rows: Tensor) -> Target:
        """The teacher at all positions of some sequences, [rows * tokens, K]."""
        where = rows.numpy()
        indices = torch.from_numpy(self.indices[where].astype(np.int64)).flatten(0, 1)
        logits = torch.from_numpy(self.logits[where].astype(np.float32)).flatten(0, 1)
        return Target(indices, logits.log_softmax(-1))

    def __len__(self) -> int:
        return len(self.codes)


@torch.inference_mode()
def guided_logits(
    model: nn.Module | CloudModel, features: Tensor, mask: Tensor, codes: Tensor, scale: float
) -> Tensor:
    """Guided logits of whole sequences, of a model of any family: float32 [rows, tokens, vocab]."""
    if not isinstance(model, GPT):
        parts = guided_parts(for_decoding(model), features, mask, codes, scale)
        return torch.cat([logits for _, logits in parts], dim=1)
    features = features.to(model.tok_embeddings.weight)
    null = model.cls_embedding.uncond_embedding[-features.shape[1] :].to(features)
    both = torch.cat([features, null.expand_as(features)])
    hidden = model.train_hidden(both, mask.repeat(2, 1), codes[:, :-1].repeat(2, 1))
    conditional, unconditional = model.head(hidden).chunk(2)
    return guide(conditional, unconditional, scale)


def guided_parts(
    model: GPT | CloudModel, features: Tensor, mask: Tensor, codes: Tensor, scale: float
) -> Iterator[tuple[int, Tensor]]:
    """Guided logits of whole sequences, some positions at a time.

    A model in its decoding form runs over its cache, so that memory is that of a few positions: for
    weights that fill the machine. One that is as it was trained runs whole sequences.

    Yields:
        First position, and guided logits, float32 [rows, n, vocab].
    """
    if isinstance(model, GPT):
        yield 0, guided_logits(model, features, mask, codes, scale)
        return
    from ciar.decoding.batch import RaggedTrunk

    halves = 1 if scale == 1.0 else 2
    trunk = RaggedTrunk(model, rows_of(features, mask), halves == 2)
    every = torch.arange(halves * len(codes), device=trunk.mask.device)
    for start in range(0, codes.shape[1], POSITIONS):
        end = min(start + POSITIONS, codes.shape[1])
        low = max(start - 1, 0)  # token i is what the law at i + 1 rests on
        parts = [] if start else [trunk.first_hidden[:, None]]
        if end - 1 > low:
            x = model.embed_tokens(codes[:, low : end - 1].to(trunk.mask.device)).repeat(halves, 1, 1)
            parts.append(trunk.feed(every, torch.full_like(every, low), x))
        logits = model.head(torch.cat(parts, dim=1))
        if halves == 2:
            conditional, unconditional = logits.chunk(2)
            logits = guide(conditional, unconditional, scale)
        yield start, logits


@torch.inference_mode()
def build_teacher_set(
    model: GPT | CloudModel,
    codes: Tensor,
    pictures: Tensor,
    features_of: FeaturesOf,
    scale: float,
    out: Path,
    batch: int = 16,
    top_k: int = 0,
    weights: str = "",
) -> TeacherSet:
    """Runs the teacher over sequences and keeps its top codes on disk; goes on where it stopped.

    A cache of other weights, sequences or guidance is made anew.

    Args:
        features_of: function of picture numbers that gives caption features and mask.
        top_k: codes kept a position; 0 is :data:`TEACHER_TOP_K`.
        weights: digest of the teacher's weights, and of the captions where ``pictures`` do not name them;
            "" computes one of the weights, which reads them all.

    Raises:
        DataError: the disk has no room for the cache.
        ValueError: no digest is given of a model in its decoding form.
    """
    count, tokens = codes.shape
    k = min(top_k or TEACHER_TOP_K, model.config.vocab_size)
    shape = (count, tokens, k)
    cache = Cache(
        out,
        "progress.json",
        _cache_key(model, codes, pictures, scale, k, weights),
        {"indices": (np.uint16, shape), "logits": (np.float16, shape)},
        "keep less: fewer pictures with --real or --drifted, or of a folder fewer codes with --teacher-top-k",
    )
    indices, logits = cache.arrays["indices"], cache.arrays["logits"]
    for start in range(cache.done, count, batch):
        part = slice(start, min(start + batch, count))
        features, mask = features_of(pictures[part])
        for first, guided in guided_parts(model, features, mask, codes[part], scale):
            where = slice(first, first + guided.shape[1])
            top = guided.topk(k, dim=-1)
            indices[part, where] = top.indices.cpu().numpy().astype(np.uint16)
            logits[part, where] = (top.values - top.values[..., :1]).cpu().numpy().astype(np.float16)
        cache.filled(part.stop)
    return TeacherSet(codes, pictures, indices, logits)


def _cache_key(
    model: GPT | CloudModel, codes: Tensor, pictures: Tensor, scale: float, top_k: int, weights: str
) -> str:
    """Digest of everything that a cache depends on; of captions what ``pictures`` and ``weights`` say."""
    if not weights and not isinstance(model, GPT):
        raise ValueError("A cache of a model in its decoding form needs the digest of its weights.")
    digest = hashlib.sha256(f"{scale} {top_k} {weights}".encode())
    own = model.state_dict().values() if isinstance(model, GPT) and not weights else ()
    for tensor in (codes, pictures, *own):
        digest.update(tensor.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


@torch.inference_mode()
def drifted_sequences(
    device: DeviceModel,
    features: Tensor,
    mask: Tensor,
    codes: Tensor,
    law: SamplingLaw,
    generator: torch.Generator,
) -> Tensor:
    """Real prefixes of random length, continued by the device model itself: int64 [rows, tokens].

    These are the contexts that the device meets once it runs on its own tokens.
    """
    from ciar.decoding.batch import RaggedTrunk

    rows, total = codes.shape
    codes = codes.to(features.device)
    out = codes.clone()
    cut = torch.randint(0, total, (rows,), generator=generator).to(codes.device)
    trunk = RaggedTrunk(DeviceTrunk(device), rows_of(features, mask))
    every = torch.arange(rows, device=codes.device)
    hidden = trunk.first_hidden
    for position in range(total):
        noise = -torch.empty(rows, device.config.trunk.vocab_size).exponential_(generator=generator).log()
        drawn = choose(to_law(device.head.centre_logits(hidden), law), noise.to(hidden.device))
        out[:, position] = torch.where(position < cut, codes[:, position], drawn)
        x = trunk.model.embed_tokens(out[:, position : position + 1])
        hidden = trunk.feed(every, torch.full_like(every, position), x)[:, 0]
    return out.cpu()
