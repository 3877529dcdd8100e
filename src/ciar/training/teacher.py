"""The teacher's side of distillation: guided laws of the cloud, cached on disk; drifted prefixes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ciar.decoding.sampling import SamplingLaw, choose, guide, to_law
from ciar.models.device import DeviceModel
from ciar.models.gpt import GPT
from ciar.training.losses import Target

#: Teacher codes kept a position; the processed law of the emoji backbone has this support.
TEACHER_TOP_K = 128


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
def guided_logits(model: GPT, features: Tensor, mask: Tensor, codes: Tensor, scale: float) -> Tensor:
    """Guided logits of whole sequences: float32 [rows, tokens, vocab]."""
    null = model.cls_embedding.uncond_embedding[-features.shape[1] :].to(features)
    both = torch.cat([features, null.expand_as(features)])
    hidden = model.train_hidden(both, mask.repeat(2, 1), codes[:, :-1].repeat(2, 1))
    conditional, unconditional = model.head(hidden).chunk(2)
    return guide(conditional, unconditional, scale)


@torch.inference_mode()
def build_teacher_set(
    model: GPT,
    codes: Tensor,
    pictures: Tensor,
    features_of: Callable[[Tensor], tuple[Tensor, Tensor]],
    scale: float,
    out: Path,
    batch: int = 16,
) -> TeacherSet:
    """Runs the teacher over sequences and keeps its top codes on disk; goes on where it stopped.

    A cache of other weights, sequences or guidance is made anew.

    Args:
        features_of: function of picture numbers that gives caption features and mask.
    """
    out.mkdir(parents=True, exist_ok=True)
    count, tokens = codes.shape
    k = min(TEACHER_TOP_K, model.config.vocab_size)
    shape = (count, tokens, k)
    progress = out / "progress.json"
    key = _cache_key(model, codes, pictures, scale)
    state = json.loads(progress.read_text()) if progress.exists() else {}
    done = state["done"] if state.get("key") == key else 0
    mode = "r+" if done else "w+"
    indices = np.lib.format.open_memmap(out / "indices.npy", mode, np.uint16, shape)
    logits = np.lib.format.open_memmap(out / "logits.npy", mode, np.float16, shape)
    for start in range(done, count, batch):
        part = slice(start, min(start + batch, count))
        features, mask = features_of(pictures[part])
        guided = guided_logits(model, features, mask, codes[part], scale)
        top = guided.topk(k, dim=-1)
        indices[part] = top.indices.numpy().astype(np.uint16)
        logits[part] = (top.values - top.values[..., :1]).numpy().astype(np.float16)
        progress.write_text(json.dumps({"done": part.stop, "key": key}))
    return TeacherSet(codes, pictures, indices, logits)


def _cache_key(model: GPT, codes: Tensor, pictures: Tensor, scale: float) -> str:
    """Digest of everything that a cache depends on but the captions."""
    digest = hashlib.sha256(f"{scale} {TEACHER_TOP_K} ".encode())
    for tensor in (codes, pictures, *model.state_dict().values()):
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
    out = codes.clone()
    cut = torch.randint(0, total, (rows,), generator=generator)
    trunk = RaggedTrunk(device.trunk, features, mask)
    every = torch.arange(rows)
    hidden = trunk.first_hidden
    for position in range(total):
        noise = -torch.empty(rows, device.config.trunk.vocab_size).exponential_(generator=generator).log()
        drawn = choose(to_law(device.head.centre_logits(hidden), law), noise)
        out[:, position] = torch.where(position < cut, codes[:, position], drawn)
        x = trunk.model.embed_tokens(out[:, position : position + 1])
        hidden = trunk.feed(every, torch.full((rows,), position), x)[:, 0]
    return out
