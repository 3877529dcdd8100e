"""Cloud sessions: from messages to passes and back. Knows the protocol; knows nothing of sockets."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ciar.cloud.engine import CloudEngine, Slot
from ciar.cloud.trees import TreeReply, answer_tree, attach_eagle
from ciar.decoding.codebook import Codebook
from ciar.decoding.drafter import Drafter
from ciar.decoding.features import feature_bytes, unpack_feature
from ciar.decoding.noise import PictureNoise
from ciar.decoding.options import law_of
from ciar.decoding.sampling import to_law
from ciar.decoding.strategy import (
    AskCodebook,
    CloudRun,
    DeviceLaw,
    Drain,
    Pass,
    Scatter,
    TreeOp,
    get_strategy,
)
from ciar.decoding.trees import check_tree
from ciar.errors import CheckpointError, InputError, ProtocolError
from ciar.ledger import DECIDERS
from ciar.models.bundle import Bundle, load_bundle
from ciar.protocol.messages import Cost, Done, Draft, Open, Opened, Patch


class Cloud:
    """A backbone that sessions can be opened on. Thread-safe.

    Args:
        bundle: the backbone.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.backbone = bundle.name
        self.weights = bundle.weights
        drafts = bool(bundle.config.get("devices"))
        self.engine = CloudEngine(
            bundle.model,
            bundle.device_model if drafts else None,
            bundle.device_trunk if drafts else None,
        )

    @cached_property
    def codebook(self) -> Codebook:
        """The tokenizer's codes, for strategies that ask how near they are."""
        return Codebook(self.bundle.codes)

    @classmethod
    def from_pretrained(cls, name_or_folder: str | Path, device: str = "cpu") -> Cloud:
        """A cloud on an embedded backbone or a folder."""
        return cls(load_bundle(name_or_folder, device))

    def open(self, message: Open) -> CloudSession:
        """Reads the prompt and gives the session its place.

        Raises:
            ProtocolError: the device expects another backbone or other weights, or the history
                does not fit.
            InputError: the prompt or a setting is not usable.
        """
        if message.backbone != self.backbone:
            raise ProtocolError(
                f"This server runs {self.backbone!r}, not {message.backbone!r}. Pass --backbone "
                f"{self.backbone}, or connect to another server."
            )
        if message.weights and self.weights and message.weights != self.weights:
            raise ProtocolError(
                f"This server's weights are {self.weights} and the device's are {message.weights}. "
                "Install the same version on both sides."
            )
        total, vocab = self.bundle.total, self.bundle.gpt_config.vocab_size
        if len(message.history) > total or any(not 0 <= i < vocab for i in message.history):
            raise ProtocolError(f"The history must be at most {total} ids below {vocab}.")
        deciders = message.history_decided or (0,) * len(message.history)
        if len(deciders) != len(message.history) or any(not 0 <= i < len(DECIDERS) for i in deciders):
            raise ProtocolError("The history needs one decider for each id, or none at all.")
        settings = message.settings
        strategy = get_strategy(settings.strategy)
        if not strategy.uses_cloud:
            raise InputError(f"Strategy {strategy.name!r} does not use a cloud; run it without one.")
        text = self.bundle.text.encode(message.prompt)
        negative = self.bundle.text.encode(message.negative_prompt) if message.negative_prompt else None
        warnings = text.warnings + (negative.warnings if negative else ())
        strategy.values(settings)
        law = law_of(settings)
        eagle = self.bundle.eagle if strategy.uses_eagle else None
        slot = self.engine.open(text, negative, settings.guidance, text)
        if eagle is not None:
            attach_eagle(self.engine, slot, eagle, self.bundle.gpt, strategy.features_kind(settings))
        noise = PictureNoise(settings.seed, settings.image, total, vocab, self.bundle.device)
        run = CloudRun(settings, law, total, vocab, noise, list(message.history))
        run.decided = [DECIDERS[i] for i in deciders]
        opened = Opened(secrets.token_hex(8), total, vocab, warnings=warnings)
        session = CloudSession(self, run, slot, opened)
        session.refill()
        session.announce_cost()
        return session


def no_more() -> Sequence[Draft]:
    """No draft came meanwhile."""
    return ()


class CloudSession:
    """One picture in the cloud."""

    def __init__(self, cloud: Cloud, run: CloudRun, slot: Slot, opened: Opened) -> None:
        self.opened = opened
        self._cloud, self._run, self._slot = cloud, run, slot
        self._strategy = get_strategy(run.settings.strategy)
        self._next_step = 0
        self._last: list[Patch | Done] = []
        self._counted = Cost()

    def refill(self) -> None:
        """Recomputes the keys of a history, so that a session can go on where another ended."""
        if len(self._run.tokens) > 1:
            known = len(self._run.tokens)
            ids = self._run.tokens[: known - 1]
            flags = tuple(self._run.decided[i] in ("device", "accepted") for i in range(known - 1))
            inject = flags if self._run.settings.injection and self._strategy.injects else ()
            self._pass(Pass(0, ids, inject))
            self._run.fed = known - 1

    def announce_cost(self) -> None:
        """Puts what has been spent so far into :attr:`opened`."""
        cost = self._cost()
        self.opened = replace(
            self.opened, passes=cost.passes, token_rows=cost.token_rows, cloud_ms=cost.cloud_ms
        )

    def handle(self, draft: Draft, more: Callable[[], Sequence[Draft]] = no_more) -> Iterator[Patch | Done]:
        """Answers a draft; patches come as soon as they are known.

        A repeat of the last draft is answered with the same messages again.

        Args:
            draft: what the device sent.
            more: takes the drafts that came meanwhile, without waiting; a strategy that streams asks it
                before every pass.

        Raises:
            ProtocolError: the draft does not fit the session.
            NumericalError: the cloud model produced NaN.
        """
        if draft.step == self._next_step - 1:
            yield from self._last
            return
        self._accept(draft)
        self._last = []
        run = self._run
        half = self._strategy.cloud(run, draft)
        reply: TreeReply | Codebook | list[Draft] = None
        while True:
            if self._slot.closed:  # the device has gone: nobody waits for what a long answer computes
                return
            try:
                op = half.send(reply)
            except StopIteration:
                break
            reply = None
            if isinstance(op, Pass):
                reply = self._pass(op)
            elif isinstance(op, Scatter):
                reply = self._cloud.engine.run_scattered(self._slot, op)
            elif isinstance(op, DeviceLaw):
                reply = self._device_law(op)
            elif isinstance(op, TreeOp):
                reply = answer_tree(self._cloud.engine, self._slot, op, run.tokens)
            elif isinstance(op, AskCodebook):
                reply = self._cloud.codebook
            elif isinstance(op, Drain):
                # A step that was taken before is a repeat; its answers are on their way.
                reply = [self._accept(one) for one in more() if one.step >= self._next_step]
            else:
                patch = replace(op, cost=self._cost())
                self._last.append(patch)
                yield patch
        if len(run.tokens) >= run.total:
            done = Done(tuple(run.tokens), self._cost())
            self._last.append(done)
            yield done

    def close(self) -> None:
        """Frees the session's cache."""
        self._slot.closed = True

    def _accept(self, draft: Draft) -> Draft:
        """Takes a draft that is due."""
        self._check(draft)
        self._next_step += 1
        self._keep_features(draft)
        return draft

    def _check(self, draft: Draft) -> None:
        run = self._run
        if draft.step != self._next_step:
            raise ProtocolError(
                f"Draft {draft.step} came where {self._next_step} was due. Open a new session."
            )
        # Streamed drafts run ahead of what is known; their strategy sees that they leave no gap.
        known = draft.start if self._strategy.streams else len(run.tokens)
        if draft.start != known:
            raise ProtocolError(
                f"The draft starts at {draft.start} but {len(run.tokens)} tokens are known. Resume with "
                "the history."
            )
        if len(draft.certain) != len(draft.ids):
            raise ProtocolError("A draft has one certainty flag for each id.")
        if any(not 0 <= i < run.vocab_size for i in draft.ids):
            raise ProtocolError(f"A drafted id is not below {run.vocab_size}.")
        room = run.total - known
        if bool(draft.parents) != (bool(draft.ids) and self._strategy.drafts_trees(run.settings)):
            raise ProtocolError("The draft is a tree where none is due, or none where one is.")
        if draft.parents:
            check_tree(draft, room)
            return
        if not 0 < len(draft.ids) + draft.want <= room or (draft.ids and draft.want):
            raise ProtocolError(f"A draft holds ids or asks for tokens, 1 to {room} of them here.")
        self._check_features(draft)

    def _check_features(self, draft: Draft) -> None:
        row = feature_bytes(self._cloud.bundle.gpt_config.dim)
        if draft.features and len(draft.features) != row * len(draft.ids):
            raise ProtocolError("Interval features must be one int8 row of the model's width for each id.")

    def _keep_features(self, draft: Draft) -> None:
        row = feature_bytes(self._cloud.bundle.gpt_config.dim)
        for i in range(len(draft.features) // row):
            self._run.features[draft.start + i] = draft.features[i * row : (i + 1) * row]

    def _pass(self, request: Pass) -> Tensor:
        features = None
        if any(request.inject):
            features = self._features(request)
        return self._cloud.engine.run(self._slot, request, features)

    def _features(self, request: Pass) -> Tensor:
        """Features that were sent, and those of the own copy for tokens that came without (a history)."""
        drafter, sent = self._drafter(), self._run.features
        positions = range(request.start, request.start + len(request.ids))
        flags = torch.tensor(request.inject, device=drafter.states.device)[:, None]
        if all(i in sent for i, wanted in zip(positions, request.inject, strict=True) if wanted):
            blank = torch.zeros(self._cloud.bundle.gpt_config.dim)
            given = torch.stack([unpack_feature(sent[i]) if i in sent else blank for i in positions])
            return given.to(flags.device) * flags
        drafter.feed(self._run.tokens[: positions.stop])
        own = drafter.features(request.start, len(positions))
        rows = [unpack_feature(sent[i]).to(own) if i in sent else own[k] for k, i in enumerate(positions)]
        return torch.stack(rows) * flags

    @torch.inference_mode()
    def _device_law(self, request: DeviceLaw) -> Tensor:
        drafter = self._drafter()
        first, count = request.position, request.count
        drafter.feed(self._run.tokens[: first + count - 1])
        centre = drafter.model.head.centre_logits(drafter.states[first : first + count])
        return to_law(centre, self._run.law, what="the device model")

    def _drafter(self) -> Drafter:
        drafter = self._cloud.engine.drafter_of(self._slot)
        if drafter is None:
            raise CheckpointError(
                "This server has no copy of the device model, which interval features and the action "
                "'verify' need. Serve a backbone folder that holds one."
            )
        return drafter

    def _cost(self) -> Cost:
        """What was spent since the last message."""
        slot, seen = self._slot, self._counted
        total = Cost(slot.passes, slot.token_rows, slot.milliseconds)
        self._counted = total
        return Cost(
            total.passes - seen.passes,
            total.token_rows - seen.token_rows,
            total.cloud_ms - seen.cloud_ms,
        )
