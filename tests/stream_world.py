"""A world of small pictures for streaming: laws that depend on neighbours, and networks that do as told.

:class:`World` stands in for both models, so that a picture costs a millisecond. :func:`play` runs the
halves of a strategy on a clock; :func:`play_any` runs them in whatever order it is told, which is every
order that two queues can produce: messages are late, but never out of order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ciar.decoding.noise import PictureNoise
from ciar.decoding.options import law_of
from ciar.decoding.sampling import choose, to_law
from ciar.decoding.strategy import (
    CloudRun,
    Commit,
    DeviceRun,
    Drain,
    Gate,
    Pass,
    Proposal,
    Propose,
    Receive,
    Scatter,
    Send,
    get_strategy,
)
from ciar.decoding.timeline import Link, Timeline
from ciar.protocol.messages import Draft, Patch, Settings

CODES = 8


class EveryThird:
    """A gate that is certain of two tokens in three, by their scores."""

    def certain(self, score: float) -> bool:
        return score < 2 / 3

    def answered(self, accepted: bool) -> None:
        """Changes nothing."""


class World:
    """Laws of a token given the one before, the one above and its place.

    Args:
        seed: of the laws.
        grid: tokens of a row.
        off: how far the device's laws are from the cloud's, in logits.
    """

    def __init__(self, seed: int = 0, grid: int = 4, off: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.grid, self.total = grid, grid * grid
        shapes = [(CODES + 1, CODES), (CODES + 1, CODES), (self.total, CODES)]
        self.tables = [torch.randn(shape, generator=generator) * 1.2 for shape in shapes]
        self.own = [t + off * torch.randn(t.shape, generator=generator) for t in self.tables]

    def logits(self, tokens: list[int], tables: list[Tensor]) -> Tensor:
        """Logits of the position after ``tokens``: float32 [codes]."""
        place = len(tokens)
        left = tokens[-1] if tokens else CODES
        above = tokens[place - self.grid] if place >= self.grid else CODES
        left_table, above_table, place_table = tables
        return left_table[left] + above_table[above] + place_table[place]

    def noise(self, settings: Settings) -> PictureNoise:
        return PictureNoise(settings.seed, settings.image, self.total, CODES)

    def plain(self, settings: Settings) -> list[int]:
        """The picture of plain AR."""
        tokens: list[int] = []
        noise = self.noise(settings)
        while len(tokens) < self.total:
            law = to_law(self.logits(tokens, self.tables), law_of(settings))
            tokens.append(int(choose(law, noise.gumbel(len(tokens), 1)[0])))
        return tokens


@dataclass
class Play:
    """One picture on its way; ``cells`` are the ids that the cloud's cache holds."""

    world: World
    device: DeviceRun
    cloud: CloudRun
    cells: list[int | None]
    passes: int = 0
    widths: tuple[int, ...] = ()

    @classmethod
    def begin(cls, world: World, settings: Settings, gate: Gate | None = None) -> Play:
        noise = world.noise(settings)
        device = DeviceRun(settings, world.total, gate or EveryThird())
        return cls(world, device, CloudRun(settings, law_of(settings), world.total, CODES, noise), [])

    def resume(self) -> None:
        """The connection is lost: a new session knows what is final, and no more."""
        device, old = self.device, self.cloud
        device.discarded += len(device.tokens) - len(device.decided)
        del device.tokens[len(device.decided) :]
        device.step = 0
        self.cloud = CloudRun(old.settings, old.law, old.total, old.vocab_size, old.noise)
        self.cloud.tokens, self.cloud.decided = list(device.tokens), list(device.decided)
        self.cells = []

    def propose(self, op: Propose) -> Proposal:
        world, place = self.world, len(op.tokens)
        law = to_law(world.logits(op.tokens, world.own), self.cloud.law)
        noise = self.cloud.noise.gumbel(place, 1)[0]
        return Proposal(int(choose(law, noise)), score=(place * 7 % 12) / 12)

    def run_pass(self, op: Pass) -> Tensor:
        world = self.world
        if not op.ids:
            return world.logits([], world.tables)[None]
        assert op.start <= len(self.cells), "a pass leaves a gap of cells"
        self.passes += 1
        self.widths += (len(op.ids),)
        # What lies behind the fed block is stale, and no later pass reads it before it is fed again.
        end = op.start + len(op.ids)
        self.cells[op.start : end] = op.ids
        known = [cell for cell in self.cells[:end] if cell is not None]
        assert len(known) == end, "a pass reads a cell that was never fed"
        ends = range(end - (op.want or len(op.ids)) + 1, end + 1)
        return torch.stack([world.logits(known[:at], world.tables) for at in ends])

    def run_scattered(self, op: Scatter) -> Tensor:
        self.passes += 1
        self.widths += (len(op.ids),)
        self.cells += [None] * (op.positions[-1] + 1 - len(self.cells))
        for position, token in zip(op.positions, op.ids, strict=True):
            self.cells[position] = token
        rows = []
        for position, sees in zip(op.positions, op.visible.tolist(), strict=True):
            assert sees[position]
            assert not any(sees[position + 1 :])
            cells = [cell if seen else CODES for cell, seen in zip(self.cells, sees, strict=False)]
            known = [cell for cell in cells[: position + 1] if cell is not None]
            assert len(known) == position + 1, "a pass reads a cell that was never fed"
            rows.append(self.world.logits(known, self.world.tables))
        return torch.stack(rows)

    def model(self, op: Any) -> Any:
        if isinstance(op, Propose):
            return self.propose(op)
        return self.run_scattered(op) if isinstance(op, Scatter) else self.run_pass(op)


def play(world: World, settings: Settings, link: Link, gate: Gate | None = None) -> tuple[Play, Timeline]:
    """A whole picture on the clock."""
    one = Play.begin(world, settings, gate)
    strategy = get_strategy(settings.strategy)
    timeline = Timeline(
        strategy.device(one.device), lambda draft: strategy.cloud(one.cloud, draft), link, one.device.pace
    )
    op = timeline.advance()
    while op is not None:
        op = timeline.advance(one.model(op))
    return one, timeline


#: Given how many ways there are to go on, one of them.
Choose = Callable[[int], int]


def play_any(
    world: World, settings: Settings, choose_one: Choose, cut_after: int = -1, gate: Gate | None = None
) -> Play:
    """A whole picture in any order of events; a connection that is lost after ``cut_after`` of them."""
    one = Play.begin(world, settings, gate)
    events = 0
    while not _attempt(one, choose_one, cut_after - events if cut_after >= events else -1):
        one.resume()
        events = cut_after + 1
    return one


def _attempt(one: Play, choose_one: Choose, cut_after: int) -> bool:
    """Runs a connection; False when it was lost."""
    strategy = get_strategy(one.device.settings.strategy)
    device = strategy.device(one.device)
    cloud: Any = None
    up: deque[Draft] = deque()
    down: deque[Patch] = deque()
    try:
        device_op, cloud_op = device.send(None), None
    except StopIteration:
        return True
    count = 0
    while True:
        if count == cut_after:
            return False
        count += 1
        waits = isinstance(device_op, Receive) and device_op.wait and not down
        ready = (["device"] if not waits else []) + (["cloud"] if cloud or up else [])
        assert ready, "device and cloud wait for each other"
        reply: Any = None
        if ready[choose_one(len(ready))] == "cloud":
            if cloud is None:
                cloud = strategy.cloud(one.cloud, up.popleft())
            elif isinstance(cloud_op, Drain):
                reply = [up.popleft() for _ in range(choose_one(len(up) + 1))]
            elif isinstance(cloud_op, Patch):
                down.append(cloud_op)
            else:
                reply = one.model(cloud_op)
            try:
                cloud_op = cloud.send(reply)
            except StopIteration:
                cloud = cloud_op = None
            continue
        if isinstance(device_op, Propose):
            reply = one.propose(device_op)
        elif isinstance(device_op, Send):
            assert isinstance(device_op.message, Draft)
            up.append(device_op.message)
        elif isinstance(device_op, Receive):
            # A patch may have come and may still be on its way: the device is told either.
            arrived = bool(down) and (device_op.wait or choose_one(2) == 1)
            reply = down.popleft() if arrived else None
        else:
            assert isinstance(device_op, Commit)
        try:
            device_op = device.send(reply)
        except StopIteration:
            return True
