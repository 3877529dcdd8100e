"""Runs the halves of strategies without a wire: what sessions do, reduced to the essentials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ciar.cloud.engine import CloudEngine, Slot
from ciar.cloud.sessions import Cloud, CloudSession
from ciar.decoding.codebook import Codebook
from ciar.decoding.noise import PictureNoise
from ciar.decoding.sampling import SamplingLaw
from ciar.decoding.strategy import (
    AskCodebook,
    CloudRun,
    DeviceLaw,
    Drain,
    Pass,
    Strategy,
    TreeOp,
    get_strategy,
)
from ciar.device.session import DeviceSession
from ciar.intervals.thresholds import ThresholdConfig
from ciar.models.bundle import Bundle
from ciar.models.text import TextFeatures
from ciar.protocol.messages import Done, Draft, Open, Patch, Settings
from ciar.transport.base import Transport


def answer_draft(
    strategy: Strategy,
    run: CloudRun,
    draft: Draft,
    run_pass: Callable[[Pass], Tensor],
    device_law: Callable[[DeviceLaw], Tensor] | None = None,
    codebook: Codebook | None = None,
    tree: Callable[[TreeOp], Tensor | tuple[int, bytes] | None] | None = None,
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
            reply = device_law(op)
        elif isinstance(op, AskCodebook):
            reply = codebook
        elif isinstance(op, TreeOp):
            assert tree is not None
            reply = tree(op)
        elif isinstance(op, Drain):
            reply = []
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


def opening(prompt: str = "a red cat", strategy: str = "base", negative: str = "", **values: Any) -> Open:
    """A message that opens a session on the tiny backbone; ``history`` may be among the values."""
    history = tuple(values.pop("history", ()))
    decided = tuple(values.pop("history_decided", ()))
    return Open("tiny", prompt, Settings(strategy, **values), "", negative, history, decided)


#: Given the tokens so far, the next proposal.
Propose = Callable[[list[int]], int]


def finish_session(session: CloudSession, propose: Propose, window: int = 4) -> list[int]:
    """Brings a session of ``base`` or ``lossless`` to its end with a stub drafter; returns its tokens."""
    tokens = list(session._run.tokens)
    step = session._next_step
    while len(tokens) < session.opened.tokens:
        start, room = len(tokens), session.opened.tokens - len(tokens)
        if session._strategy.uses_device:
            known = list(tokens)
            for _ in range(min(window, room)):
                known.append(propose(known))
            ids = tuple(known[start:])
            draft = Draft(step, start, ids, (False,) * len(ids))
        else:
            draft = Draft(step, start, want=room)
        for answer in session.handle(draft):
            if isinstance(answer, Patch):
                tokens[answer.start :] = answer.ids
            else:
                assert isinstance(answer, Done)
                assert list(answer.ids) == tokens
        step += 1
    return tokens


def picture_of(
    cloud: Cloud, message: Open, propose: Propose = lambda tokens: 0, window: int = 4
) -> tuple[list[int], CloudSession]:
    """A whole picture of ``base`` or ``lossless``; returns its tokens and its session."""
    session = cloud.open(message)
    return finish_session(session, propose, window), session


def device_session(
    bundle: Bundle,
    transport: Transport | None,
    message: Open,
    *,
    threshold: float = 0.95,
    score: str = "interval",
    retries: int = 2,
) -> DeviceSession:
    """The device's side of one picture, with a fixed threshold (0.95 keeps about one of three tokens)."""
    return DeviceSession(
        bundle,
        get_strategy(message.settings.strategy),
        message,
        bundle.text.encode(message.prompt),
        ThresholdConfig("fixed", value=threshold),
        score,
        transport,
        retries,
    )
