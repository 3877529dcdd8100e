"""Runs the halves of strategies without a wire: what sessions do, reduced to the essentials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ciar.cloud.engine import CloudEngine, Slot
from ciar.decoding.noise import PictureNoise
from ciar.decoding.sampling import SamplingLaw
from ciar.decoding.strategy import CloudRun, DeviceLaw, Pass, Strategy, get_strategy
from ciar.models.text import TextFeatures
from ciar.protocol.messages import Draft, Patch, Settings


def answer_draft(
    strategy: Strategy,
    run: CloudRun,
    draft: Draft,
    run_pass: Callable[[Pass], Tensor],
    device_law: Callable[[int], Tensor] | None = None,
) -> list[Patch]:
    """Drives the cloud half of a strategy over one draft and returns its patches."""
    half = strategy.cloud(run, draft)
    patches: list[Patch] = []
    reply: Any = None
    while True:
        try:
            op = half.send(reply)
        except StopIteration:
            return patches
        reply = None
        if isinstance(op, Pass):
            reply = run_pass(op)
        elif isinstance(op, DeviceLaw):
            assert device_law is not None
            reply = device_law(op.position)
        else:
            patches.append(op)


def finish_cloud(
    engine: CloudEngine,
    text: TextFeatures,
    name: str,
    *,
    guidance: float,
    temperature: float = 1.0,
    seed: int = 0,
    window: int = 4,
    propose: Callable[[list[int]], int] = lambda tokens: 0,
) -> tuple[list[int], Slot]:
    """Makes a picture with ``base``, or with ``lossless`` and a stub drafter; returns tokens and slot."""
    config = engine.model.config
    settings = Settings(name, seed=seed, guidance=guidance, temperature=temperature, window=window)
    law = SamplingLaw(temperature)
    noise = PictureNoise(seed, 0, config.tokens, config.vocab_size)
    run = CloudRun(settings, law, config.tokens, config.vocab_size, noise)
    slot = engine.open(text, None, guidance, text)
    step = 0
    while len(run.tokens) < run.total:
        start, room = len(run.tokens), run.total - len(run.tokens)
        if name == "base":
            draft = Draft(step, start, want=room)
        else:
            known = list(run.tokens)
            for _ in range(min(window, room)):
                known.append(propose(known))
            ids = tuple(known[start:])
            draft = Draft(step, start, ids, (False,) * len(ids))
        answer_draft(get_strategy(name), run, draft, lambda request: engine.run(slot, request))
        step += 1
    return run.tokens, slot
