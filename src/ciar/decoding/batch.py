"""Makes many pictures at once, in one process: the same strategies, models batched over pictures.

For evaluation and for self-generated training data, where thousands of pictures are wanted and no
wire is. Every picture runs both halves of its strategy; whenever all pictures wait for a model, what
they wait for is run in one forward. Batched kernels round differently from single ones, so a token
may differ where two choices are within rounding; a lone run through a session is the reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ciar.decoding.codebook import Codebook
from ciar.decoding.eagle import EagleDrafter, keep_cells, tree_forward
from ciar.decoding.exchange import redraw
from ciar.decoding.gate import top_logits
from ciar.decoding.noise import PictureNoise
from ciar.decoding.options import law_of
from ciar.decoding.rows import scattered_mask
from ciar.decoding.sampling import choose, guide, to_law
from ciar.decoding.scorer import Reading, Scoring, make_scorer
from ciar.decoding.strategy import (
    AskCodebook,
    CloudRun,
    DeviceLaw,
    DeviceRun,
    Gate,
    GrowTree,
    KeepPath,
    Pass,
    Proposal,
    Propose,
    Redraw,
    Scatter,
    Strategy,
    TellFeatures,
    TreeOp,
)
from ciar.decoding.timeline import Link, Timeline
from ciar.errors import InputError
from ciar.ledger import Ledger
from ciar.models.device import DeviceModel, DeviceTrunk
from ciar.models.eagle import EagleModel
from ciar.models.families import for_decoding
from ciar.models.family import CloudModel, Sizes
from ciar.models.gpt import GPT
from ciar.models.inference import InferenceGPT
from ciar.models.text import TextFeatures, rows_of
from ciar.protocol.messages import Settings

_Kind = TypeVar("_Kind")


class RaggedTrunk:
    """A transformer over many pictures whose positions differ.

    Args:
        model: the transformer, of any family.
        texts: features of each picture's prompt.
        guided: whether the rows to steer from stand behind those of the prompts.
    """

    @torch.no_grad()
    def __init__(self, model: CloudModel, texts: Sequence[TextFeatures], guided: bool = False) -> None:
        self.model = model
        prompt = model.read(texts, None, guided)
        self.cache = prompt.cache
        rows, text, _ = prompt.x.shape
        whole = torch.ones(rows, text, dtype=torch.bool, device=prompt.x.device)
        #: bool [rows, text], True where there is text.
        self.mask = whole if prompt.mask is None else prompt.mask
        own = torch.eye(text, dtype=torch.bool, device=whole.device)
        causal = torch.ones(text, text, dtype=torch.bool, device=whole.device).tril()
        attention = ((causal & self.mask[:, None, :]) | own)[:, None]
        hidden = model.forward(prompt.x, model.config.text_len - text, self.cache, attention)
        #: The text's embedded rows and their hidden states, [rows, text, dim] each.
        self.text = prompt.x, hidden
        #: [rows, dim] hidden state that predicts image token 0.
        self.first_hidden = hidden[:, -1]

    def feed(self, rows: Tensor, starts: Tensor, x: Tensor) -> Tensor:
        """Feeds blocks of embedded tokens.

        Args:
            rows: int64 [n], distinct and ascending.
            starts: int64 [n] image position of each block's first token.
            x: [n, width, dim]; blocks shorter than ``width`` are padded at the end.

        Returns:
            [n, width, dim] hidden states.
        """
        width = x.shape[1]
        text = self.mask.shape[1]
        length = text + int(starts.max()) + width
        cells = torch.arange(length, device=x.device)
        own = text + starts[:, None] + torch.arange(width, device=x.device)  # [n, width] own cell
        allowed = cells[None, None, :] <= own[:, :, None]
        allowed[:, :, :text] &= self.mask[rows][:, None, :]
        first = self.model.config.text_len
        # Shorter blocks are padded, and their padding may lie behind the last token of the picture.
        self.cache = self.cache.with_room(first - text + length)
        return self.model.forward(x, starts + first, self.cache.choose(rows), allowed[:, None])


@dataclass
class BatchPicture:
    """A finished picture of a batch."""

    tokens: list[int]
    ledger: Ledger


@dataclass
class _Job:
    """One picture on its way."""

    index: int
    device: DeviceRun
    cloud: CloudRun
    ledger: Ledger
    timeline: Timeline
    waiting: Any = None
    finished: bool = False
    eagle: EagleDrafter | None = None


_AT_ONCE = Link()


class Batch:
    """Runs one strategy over a batch of prompts.

    Args:
        cloud: the cloud model, of any family, as it is stored or as it is decoded with.
        device: the device model, where the strategy uses one.
        features: float32 [pictures, text, caption_dim], left-padded.
        mask: bool [pictures, text].
        settings: one for each picture.
        strategy: how.
        gates: one for each picture.
        score: the gate's score, or its name.
        codebook: the tokenizer's codes, where the strategy asks for them.
        link: how long things take, for strategies whose devices stream; as it stands, the cloud answers
            every draft before the device goes on.
        eagle: the EAGLE drafter, where the strategy has one.
    """

    def __init__(
        self,
        cloud: nn.Module | CloudModel | None,
        device: DeviceModel | None,
        features: Tensor,
        mask: Tensor,
        settings: list[Settings],
        strategy: Strategy,
        gates: list[Gate],
        score: str | Scoring = "interval",
        codebook: Codebook | None = None,
        link: Link = _AT_ONCE,
        eagle: EagleModel | None = None,
    ) -> None:
        scales = {s.guidance for s in settings}
        laws = {law_of(s) for s in settings}
        if len(scales) != 1 or len(laws) != 1:
            raise InputError("All pictures of a batch share guidance, temperature, top_k, top_p and entropy.")
        self.strategy = strategy
        self.scale = scales.pop()
        self.law = laws.pop()
        self.codebook, self.eagle = codebook, eagle
        for own in settings:
            strategy.values(own)
        self.cloud_model, self.device_model = cloud, device
        sizes: Sizes = (cloud if cloud is not None else device.trunk).config  # type: ignore[union-attr, assignment]
        total, vocab = sizes.tokens, sizes.vocab_size
        self.noises = [PictureNoise(s.seed, s.image, total, vocab, mask.device) for s in settings]
        self.count = len(settings)
        self.guided = 1 if self.scale == 1.0 else 2
        texts = rows_of(features, mask)
        if strategy.uses_cloud and cloud is not None:
            self.cloud_trunk = RaggedTrunk(for_decoding(cloud), texts, self.guided == 2)
            self.prefill = self._guided(self.cloud_trunk.model.head(self.cloud_trunk.first_hidden))
        if strategy.uses_device and device is not None:
            self.device_trunk = RaggedTrunk(DeviceTrunk(device), texts)
            self.states = torch.zeros(self.count, total + 1, device.config.trunk.dim, device=mask.device)
            self.states[:, 0] = self.device_trunk.first_hidden
            self.fed: list[list[int]] = [[] for _ in range(self.count)]
            self.scorer = make_scorer(score, device, [(s.seed, s.image) for s in settings])
        self.jobs = []
        for i, own in enumerate(settings):
            run = DeviceRun(own, total, gates[i], noise=self.noises[i])
            cloud_run = CloudRun(own, self.law, total, vocab, self.noises[i])
            prefill = int(strategy.uses_cloud)
            ledger = Ledger(tokens=total, cloud_passes=prefill, token_rows=prefill * self.guided)
            answer = partial(strategy.cloud, cloud_run)
            timeline = Timeline(strategy.device(run), answer, link, run.pace)
            self.jobs.append(_Job(i, run, cloud_run, ledger, timeline))

    @torch.inference_mode()
    def run(self) -> list[BatchPicture]:
        """Makes all pictures."""
        for job in self.jobs:
            self._advance(job, None)
        while waiting := [job for job in self.jobs if not job.finished]:
            proposals = [job for job in waiting if isinstance(job.waiting, Propose)]
            passes = [job for job in waiting if isinstance(job.waiting, Pass)]
            replies: list[tuple[_Job, Any]] = []
            if proposals:
                replies += zip(proposals, self._propose(proposals), strict=True)
            if passes:
                replies += zip(passes, self._pass(passes), strict=True)
            replies += [(j, self._redraw(j)) for j in waiting if isinstance(j.waiting, Redraw)]
            replies += [(j, self._device_law(j)) for j in waiting if isinstance(j.waiting, DeviceLaw)]
            replies += [(j, self._scatter(j)) for j in waiting if isinstance(j.waiting, Scatter)]
            replies += [(j, self._tree(j)) for j in waiting if isinstance(j.waiting, TreeOp)]
            replies += [(j, self._codebook()) for j in waiting if isinstance(j.waiting, AskCodebook)]
            for job, reply in replies:
                self._advance(job, reply)
        return [BatchPicture(job.device.tokens, self._ledger(job)) for job in self.jobs]

    def _ledger(self, job: _Job) -> Ledger:
        job.ledger.decided = list(job.device.decided)
        job.ledger.discarded = job.device.discarded
        job.ledger.round_trips = job.timeline.trips.answered
        job.ledger.critical_round_trips = job.timeline.trips.critical
        return job.ledger

    def _advance(self, job: _Job, reply: Any) -> None:
        """Runs a picture's halves until a model is needed, or to its end."""
        op = job.timeline.advance(reply)
        while isinstance(op, Pass) and not op.ids:
            op = job.timeline.advance(self.prefill[job.index][None])
        job.waiting, job.finished = op, op is None

    def _pass(self, jobs: list[_Job]) -> list[Tensor]:
        device = self.cloud_trunk.mask.device
        width = max(len(job.waiting.ids) for job in jobs)
        ids = torch.zeros(len(jobs), width, dtype=torch.long, device=device)
        extra: Tensor | None = None
        for i, job in enumerate(jobs):
            ids[i, : len(job.waiting.ids)] = torch.tensor(job.waiting.ids)
        x = self.cloud_trunk.model.embed_tokens(ids)
        if any(any(job.waiting.inject) for job in jobs):
            extra = torch.zeros_like(x)
            for i, job in enumerate(jobs):
                extra[i, : len(job.waiting.ids)] = self._features(job)
            x = x + extra
        starts = torch.tensor([job.waiting.start for job in jobs], device=device)
        rows = torch.tensor([job.index for job in jobs], device=device)
        if self.guided == 2:
            x, starts = x.repeat(2, 1, 1), starts.repeat(2)
            rows = torch.cat([rows, rows + self.count])
        hidden = self.cloud_trunk.feed(rows, starts, x)
        # The head is a good part of a pass, so it is run on what was asked for alone.
        counts = [job.waiting.want or len(job.waiting.ids) for job in jobs]
        own = torch.arange(len(jobs), device=device).repeat_interleave(torch.tensor(counts, device=device))
        last = [k for job, n in zip(jobs, counts, strict=True) for k in range(len(job.waiting.ids))[-n:]]
        at = torch.tensor(last, device=device)
        wanted = torch.cat([half[own, at] for half in hidden.chunk(self.guided)])
        logits = self._guided(self.cloud_trunk.model.head(wanted))
        for job in jobs:
            job.ledger.cloud_passes += 1
            job.ledger.token_rows += self.guided * len(job.waiting.ids)
        return list(logits.split(counts))

    def _guided(self, logits: Tensor) -> Tensor:
        if self.guided == 1:
            return logits
        conditional, unconditional = logits.chunk(2)
        return guide(conditional, unconditional, self.scale)

    def _features(self, job: _Job) -> Tensor:
        assert self.device_model is not None
        start, count = job.waiting.start, len(job.waiting.ids)
        if not any(job.waiting.inject):
            return torch.zeros(count, self.device_model.config.feature_dim)
        self._feed_device([job], [job.cloud.tokens])
        flags = torch.tensor(job.waiting.inject, device=self.states.device)[:, None]
        return self.device_model.features(self.states[job.index, start : start + count]) * flags

    def _feed_device(self, jobs: list[_Job], tokens: list[list[int]]) -> None:
        """Brings the device's states of some pictures to the end of their tokens."""
        assert self.device_model is not None
        todo: list[tuple[int, int, list[int]]] = []
        for job, own in zip(jobs, tokens, strict=True):
            fed = self.fed[job.index]
            known = len(fed)
            if fed != own[:known]:
                known = next(i for i, (a, b) in enumerate(zip(fed, [*own, -1], strict=False)) if a != b)
            if known < len(own):
                todo.append((job.index, known, own[known:]))
                job.ledger.device_steps += len(own) - known
            self.fed[job.index] = list(own)
        if not todo:
            return
        trunk = self.device_model.trunk
        device = self.states.device
        width = max(len(ids) for _, _, ids in todo)
        block = torch.zeros(len(todo), width, dtype=torch.long, device=device)
        for i, (_, _, ids) in enumerate(todo):
            block[i, : len(ids)] = torch.tensor(ids)
        rows = torch.tensor([row for row, _, _ in todo], device=device)
        starts = torch.tensor([start for _, start, _ in todo], device=device)
        hidden = self.device_trunk.feed(rows, starts, trunk.embed_tokens(block))
        for i, (row, start, ids) in enumerate(todo):
            self.states[row, start + 1 : start + 1 + len(ids)] = hidden[i, : len(ids)]

    def _propose(self, jobs: list[_Job]) -> list[Proposal]:
        assert self.device_model is not None
        self._feed_device(jobs, [job.waiting.tokens for job in jobs])
        positions = [len(job.waiting.tokens) for job in jobs]
        rows = torch.tensor([job.index for job in jobs], device=self.states.device)
        hidden = self.states[rows, torch.tensor(positions, device=self.states.device)]
        centre = self.device_model.head.centre_logits(hidden)
        law = to_law(centre, self.law, what="the device model")
        noise = torch.stack(
            [self.noises[j.index].gumbel(p, 1)[0] for j, p in zip(jobs, positions, strict=True)]
        )
        chosen = choose(law, noise)
        tokens = chosen.tolist()
        if not any(job.waiting.scored for job in jobs):
            told = law.gather(-1, chosen[:, None])[:, 0].tolist()
            return [Proposal(token, math.nan, log_prob=one) for token, one in zip(tokens, told, strict=True)]
        top = top_logits(centre)
        pictures = [job.index for job in jobs]
        before, states = [job.waiting.tokens for job in jobs], [self.states[i] for i in pictures]
        scores = self.scorer(Reading(pictures, before, tokens, hidden, centre, top, states))
        return [Proposal(token, score) for token, score in zip(tokens, scores, strict=True)]

    def _redraw(self, job: _Job) -> int:
        assert self.device_model is not None
        tokens = job.waiting.tokens
        self._feed_device([job], [tokens])
        centre = self.device_model.head.centre_logits(self.states[job.index, len(tokens)])
        own = to_law(centre, self.law, what="the device model")
        return redraw(job.waiting.law, own, self.noises[job.index].residual(len(tokens)))

    def _device_law(self, job: _Job) -> Tensor:
        assert self.device_model is not None
        first, count = job.waiting.position, job.waiting.count
        self._feed_device([job], [job.cloud.tokens[: first + count - 1]])
        centre = self.device_model.head.centre_logits(self.states[job.index, first : first + count])
        return to_law(centre, self.law, what="the device model")

    def _scatter(self, job: _Job) -> Tensor:
        """A pass of one picture alone: its positions are its own."""
        trunk, request = self.cloud_trunk, job.waiting
        device = trunk.mask.device
        rows = torch.tensor([job.index + self.count * i for i in range(self.guided)], device=device)
        x = trunk.model.embed_tokens(torch.tensor([request.ids], device=device)).expand(len(rows), -1, -1)
        where = torch.tensor(request.positions, device=device) + trunk.model.config.text_len
        mask = scattered_mask(request, trunk.mask.shape[1], trunk.mask[rows], len(rows))
        hidden = trunk.model.forward(x, where.expand(len(rows), -1), trunk.cache.choose(rows), mask)
        job.ledger.cloud_passes += 1
        job.ledger.token_rows += self.guided * len(request.ids)
        return self._guided(trunk.model.head(hidden))[0]

    def _tree(self, job: _Job) -> Tensor | tuple[int, bytes] | None:
        """What a strategy asks about one picture's tree."""
        trunk, op = self.cloud_trunk, job.waiting
        model = self._of_llamagen(trunk.model, InferenceGPT)
        halves = [job.index + self.count * i for i in range(self.guided)]
        rows = torch.tensor(halves, device=trunk.mask.device)
        if job.eagle is None:
            job.eagle = self._eagle_drafter(rows, self.strategy.features_kind(job.cloud.settings))
        if isinstance(op, TellFeatures):
            return 0, b""  # there is no wire: a drafter on the device is the same one
        if isinstance(op, GrowTree):
            before = job.eagle.steps
            logits = job.eagle.grow(job.cloud.tokens, op)
            job.ledger.device_steps += (job.eagle.steps - before) * job.timeline.on_device
            return logits
        first = trunk.model.config.text_len
        if isinstance(op, KeepPath):
            keep_cells(trunk.cache.choose(rows), first, op.known, op.nodes)
            job.eagle.keep(op.nodes)
            return None
        known, fed = len(op.ids), len(op.ids) + len(op.nodes)
        trunk.cache = trunk.cache.with_room(first + op.start + fed)
        hidden = tree_forward(model, trunk.cache.choose(rows), op, trunk.mask[rows])
        job.eagle.saw(op.start, hidden[:, :known])
        job.eagle.hold(hidden[:, known:])
        job.ledger.cloud_passes += 1
        job.ledger.token_rows += self.guided * fed
        return self._guided(trunk.model.head(hidden[:, known - 1 :]))[0]

    def _eagle_drafter(self, rows: Tensor, kind: str) -> EagleDrafter:
        if self.eagle is None:
            raise InputError(f"Strategy {self.strategy.name!r} needs an EAGLE drafter. Pass eagle=.")
        text, hidden = (part[rows] for part in self.cloud_trunk.text)
        return EagleDrafter(
            self.eagle,
            self._of_llamagen(self.cloud_model, GPT),
            self.scale,
            folded=self._of_llamagen(self.cloud_trunk.model, InferenceGPT).norm is None,
            text=text,
            hidden=hidden,
            text_mask=self.cloud_trunk.mask[rows],
            kind=kind,
        )

    @staticmethod
    def _of_llamagen(model: object, kind: type[_Kind]) -> _Kind:
        if not isinstance(model, kind):
            raise InputError("EAGLE drafters are for backbones of the LlamaGen family; use another strategy.")
        return model

    def _codebook(self) -> Codebook:
        if self.codebook is None:
            raise InputError(
                f"Strategy {self.strategy.name!r} needs the tokenizer's codebook. Pass codebook=."
            )
        return self.codebook
