"""What a strategy is: two halves that say what they want done and never do it themselves.

Each half is a generator. The device half asks for laws of the device model and exchanges messages;
the cloud half asks for passes of the cloud model and returns verdicts. Whoever drives the halves
(a session, the server, a batch over thousands of pictures) runs the models, counts the cost, and
fills the ledger; a strategy cannot.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch import Tensor

from ciar.decoding.options import Option, OptionValues, law_of, read_options
from ciar.decoding.sampling import SamplingLaw
from ciar.errors import InputError, ProtocolError
from ciar.ledger import DECIDERS, Decider
from ciar.protocol.messages import Draft, LawRow, Message, Patch, Settings


class Noise(Protocol):
    """The picture's noise, as torch tensors on the model's device."""

    def gumbel(self, start: int, count: int) -> Tensor:
        """float32 [count, vocab] Gumbel variates of positions from ``start`` on."""
        ...

    def accept(self, position: int) -> float:
        """Uniform variate in (0, 1) for an acceptance test at a position."""
        ...

    def residual(self, position: int) -> Tensor:
        """float32 [vocab] Gumbel variates, independent of :meth:`gumbel`, for a redraw."""
        ...

    def fresh(self, start: int, count: int, draw: int) -> Tensor:
        """float64 [count] uniform variates in (0, 1) of positions from ``start`` on, independent of
        all others and new for every ``draw``: for positions that are drawn again and again."""
        ...


class Gate(Protocol):
    """Decides, position by position, whether the device keeps its token (intervals.thresholds)."""

    def certain(self, score: float) -> bool: ...

    def answered(self, accepted: bool) -> None: ...


@dataclass(frozen=True)
class Proposal:
    """What the device model says about the next position.

    Attributes:
        token: its choice under the picture's noise.
        score: the gate's uncertainty score; larger is less certain.
        feature: int8 interval feature of the token, when the payload is ``features``.
        log_prob: the token's log-probability under the device's law, where it was asked for; else NaN.
    """

    token: int
    score: float
    feature: bytes = b""
    log_prob: float = math.nan


# --- what a device half may ask for -----------------------------------------------------------


@dataclass(frozen=True)
class Propose:
    """Ask for a :class:`Proposal` for the position after ``tokens``.

    Attributes:
        tokens: the tokens so far.
        scored: whether the gate's score is wanted, which may cost as much as the step; else it is NaN.
        chance: whether the token's log-probability is wanted.
    """

    tokens: list[int]
    scored: bool = True
    chance: bool = False


@dataclass(frozen=True)
class Redraw:
    """Ask for the token that takes a rejected one's place: a draw from what the cloud's law has more.

    The reply is a token of ``norm((p - q)+)``, q being the device's own law after ``tokens``.

    Attributes:
        tokens: the tokens before the position.
        law: the cloud's law there, p.
    """

    tokens: list[int]
    law: LawRow


@dataclass(frozen=True)
class TakeFeatures:
    """Give the device's EAGLE drafter further features of the cloud. Nothing comes back.

    Attributes:
        data: as a :class:`TellFeatures` was answered; what was given before it goes on from.
        kind: their format, see ``decoding.feature_rows``.
    """

    data: bytes
    kind: str


@dataclass(frozen=True)
class GrowTree:
    """Ask the EAGLE drafter for the laws behind the known tokens, or behind further nodes of a tree there.

    Either half may ask: it is answered by the drafter on its own side. Without ids a new tree begins: the
    drafter reads the cloud's features of the known tokens, and the reply is its guided logits of the next
    token, float32 [1, vocab]. With ids these nodes are fed, and the reply is the logits behind each,
    float32 [n, vocab].

    Attributes:
        ids: tokens of the nodes.
        parents: for each the number of its parent among the nodes fed so far, -1 being the last known token.
    """

    ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()


@dataclass(frozen=True)
class Send:
    """Send a message to the cloud. Nothing comes back."""

    message: Message


@dataclass(frozen=True)
class Receive:
    """Ask for the cloud's next :class:`Patch`.

    Attributes:
        critical: the device can do nothing else until it comes.
        wait: wait for it; else the reply is None where none has come yet.
    """

    critical: bool = True
    wait: bool = True


@dataclass(frozen=True)
class Commit:
    """Say that tokens are decided, so that progress can be shown."""

    done: int


DeviceOp = Propose | Redraw | GrowTree | TakeFeatures | Send | Receive | Commit
DeviceHalf = Generator[DeviceOp, Any, None]


@dataclass
class Pace:
    """What a device has measured of its picture so far, in milliseconds; 0 is not known yet.

    Whoever drives the device half writes it: a strategy has no clock.

    Attributes:
        step_ms: one proposal.
        pass_ms: one pass of the cloud, beside its rows.
        row_ms: each position of a pass.
        round_trip_ms: there and back, without the cloud's passes.
    """

    step_ms: float = 0.0
    pass_ms: float = 0.0
    row_ms: float = 0.0
    round_trip_ms: float = 0.0


@dataclass
class DeviceRun:
    """State of one picture on the device.

    Attributes:
        settings: how the picture is made.
        total: tokens of the picture.
        gate: the picture's gate.
        tokens: tokens so far; the strategy appends and patches.
        decided: who decided each token.
        step: number of the next draft.
        discarded: drafted tokens thrown away before anyone judged them.
        pace: how fast device, cloud and network are.
        noise: the picture's noise, for halves that draw more than proposals; None where none does.
    """

    settings: Settings
    total: int
    gate: Gate
    tokens: list[int] = field(default_factory=list)
    decided: list[Decider] = field(default_factory=list)
    step: int = 0
    discarded: int = 0
    pace: Pace = field(default_factory=Pace)
    noise: Noise | None = None

    @property
    def law(self) -> SamplingLaw:
        """The sampling law of the picture, the same as the cloud's."""
        return law_of(self.settings)

    def apply(self, patch: Patch) -> None:
        """Puts the cloud's tokens, and who decided them, in place of everything from its start on.

        Drafted tokens behind the patch are gone before anyone judged them.
        """
        self.discarded += max(0, len(self.tokens) - patch.start - len(patch.ids))
        self.tokens[patch.start :] = patch.ids
        self.decided[patch.start :] = [DECIDERS[i] for i in patch.decided]

    def merge(self, patch: Patch) -> int:
        """Puts the cloud's tokens over those that are not final, and keeps what was drafted behind them.

        ``decided`` holds the deciders of the final tokens alone. A patch that makes nothing final, such as
        one that comes twice, changes nothing.

        Returns:
            How many tokens became final.

        Raises:
            ProtocolError: the patch leaves a gap, or calls tokens final that it does not hold.
        """
        known = len(self.decided)
        fresh = patch.horizon - known
        if fresh <= 0:
            return 0
        if patch.start > known or patch.horizon > patch.start + len(patch.ids):
            raise ProtocolError("The cloud's patch does not hold the tokens that it calls final.")
        ids = patch.ids[known - patch.start :]
        self.tokens[known : known + len(ids)] = ids
        new = patch.decided[known - patch.start : patch.horizon - patch.start]
        self.decided += [DECIDERS[i] for i in new]
        return fresh

    def next_step(self) -> int:
        """Number of the draft that is about to be sent."""
        self.step += 1
        return self.step - 1


# --- what a cloud half may ask for ------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """Ask for one forward of the cloud model.

    ``ids`` are fed at image positions ``start`` on; cells from there on are overwritten. With no
    ids and ``start`` 0 the answer comes from the prefill. The reply is guided logits, float32
    [max(1, want or len(ids)), vocab], of the positions after each fed one (``start + 1`` on; position 0
    for the prefill).

    Attributes:
        inject: for each id whether interval features are added to its embedding.
        want: logits of the last ``want`` ids alone; 0 is all of them.
    """

    start: int
    ids: list[int]
    inject: tuple[bool, ...] = ()
    want: int = 0


@dataclass(frozen=True, eq=False)
class Scatter:
    """Ask for one forward of the cloud model over positions that need not be consecutive.

    ``ids[i]`` is fed at image position ``positions[i]`` and its cell is overwritten; it attends to the
    text and to the positions that ``visible[i]`` names, whose cells are fed here or were before. The
    reply is guided logits, float32 [n, vocab], of the position after each.

    Attributes:
        positions: rising.
        ids: as many.
        visible: bool [n, total]; every position sees itself and none sees a later one.
    """

    positions: tuple[int, ...]
    ids: list[int]
    visible: Tensor


@dataclass(frozen=True)
class DeviceLaw:
    """Ask the cloud's own copy of the device model for its laws at consecutive positions.

    The reply is float32 [count, vocab] log-probabilities; each row is given the tokens of
    ``CloudRun.tokens`` before its position.
    """

    position: int
    count: int = 1


@dataclass(frozen=True)
class AskCodebook:
    """Ask for the tokenizer's codes. The reply is a :class:`ciar.decoding.codebook.Codebook`."""


@dataclass(frozen=True)
class Drain:
    """Ask for the drafts that came while this one was answered. The reply is a list of :class:`Draft`,
    often empty; they are answered by the patches that follow."""


@dataclass(frozen=True)
class TreePass:
    """Ask for one forward of the cloud model over known tokens and a tree of guesses behind them.

    The reply is guided logits, float32 [1 + nodes, vocab]: of the position after the last known token,
    then of the one after each node, given its ancestors.

    Attributes:
        start, ids: known tokens whose keys are missing, at least the last one.
        nodes: tokens of the tree.
        parents: for each the number of its parent, which comes before it; -1 is the last known token.
    """

    start: int
    ids: list[int]
    nodes: list[int]
    parents: list[int]


@dataclass(frozen=True)
class KeepPath:
    """Make a path of the last tree known: its keys move to where known tokens have theirs.

    Attributes:
        known: tokens that were known before the tree.
        nodes: numbers of the path's nodes in the last :class:`TreePass`, from the root on; may be none.
    """

    known: int
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class TellFeatures:
    """Ask for the cloud's features as they travel to a drafter on the device.

    The reply is how many there are, and their bytes: those of the text's elements and then of the known
    tokens that the cloud has read, as many as one frame can hold; 0 where there are no further ones.

    Attributes:
        first: how many were told before.
        kind: their format, see ``decoding.feature_rows``.
    """

    first: int
    kind: str


TreeOp = GrowTree | TreePass | KeepPath | TellFeatures
CloudOp = Pass | Scatter | DeviceLaw | AskCodebook | Drain | TreeOp | Patch
CloudHalf = Generator[CloudOp, Any, None]


@dataclass
class CloudRun:
    """State of one picture in the cloud.

    Attributes:
        settings: how the picture is made.
        law: the sampling law of the cloud's logits.
        total: tokens of the picture.
        vocab_size: number of codes.
        noise: the picture's noise.
        tokens: tokens known so far, verified or vouched for.
        decided: who decided each token.
        fed: image positions whose keys the cache holds, given ``tokens``.
        features: int8 interval features by position, when the device sends them.
        kept: what a strategy keeps from one draft to the next, beside the tokens.
    """

    settings: Settings
    law: SamplingLaw
    total: int
    vocab_size: int
    noise: Noise
    tokens: list[int] = field(default_factory=list)
    decided: list[Decider] = field(default_factory=list)
    fed: int = 0
    features: dict[int, bytes] = field(default_factory=dict)
    kept: Any = None

    @property
    def grid(self) -> int:
        """Tokens of a row of the picture."""
        return math.isqrt(self.total)


class Strategy(ABC):
    """One way to make a picture.

    Attributes:
        name: what users call it.
        summary: one line.
        source: paper and section.
        exact: whether the picture's law is the cloud's, whatever the device.
        drift: for one that is not exact, how far a token's law can be from the cloud's.
        training: what has to be trained for it.
        options: settings of its own, given in ``Settings.options``.
        grid: settings that tuning tries beside the defaults, each as ``ciar compare`` reads them behind the
            name: ``window=8,allowance=2``.
        uses_device: whether it needs a device model.
        uses_cloud: whether it needs a cloud.
        injects: whether interval features may be added to the embeddings of accepted tokens.
        streams: whether the device may send drafts before earlier ones are answered.
        uses_eagle: whether the cloud needs an EAGLE drafter.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    exact: ClassVar[bool] = False
    drift: ClassVar[str] = ""
    training: ClassVar[str] = "device model"
    options: ClassVar[tuple[Option, ...]] = ()
    grid: ClassVar[tuple[str, ...]] = ()
    uses_device: ClassVar[bool] = True
    uses_cloud: ClassVar[bool] = True
    injects: ClassVar[bool] = False
    streams: ClassVar[bool] = False
    uses_eagle: ClassVar[bool] = False

    def values(self, settings: Settings) -> OptionValues:
        """The strategy's options as given, with defaults for the rest.

        Raises:
            InputError: an option is unknown or out of its range.
        """
        return read_options(self.name, self.options, settings.options)

    def drafts_trees(self, settings: Settings) -> bool:
        """Whether the EAGLE drafter runs on the device, which then needs the cloud's features."""
        return False

    def features_kind(self, settings: Settings) -> str:
        """In which format of ``decoding.feature_rows`` an EAGLE drafter reads the cloud's features."""
        return "float32"

    def device(self, run: DeviceRun) -> DeviceHalf:
        """The device half of one picture."""
        raise NotImplementedError

    def cloud(self, run: CloudRun, draft: Draft) -> CloudHalf:
        """The cloud's answer to one draft: passes, then at least one patch."""
        raise NotImplementedError


_REGISTRY: dict[str, Strategy] = {}


def register(cls: type[Strategy]) -> type[Strategy]:
    """Class decorator: makes a strategy known by its name."""
    _REGISTRY[cls.name] = cls()
    return cls


def get_strategy(name: str) -> Strategy:
    """The strategy of a name.

    Raises:
        InputError: there is none; the message lists the known names.
    """
    import ciar.decoding.strategies  # registers the built-in ones

    _ = ciar.decoding.strategies
    if name not in _REGISTRY:
        known = ", ".join(sorted(_REGISTRY))
        raise InputError(f"There is no strategy {name!r}. The strategies are: {known}.")
    return _REGISTRY[name]


def all_strategies() -> list[Strategy]:
    """Every registered strategy, by name."""
    import ciar.decoding.strategies

    _ = ciar.decoding.strategies
    return [_REGISTRY[name] for name in sorted(_REGISTRY)]
