"""The messages between device and cloud. Frozen, typed, no torch.

A session is ``Open`` → ``Opened``, then any number of ``Draft`` → ``Patch``, then ``Done``;
``Error`` may come from the cloud at any time and ``Cancel`` from the device. A session can be
rebuilt on any replica from ``Open`` with the tokens decided so far in ``history``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

#: What an option of a strategy may be: a number or a word.
OptionValue = int | float | str


def option_value(text: str) -> OptionValue:
    """An option as a user writes it: a whole number or a number where it reads as one, else a word."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


#: WebSocket subprotocol and version of every message in this module.
SUBPROTOCOL = "ciar.v1"
#: Largest frame either side accepts, in bytes.
MAX_FRAME_BYTES = 1 << 20
#: Longest prompt that travels, in characters.
MAX_PROMPT_CHARS = 2000


@dataclass(frozen=True)
class Settings:
    """How a picture is made; both sides must use the same.

    Attributes:
        strategy: name of a registered strategy.
        seed: 0 to 2**64 - 1; the picture's noise.
        image: index of the picture among those of one request; part of the noise key.
        guidance: classifier-free guidance scale, >= 0; 1 computes no unconditional row.
        temperature: >= 0; 0 takes the most likely token.
        top_k: tokens kept, 0 = all.
        top_p: probability mass kept, in (0, 1].
        prefix_rate: share of the tokens that the cloud makes first, 0 to 1.
        window: tokens that a windowed strategy drafts a request.
        action: what the cloud does with an uncertain token: ``replace`` takes its own choice,
            ``verify`` accepts or rejects the device's (speculative sampling).
        payload: ``ids`` (token ids alone) or ``features`` (int8 interval features as well).
        injection: whether the cloud adds interval features to the embeddings of accepted tokens.
        options: names and values of the strategy's own options, each name once; what is left out has
            the strategy's default. Devices and clouds that know no options leave the field out.
    """

    strategy: str
    seed: int = 0
    image: int = 0
    guidance: float = 3.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    prefix_rate: float = 0.0625
    window: int = 16
    action: str = "replace"
    payload: str = "ids"
    injection: bool = True
    options: tuple[tuple[str, OptionValue], ...] = ()


@dataclass(frozen=True)
class Open:
    """Device → cloud: begin a picture, or go on with one.

    Attributes:
        backbone: name of the cloud model that the device expects.
        weights: digest of the weights that the device expects ("" = any).
        prompt: what to draw; never logged.
        negative_prompt: what to steer away from; "" = the null caption.
        history: tokens decided so far, in order; empty for a new picture.
        history_decided: for each of them the index of its decider in ``ciar.ledger.DECIDERS``.
    """

    backbone: str
    prompt: str
    settings: Settings
    weights: str = ""
    negative_prompt: str = ""
    history: tuple[int, ...] = ()
    history_decided: tuple[int, ...] = ()


@dataclass(frozen=True)
class Opened:
    """Cloud → device: the session is ready.

    Attributes:
        session: identifier, for logs on both sides.
        tokens: tokens of the picture.
        vocab_size: ids run from 0 to this, exclusive.
        max_frame_bytes: largest frame that the cloud accepts.
        idle_timeout_s: the session ends when nothing arrives for this long.
        warnings: sentences for the user (a prompt that was cut, for example).
        passes, token_rows, cloud_ms: what reading the prompt (and a history) cost.
    """

    session: str
    tokens: int
    vocab_size: int
    max_frame_bytes: int = MAX_FRAME_BYTES
    idle_timeout_s: float = 60.0
    warnings: tuple[str, ...] = ()
    passes: int = 0
    token_rows: int = 0
    cloud_ms: float = 0.0


@dataclass(frozen=True)
class LawRow:
    """The law of one position as it travels: the codes of its support and their log-probabilities.

    Attributes:
        ids: rising; no ids are all codes from 0 on.
        log_probs: little-endian float32, one for each code; no bytes are no law.
    """

    ids: tuple[int, ...] = ()
    log_probs: bytes = b""


def depths_of(parents: Sequence[int]) -> list[int]:
    """Depth of each node of a tree; children of the known token, whose number is -1, have depth 1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


@dataclass(frozen=True)
class Draft:
    """Device → cloud: proposals for consecutive positions.

    An empty ``ids`` asks the cloud for its own tokens: ``want`` of them, from ``start`` on.

    Attributes:
        step: counts the drafts of a session from 0; a repeat is answered with the same patch.
        start: position of the first id.
        ids: proposed tokens.
        certain: for each id, whether the device vouches for it.
        want: how many tokens the cloud is asked to make itself when ``ids`` is empty.
        features: interval features of ``ids`` (int8 rows) when the payload is ``features``.
        log_probs: for each id its log-probability under the law that it was drawn from (little-endian
            float32), for clouds that do not recompute that law; left out of the frame when empty.
        levels: for each id how sure the device is of it, 0 to 255; empty where the strategy does not ask.
        parents: of a drafted tree: for each id the number of its parent among the ids, which comes before it,
            -1 being the last known token; empty where ids are consecutive.
        until: of streamed drafts: the device sends no more before this many tokens are final; 0 where it
            goes on without waiting.
    """

    step: int
    start: int
    ids: tuple[int, ...] = ()
    certain: tuple[bool, ...] = ()
    want: int = 0
    features: bytes = b""
    log_probs: bytes = b""
    levels: bytes = b""
    until: int = 0
    parents: tuple[int, ...] = ()

    @property
    def span(self) -> int:
        """Positions from ``start`` on that the draft is about; of a tree, the tokens of its longest path."""
        return max(depths_of(self.parents), default=len(self.ids)) + self.want


@dataclass(frozen=True)
class Cost:
    """What the cloud spent on a message. Milliseconds are of its passes alone."""

    passes: int = 0
    token_rows: int = 0
    cloud_ms: float = 0.0


@dataclass(frozen=True)
class Patch:
    """Cloud → device: the verdict on a draft.

    Attributes:
        step: the draft that this answers.
        start: position of the first id.
        ids: the tokens that stand from ``start`` on, changed or not.
        decided: for each id the index of its decider in ``ciar.ledger.DECIDERS``.
        horizon: every position before this one is final.
        law: the cloud's law of the position behind ``ids``, where its draft was rejected and the device
            is to draw in its place; left out of the frame when empty.
        features: the cloud's features of text and known tokens, for a drafter on the device (see
            ``ciar.decoding.feature_rows``); left out of the frame when empty.
    """

    step: int
    start: int
    ids: tuple[int, ...]
    decided: tuple[int, ...]
    horizon: int
    cost: Cost = field(default_factory=Cost)
    law: LawRow = field(default_factory=LawRow)
    features: bytes = b""


@dataclass(frozen=True)
class Done:
    """Cloud → device: the picture is complete; the whole of it, for comparison."""

    ids: tuple[int, ...]
    cost: Cost = field(default_factory=Cost)


@dataclass(frozen=True)
class Error:
    """Cloud → device: the session is over.

    Attributes:
        code: ``input``, ``protocol``, ``busy``, ``version``, ``numerical`` or ``internal``.
        message: a sentence that says what to do next.
        retry_after_s: for ``busy``: when to try again.
    """

    code: str
    message: str
    retry_after_s: float = 0.0


@dataclass(frozen=True)
class Cancel:
    """Device → cloud: stop; the picture is not wanted any more."""


Message = Open | Opened | Draft | Patch | Done | Error | Cancel
