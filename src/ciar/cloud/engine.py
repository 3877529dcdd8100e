"""Runs the cloud model: prefill, passes over windows, guidance. Knows nothing of strategies.

A pass over one session runs exactly the same kernels whoever else is connected, so a session's
tokens never depend on its neighbours.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ciar.decoding.drafter import Drafter
from ciar.decoding.eagle import EagleDrafter
from ciar.decoding.rows import scattered_mask
from ciar.decoding.sampling import guide_rows
from ciar.decoding.strategy import Pass, Scatter
from ciar.models.cache import KVCache
from ciar.models.device import DeviceModel, DeviceTrunk
from ciar.models.families import for_decoding
from ciar.models.text import TextFeatures


@dataclass
class Slot:
    """One session's place in the engine.

    Attributes:
        cache: keys of the conditional row and, under guidance, of the unconditional one.
        scale: guidance scale.
        text_mask: bool [rows, text], or None when no row has padding.
        prefill: float32 [vocab] guided logits of position 0.
        device_text: the prompt's features as the device model reads them.
        drafter: the cloud's own copy of the device model, once :meth:`CloudEngine.drafter_of` made it.
        eagle: the EAGLE drafter, where the strategy has one.
        text: the prompt's embedded rows and their hidden states, [rows, text, dim] each.
        passes, token_rows, milliseconds: cost so far.
    """

    cache: KVCache
    scale: float
    text_mask: Tensor | None
    prefill: Tensor
    device_text: TextFeatures | None = None
    drafter: Drafter | None = None
    eagle: EagleDrafter | None = None
    text: tuple[Tensor, Tensor] | None = None
    passes: int = 0
    token_rows: int = 0
    milliseconds: float = 0.0
    closed: bool = field(default=False)


class CloudEngine:
    """The cloud model and, when there is one, the cloud's copy of the device model.

    Args:
        model: an AR model of any family (``models.families``).
        device_model: the copy.
        device_trunk: its trunk, where one was made already.
    """

    def __init__(
        self,
        model: nn.Module,
        device_model: DeviceModel | None = None,
        device_trunk: DeviceTrunk | None = None,
    ) -> None:
        self.model = for_decoding(model)
        self.device_model, self.device_trunk = device_model, device_trunk
        if device_model is not None and device_trunk is None:
            self.device_trunk = DeviceTrunk(device_model)
        self._lock = threading.Lock()

    def open(
        self, text: TextFeatures, negative: TextFeatures | None, guidance: float, device_text: TextFeatures
    ) -> Slot:
        """Reads the prompt and gives the session a slot.

        Args:
            text: features of the prompt.
            negative: features of the negative prompt; None steers away from the unconditional prompt.
            guidance: scale; 1 computes no unconditional row.
            device_text: the prompt's features as the device model reads them.
        """
        began = time.perf_counter()
        with self._lock, torch.inference_mode():
            slot = self._prefill(text, negative, guidance)
        slot.device_text = device_text
        slot.milliseconds += (time.perf_counter() - began) * 1e3
        return slot

    def drafter_of(self, slot: Slot) -> Drafter | None:
        """The cloud's copy of the device model on a session's picture; None where there is no such model.

        Made when it is first asked for: most strategies never do.
        """
        if slot.drafter is None and self.device_model is not None:
            assert self.device_trunk is not None, "a device model has a trunk"
            assert slot.device_text is not None, "a session was opened with its prompt"
            with self.turn(slot):
                slot.drafter = Drafter(self.device_model, self.device_trunk, slot.device_text)
        return slot.drafter

    def _prefill(self, text: TextFeatures, negative: TextFeatures | None, guidance: float) -> Slot:
        model = self.model
        prompt = model.read([text], None if negative is None else [negative], guidance != 1.0)
        rows, valid, _ = prompt.x.shape
        attention = None if prompt.mask is None else self._mask(prompt.mask, valid, valid)
        hidden = model.forward(prompt.x, model.config.text_len - valid, prompt.cache, attention)
        logits = guide_rows(model.head(hidden[:, -1]), guidance)
        kept = prompt.x, hidden
        return Slot(prompt.cache, guidance, prompt.mask, logits, text=kept, passes=1, token_rows=rows)

    @contextmanager
    def turn(self, slot: Slot) -> Iterator[None]:
        """A session's turn with the models: alone, and timed."""
        began = time.perf_counter()
        with self._lock, torch.inference_mode():
            yield
        slot.milliseconds += (time.perf_counter() - began) * 1e3

    def run(self, slot: Slot, request: Pass, features: Tensor | None = None) -> Tensor:
        """One pass.

        Args:
            slot: the session.
            request: what to feed; the caller guarantees that earlier cells hold valid keys.
            features: [n, dim] to add to the embeddings of the fed tokens (zero rows where none).

        Returns:
            Guided logits, float32 [max(1, want or n), vocab].
        """
        if not request.ids:
            return slot.prefill[None]
        with self.turn(slot):
            model = self.model
            rows = slot.cache.rows
            ids = torch.tensor([request.ids], device=slot.prefill.device)
            x = model.embed_tokens(ids)
            if features is not None:
                x = x + features.to(x)
            start = model.config.text_len + request.start
            n = len(request.ids)
            mask = None
            if slot.text_mask is not None:
                mask = self._mask(slot.text_mask, n, start + n - slot.cache.first)
            hidden = model.forward(x.expand(rows, -1, -1), start, slot.cache, mask)
            logits = guide_rows(model.head(hidden[:, -request.want :]), slot.scale)
            if slot.eagle is not None:
                slot.eagle.saw(request.start, hidden)
        slot.passes += 1
        slot.token_rows += n * rows
        return logits

    def run_scattered(self, slot: Slot, request: Scatter) -> Tensor:
        """One pass over positions that need not be consecutive.

        Args:
            slot: the session.
            request: what to feed where; the caller guarantees that what it sees holds valid keys.

        Returns:
            Guided logits, float32 [n, vocab].
        """
        with self.turn(slot):
            model, rows, device = self.model, slot.cache.rows, slot.prefill.device
            x = model.embed_tokens(torch.tensor([request.ids], device=device)).expand(rows, -1, -1)
            where = torch.tensor(request.positions, device=device) + model.config.text_len
            mask = scattered_mask(request, model.config.text_len - slot.cache.first, slot.text_mask, rows)
            hidden = model.forward(x, where.expand(rows, -1), slot.cache, mask.to(device))
            logits = guide_rows(model.head(hidden), slot.scale)
        slot.passes += 1
        slot.token_rows += len(request.ids) * rows
        return logits

    @staticmethod
    def _mask(text_mask: Tensor, n: int, length: int) -> Tensor:
        """bool [rows, 1, n, length]; padding attends to itself alone, and nothing attends to it."""
        text = text_mask.shape[1]
        valid = F.pad(text_mask, (0, length - text), value=True)[:, None, None, :]
        own = torch.eye(length, dtype=torch.bool, device=text_mask.device)[-n:]
        causal = torch.ones(n, length, dtype=torch.bool, device=text_mask.device).tril(length - n)
        return (causal & valid) | own
