"""The device's side of one picture: runs the device half of a strategy over a connection.

Counts what the device spends and fills the ledger; resumes on a lost connection from the tokens
that are final. Knows the protocol; knows nothing of the cloud's insides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ciar.decoding.drafter import Drafter
from ciar.decoding.eagle import EagleDrafter
from ciar.decoding.exchange import redraw
from ciar.decoding.features import pack_feature
from ciar.decoding.gate import TopLogits, top_logits
from ciar.decoding.noise import PictureNoise
from ciar.decoding.options import law_of
from ciar.decoding.pacing import NEWEST, PassTimes
from ciar.decoding.sampling import SamplingLaw, choose, to_law
from ciar.decoding.scorer import Reading, Scorer, make_scorer, scoring_of
from ciar.decoding.strategy import (
    Commit,
    DeviceRun,
    GrowTree,
    Proposal,
    Propose,
    Receive,
    Redraw,
    Send,
    Strategy,
    TakeFeatures,
)
from ciar.decoding.trips import RoundTrips
from ciar.errors import CloudUnavailable, ProtocolError
from ciar.intervals.thresholds import ThresholdConfig
from ciar.ledger import DECIDERS, Decider, Ledger
from ciar.models.bundle import Bundle
from ciar.models.llamagen import caption_rows
from ciar.models.text import TextFeatures
from ciar.protocol.messages import Cost, Draft, Message, Open, Opened, Patch
from ciar.transport.base import Connection, ReceiveTimeout, Transport

#: Called with the tokens done so far and the ledger; False stops the picture cleanly.
Progress = Callable[[int, Ledger], bool | None]


@dataclass(frozen=True)
class PictureResult:
    """A finished (or stopped) picture.

    Attributes:
        tokens: its codes, in raster order; fewer than all when ``stopped``.
        ledger: what it cost and who decided what.
        warnings: sentences from the cloud.
        stopped: whether a callback ended it early.
    """

    tokens: list[int]
    ledger: Ledger
    warnings: tuple[str, ...] = ()
    stopped: bool = False


class Proposer:
    """Turns the device model's states into proposals: law, choice and score.

    Args:
        drafter: the device model on this picture.
        law: the sampling law of the device's logits.
        noise: the picture's noise.
        scorer: the gate's score.
        features: whether to attach interval features.
    """

    def __init__(
        self, drafter: Drafter, law: SamplingLaw, noise: PictureNoise, scorer: Scorer, features: bool
    ) -> None:
        self.drafter, self.law, self.noise, self.scorer, self.features = drafter, law, noise, scorer, features

    @torch.inference_mode()
    def propose(self, tokens: list[int], scored: bool = True, chance: bool = False) -> Proposal:
        """The device's proposal for the position after ``tokens``, with what is wanted beside it."""
        hidden = self.drafter.hidden(tokens)
        centre = self.drafter.model.head.centre_logits(hidden)
        top = top_logits(centre)
        token = self._choose(centre, top, self.noise.gumbel(len(tokens), 1)[0], len(tokens))
        score = math.nan
        if scored:
            rows = TopLogits(top.values[None], top.indices[None], top.log_mass[None], top.vocab_size)
            states = [self.drafter.states]
            (score,) = self.scorer(Reading([0], [tokens], [token], hidden[None], centre[None], rows, states))
        feature = b""
        if self.features:
            feature = pack_feature(self.drafter.features(len(tokens), 1)[0])
        log_prob = float(self._law(centre, len(tokens))[token]) if chance else math.nan
        return Proposal(token, score, feature, log_prob)

    @torch.inference_mode()
    def redraw(self, op: Redraw) -> int:
        """The token in a rejected one's place."""
        centre = self.drafter.model.head.centre_logits(self.drafter.hidden(op.tokens))
        position = len(op.tokens)
        return redraw(op.law, self._law(centre, position), self.noise.residual(position))

    def _law(self, centre: Tensor, position: int) -> Tensor:
        return to_law(centre, self.law, what=f"the device model at position {position}")

    def _choose(self, centre: Tensor, top: TopLogits, noise: Tensor, position: int) -> int:
        """The law's choice; from the most likely codes alone where the law lies within them."""
        law = self.law
        direct = law.plain and law.top_k == len(top.values) and law.top_p == 1.0 and law.temperature > 0.0
        if not direct:
            return int(choose(self._law(centre, position), noise))
        if not math.isfinite(float(top.values[0])):
            self._law(centre, position)  # says what is wrong
        # A law and its logits differ by a constant, which no choice depends on.
        return int(top.indices[(top.values / law.temperature + noise[top.indices]).argmax()])


class DeviceSession:
    """Makes one picture.

    Args:
        bundle: the device's side of the backbone.
        strategy: how.
        message: what to open the session with.
        text: the prompt's features, for the device model.
        threshold: how the gate decides.
        score: name of the gate's score.
        transport: the way to the cloud; None when the strategy needs none.
        retries: how many times a lost connection is taken up again.
    """

    def __init__(
        self,
        bundle: Bundle,
        strategy: Strategy,
        message: Open,
        text: TextFeatures,
        threshold: ThresholdConfig,
        score: str,
        transport: Transport | None,
        retries: int = 2,
    ) -> None:
        self.bundle, self.strategy, self.message = bundle, strategy, message
        self.transport, self.retries = transport, retries
        self.ledger = Ledger(tokens=bundle.total)
        self.warnings: tuple[str, ...] = ()
        settings = message.settings
        judged = bundle.total - math.floor(settings.prefix_rate * bundle.total)
        self.run_state = DeviceRun(settings, bundle.total, threshold.start(judged))
        self._horizon = 0  # every position before it is final
        self._connected = False
        self._trips = RoundTrips()
        self._pass_times = PassTimes()
        self._sent_at: list[float] = []  # when each draft of the connection left, in seconds
        self.proposer: Proposer | None = None
        self.eagle: EagleDrafter | None = None
        self._text = text
        splits = strategy.drafts_trees(settings)
        if strategy.uses_device or splits:
            vocab = bundle.gpt_config.vocab_size
            noise = PictureNoise(settings.seed, settings.image, bundle.total, vocab, bundle.device)
            self.run_state.noise = noise
        if strategy.uses_device:
            began = time.perf_counter()
            law = law_of(settings)
            drafter = Drafter(bundle.device_model, bundle.device_trunk, text)
            scoring = scoring_of(bundle, score, threshold.share)
            scorer = make_scorer(scoring, drafter.model, [(settings.seed, settings.image)])
            features = settings.payload == "features" and strategy.injects and settings.injection
            self.proposer = Proposer(drafter, law, noise, scorer, features)
            self.ledger.device_ms += (time.perf_counter() - began) * 1e3

    def resume(self, tokens: Sequence[int], decided: Sequence[Decider]) -> None:
        """Goes on with a picture that another session began; called before :meth:`run`.

        Args:
            tokens: its first tokens, which are final.
            decided: who decided each of them.
        """
        self.run_state.tokens[:] = tokens
        self.run_state.decided[:] = decided
        self._horizon = len(self.run_state.tokens)

    def run(self, progress: Progress | None = None) -> PictureResult:
        """Makes the picture.

        Raises:
            CloudUnavailable: the cloud cannot be reached, or was lost more often than ``retries``.
            CiarError: whatever the cloud reports.
        """
        run = self.run_state
        stopped = False
        for attempt in range(self.retries + 1):
            try:
                stopped = self._attempt(progress)
                break
            except CloudUnavailable:
                if attempt == self.retries or not self._connected:
                    raise
                # What the cloud has answered is final; go on from there on a new session.
                final = self._horizon
                self.ledger.discarded += len(run.tokens) - final
                del run.tokens[final:], run.decided[final:]
                run.step = 0
        if len(run.decided) < len(run.tokens):  # stopped with drafts on their way
            self.ledger.discarded += len(run.tokens) - len(run.decided)
            del run.tokens[len(run.decided) :]
        self.ledger.decided = list(run.decided)
        if self.proposer is not None:
            self.ledger.device_steps = self.proposer.drafter.steps
        if self.eagle is not None:
            self.ledger.device_steps += self.eagle.steps
        self.ledger.discarded += run.discarded
        return PictureResult(list(run.tokens), self.ledger, self.warnings, stopped)

    def _attempt(self, progress: Progress | None) -> bool:
        connection = self._connect() if self.strategy.uses_cloud else None
        try:
            return self._drive(connection, progress)
        finally:
            if connection is not None:
                connection.close()
                self.ledger.bytes_up += connection.bytes_up
                self.ledger.bytes_down += connection.bytes_down

    def _connect(self) -> Connection:
        assert self.transport is not None, "a strategy that uses a cloud is given a transport"
        run = self.run_state
        # Before the connection, which nobody would close if the drafter could not be built.
        if self.strategy.drafts_trees(self.message.settings):
            self.ledger.device_steps += 0 if self.eagle is None else self.eagle.steps
            self.eagle = self._eagle_drafter()  # anew: the cloud tells its features from the beginning
        connection = self.transport.connect()
        deciders = tuple(DECIDERS.index(d) for d in run.decided)
        began = time.perf_counter()
        try:
            connection.send(replace(self.message, history=tuple(run.tokens), history_decided=deciders))
            opened = connection.receive()
            if not isinstance(opened, Opened):
                raise ProtocolError(f"The cloud answered Open with {type(opened).__name__}.")
            if (opened.tokens, opened.vocab_size) != (self.bundle.total, self.bundle.gpt_config.vocab_size):
                raise ProtocolError("The cloud's pictures have another size than the device's.")
        except BaseException:
            connection.close()
            raise
        self.warnings = opened.warnings
        self._connected = True
        self._trips, self._sent_at = RoundTrips(), []
        run.pace.round_trip_ms = max(0.0, (time.perf_counter() - began) * 1e3 - opened.cloud_ms)
        self._count(Cost(opened.passes, opened.token_rows, opened.cloud_ms))
        self.ledger.round_trips += 1
        self.ledger.critical_round_trips += 1
        return connection

    @torch.inference_mode()
    def _eagle_drafter(self) -> EagleDrafter:
        """The EAGLE drafter before the cloud has told any features; the prompt is embedded here."""
        cloud, settings, encode = self.bundle.gpt_ends, self.message.settings, self.bundle.text.encode
        negative = encode(self.message.negative_prompt) if self.message.negative_prompt else None
        null = cloud.cls_embedding.uncond_embedding
        rows, mask = caption_rows(
            null, [self._text], None if negative is None else [negative], settings.guidance != 1.0
        )
        return EagleDrafter(
            self.bundle.eagle,
            cloud,
            settings.guidance,
            folded=False,
            text=cloud.embed_text(rows.to(null)),
            hidden=None,
            text_mask=None if bool(mask.all()) else mask.to(null.device),
            kind=self.strategy.features_kind(settings),
        )

    def _drive(self, connection: Connection | None, progress: Progress | None) -> bool:
        half = self.strategy.device(self.run_state)
        reply: object = None
        while True:
            try:
                op = half.send(reply)
            except StopIteration:
                return False
            reply = None
            if isinstance(op, Propose | Redraw):
                assert self.proposer is not None, "a strategy that proposes uses a device model"
                began = time.perf_counter()
                if isinstance(op, Propose):
                    reply = self.proposer.propose(op.tokens, op.scored, op.chance)
                else:
                    reply = self.proposer.redraw(op)
                spent_ms = (time.perf_counter() - began) * 1e3
                self.ledger.device_ms += spent_ms
                self.run_state.pace.step_ms = _mean(self.run_state.pace.step_ms, spent_ms)
            elif isinstance(op, GrowTree | TakeFeatures):
                assert self.eagle is not None, "a strategy that drafts trees has an EAGLE drafter"
                began = time.perf_counter()
                with torch.inference_mode():
                    if isinstance(op, GrowTree):
                        reply = self.eagle.grow(self.run_state.tokens, op)
                    else:
                        self.eagle.take(op)
                self.ledger.device_ms += (time.perf_counter() - began) * 1e3
            elif isinstance(op, Send):
                assert connection is not None, "a strategy that sends uses a cloud"
                if isinstance(op.message, Draft):
                    self._trips.sent(op.message)
                    self._sent_at.append(time.perf_counter())
                connection.send(op.message)
            elif isinstance(op, Receive):
                assert connection is not None, "a strategy that receives uses a cloud"
                reply = self._receive(connection, op)
            elif isinstance(op, Commit):
                self.ledger.decided = self.run_state.decided
                if progress is not None and progress(op.done, self.ledger) is False:
                    half.close()
                    return True

    def _receive(self, connection: Connection, op: Receive) -> Patch | None:
        """The next patch, or None where none has come and none is to be waited for."""
        wait_s = None if op.wait else 0.0
        try:
            message: Message = connection.receive(wait_s)
            while isinstance(message, Patch) and self._is_repeat(message):
                message = connection.receive(wait_s)
        except ReceiveTimeout:
            if op.wait:
                raise
            return None
        if not isinstance(message, Patch):
            raise ProtocolError(f"The cloud sent {type(message).__name__} where a patch was due.")
        run = self.run_state
        vocab = self.bundle.gpt_config.vocab_size
        if message.start > len(run.tokens) or message.start + len(message.ids) > run.total:
            raise ProtocolError("The cloud's patch does not fit the picture.")
        if any(not 0 <= i < vocab for i in message.ids):
            raise ProtocolError(f"The cloud's patch holds an id that is not below {vocab}.")
        self._count(message.cost)
        self._horizon = max(self._horizon, message.horizon) if self.strategy.streams else message.horizon
        self._note_trip(message, waited=op.critical)
        return message

    def _is_repeat(self, patch: Patch) -> bool:
        """Whether it answers a draft that was answered long ago. Streamed drafts are answered late anyway,
        and a patch that makes nothing final changes nothing."""
        return not self.strategy.streams and patch.step < self.run_state.step - 1

    def _note_trip(self, patch: Patch, *, waited: bool) -> None:
        trips, pace = self._trips, self.run_state.pace
        answered, critical = trips.answered, trips.critical
        trips.received(patch, waited)
        self.ledger.round_trips += trips.answered - answered
        self.ledger.critical_round_trips += trips.critical - critical
        if passes := patch.cost.passes:
            guided = 1 if self.message.settings.guidance == 1.0 else 2
            self._pass_times.seen(patch.cost.token_rows / passes / guided, patch.cost.cloud_ms / passes)
            pace.pass_ms, pace.row_ms = self._pass_times.split()
        if trips.answered > answered:
            # What is left of the wait is the network's, or less: drafts may have waited for their turn.
            spent_ms = (time.perf_counter() - self._sent_at[patch.step]) * 1e3 - patch.cost.cloud_ms
            pace.round_trip_ms = min(pace.round_trip_ms, max(0.0, spent_ms))

    def _count(self, cost: Cost) -> None:
        self.ledger.cloud_passes += cost.passes
        self.ledger.token_rows += cost.token_rows
        self.ledger.cloud_ms += cost.cloud_ms


def _mean(before: float, newest: float) -> float:
    """A running mean; what comes first counts whole."""
    return newest if before == 0.0 else before + NEWEST * (newest - before)
