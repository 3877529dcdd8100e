"""Messages to bytes and back. One set of checks serves both directions.

A frame is one MessagePack array: a type number, then the message's fields. ``Draft``, ``Patch`` and
``Done`` travel at every step and are flat arrays of packed bytes; ``Open``, ``Opened`` and ``Error``
travel once and carry a map with names, so that a browser client is easy to write and to debug.

============  ======  ==========================================================================
message       number  rest of the array
============  ======  ==========================================================================
``Open``      0       map of all fields; ``settings`` is a map of all of its fields, with ``options`` a
                      map of names and values or left out when there are none; ``history`` is packed
                      ids and ``history_decided`` 2 bits each or no bytes
``Opened``    1       map of all fields
``Draft``     2       step, start, ids, certain (1 bit each), want, features; and log_probs (4 bytes each)
                      if there are any; and then levels (1 byte each) and until if one is given; and then,
                      of a tree, the parents (packed like ids, each one more than the parent's number)
``Patch``     3       step, start, ids, decided (2 bits each), horizon, passes, token_rows, cloud_ms; and the
                      ids and log_probs of a law if there is one; and then features if there are any
``Done``      4       ids, passes, token_rows, cloud_ms
``Error``     5       map of all fields
``Cancel``    6       nothing
============  ======  ==========================================================================

Token ids are bytes: a width (2 or 4), then little-endian unsigned integers of that width; no ids are
no bytes. Bits fill each byte from its lowest end; unused bits are 0.

This module knows what a single message may look like. It does not know sessions: whether a draft is in
order, or an id within the vocabulary, is judged by those who hold the session.

Source of the format: https://github.com/msgpack/msgpack/blob/master/spec.md
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any, TypeVar, cast

import msgpack  # type: ignore[import-untyped]

from ciar.errors import InputError, ProtocolError
from ciar.protocol.messages import (
    MAX_FRAME_BYTES,
    MAX_PROMPT_CHARS,
    Cancel,
    Cost,
    Done,
    Draft,
    Error,
    LawRow,
    Message,
    Open,
    Opened,
    OptionValue,
    Patch,
    Settings,
    depths_of,
)
from ciar.protocol.packed import as_bytes, pack_ids, pack_small, shown, unpack_ids, unpack_small

#: Most tokens that a picture may have on the wire, and so the end of every position.
MAX_TOKENS = 1 << 16
#: Ids, counts and steps stay below this.
ID_LIMIT = 1 << 32
#: Deciders on the wire; two bits hold them.
DECIDER_COUNT = 4
#: Codes that ``Error`` may carry.
ERROR_CODES = ("input", "protocol", "busy", "version", "numerical", "internal")
#: Cloud actions that ``Settings`` may name.
ACTIONS = ("replace", "verify")
#: Payloads that ``Settings`` may name.
PAYLOADS = ("ids", "features")
#: Longest error or warning sentence, in characters.
MAX_SENTENCE_CHARS = 4096
#: Most warnings of one session.
MAX_WARNINGS = 32

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]*")
_NAME_CHARS = 128
_OPTION_NAME = re.compile(r"[a-z][a-z0-9_]*")
#: Most options of one picture, and the longest name or word among them.
MAX_OPTIONS, MAX_OPTION_CHARS = 32, 64
# A message is at most four containers deep and never holds more items than this; a small bound here
# keeps a frame of a few bytes from claiming a list of millions.
_MAX_ITEMS = 64
_Checked = TypeVar("_Checked", bound=Message)


# ---------------------------------------------------------------------------------------------------
# Checks of single values. Each names the field and the valid range and never repeats text it was given,
# since texts may be prompts and the sentence may be logged.


def _whole(value: object, name: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ProtocolError(f"{name} must be a whole number from {low} to {high}, got {shown(value)}.")
    return value


def _real(value: object, name: str, low: float, high: float) -> float:
    # Browsers write 3.0 as the integer 3, so whole numbers are taken as well.
    if type(value) not in (int, float):
        raise ProtocolError(f"{name} must be a number from {low:g} to {high:g}, got {shown(value)}.")
    number = cast(float, value)
    if not (math.isfinite(number) and low <= number <= high):
        raise ProtocolError(f"{name} must be a number from {low:g} to {high:g}, got {shown(value)}.")
    return float(number)


def _flag(value: object, name: str) -> bool:
    if type(value) is not bool:
        raise ProtocolError(f"{name} must be true or false, got {shown(value)}.")
    return value


def _text(value: object, name: str, limit: int) -> str:
    if type(value) is not str:
        raise ProtocolError(f"{name} must be a text, got {shown(value)}.")
    if len(value) > limit:
        raise ProtocolError(f"{name} has {len(value)} characters; at most {limit} may travel. Shorten it.")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ProtocolError(f"{name} holds half of a surrogate pair, which is not text; remove it.")
    return value


def _name(value: object, name: str, *, empty_allowed: bool = False) -> str:
    text = _text(value, name, _NAME_CHARS)
    if not (_NAME.fullmatch(text) or (empty_allowed and not text)):
        raise ProtocolError(f"{name} must be a name of letters, digits and . _ : + - that is not empty.")
    return text


def _choice(value: object, name: str, choices: Sequence[str]) -> str:
    if type(value) is not str or value not in choices:
        raise ProtocolError(f"{name} must be one of {', '.join(choices)}.")
    return value


def _row(value: object, name: str, limit: int) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        raise ProtocolError(f"{name} must be a tuple, got {shown(value)}.")
    if len(value) > limit:
        raise ProtocolError(f"{name} has {len(value)} items; at most {limit} may travel.")
    return value


def _ids(value: object, name: str) -> tuple[int, ...]:
    ids = _row(value, name, MAX_TOKENS)
    if not all(type(token) is int and 0 <= token < ID_LIMIT for token in ids):
        raise ProtocolError(f"{name} must be whole numbers from 0 to {ID_LIMIT - 1}.")
    return ids


def _span(start: object, count: int, name: str) -> int:
    first = _whole(start, f"{name}.start", 0, MAX_TOKENS)
    if first + count > MAX_TOKENS:
        raise ProtocolError(f"{name} ends at position {first + count}; at most {MAX_TOKENS} is possible.")
    return first


# ---------------------------------------------------------------------------------------------------
# Checks of whole messages.


def _options(value: object) -> tuple[tuple[str, OptionValue], ...]:
    """Names and values of options; what they mean is for the strategy to say."""
    found: dict[str, OptionValue] = {}
    for pair in _row(value, "settings.options", MAX_OPTIONS):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ProtocolError("settings.options must hold pairs of a name and a value.")
        name, option = pair
        _text(name, "settings.options", MAX_OPTION_CHARS)
        if not _OPTION_NAME.fullmatch(name) or name in found:
            raise ProtocolError("settings.options must have names of a-z, 0-9 and _, each of them once.")
        if type(option) is str:
            found[name] = _text(option, "settings.options", MAX_OPTION_CHARS)
        elif type(option) is int:
            found[name] = _whole(option, "settings.options", -(1 << 53), 1 << 53)
        else:
            found[name] = _real(option, "settings.options", -1e12, 1e12)
    return tuple(found.items())


def _check_settings(settings: object) -> Settings:
    if not isinstance(settings, Settings):
        raise ProtocolError(f"open.settings must be settings, got {shown(settings)}.")
    top_p = _real(settings.top_p, "settings.top_p", 0, 1)
    if top_p == 0:
        raise ProtocolError("settings.top_p must be above 0 and at most 1, got 0.")
    return Settings(
        strategy=_name(settings.strategy, "settings.strategy"),
        seed=_whole(settings.seed, "settings.seed", 0, (1 << 64) - 1),
        image=_whole(settings.image, "settings.image", 0, ID_LIMIT - 1),
        guidance=_real(settings.guidance, "settings.guidance", 0, 1000),
        temperature=_real(settings.temperature, "settings.temperature", 0, 1000),
        top_k=_whole(settings.top_k, "settings.top_k", 0, ID_LIMIT - 1),
        top_p=top_p,
        prefix_rate=_real(settings.prefix_rate, "settings.prefix_rate", 0, 1),
        window=_whole(settings.window, "settings.window", 1, MAX_TOKENS),
        action=_choice(settings.action, "settings.action", ACTIONS),
        payload=_choice(settings.payload, "settings.payload", PAYLOADS),
        injection=_flag(settings.injection, "settings.injection"),
        options=_options(settings.options),
    )


def _deciders(value: object, name: str) -> tuple[int, ...]:
    deciders = _row(value, name, MAX_TOKENS)
    if not all(type(decider) is int and 0 <= decider < DECIDER_COUNT for decider in deciders):
        raise ProtocolError(f"{name} must hold whole numbers from 0 to {DECIDER_COUNT - 1}.")
    return deciders


def _check_open(message: Open) -> Open:
    history = _ids(message.history, "open.history")
    deciders = _deciders(message.history_decided, "open.history_decided")
    if len(deciders) not in (0, len(history)):
        raise ProtocolError(
            f"open.history_decided has {len(deciders)} items for {len(history)} ids; give one each or none."
        )
    return Open(
        backbone=_name(message.backbone, "open.backbone"),
        prompt=_text(message.prompt, "open.prompt", MAX_PROMPT_CHARS),
        settings=_check_settings(message.settings),
        weights=_name(message.weights, "open.weights", empty_allowed=True),
        negative_prompt=_text(message.negative_prompt, "open.negative_prompt", MAX_PROMPT_CHARS),
        history=history,
        history_decided=deciders,
    )


def _check_opened(message: Opened) -> Opened:
    timeout_s = _real(message.idle_timeout_s, "opened.idle_timeout_s", 0, 1e6)
    if timeout_s == 0:
        raise ProtocolError("opened.idle_timeout_s must be above 0, got 0.")
    warnings = _row(message.warnings, "opened.warnings", MAX_WARNINGS)
    return Opened(
        session=_name(message.session, "opened.session"),
        tokens=_whole(message.tokens, "opened.tokens", 1, MAX_TOKENS),
        vocab_size=_whole(message.vocab_size, "opened.vocab_size", 1, ID_LIMIT),
        max_frame_bytes=_whole(message.max_frame_bytes, "opened.max_frame_bytes", 1, 1 << 30),
        idle_timeout_s=timeout_s,
        warnings=tuple(_text(warning, "opened.warnings", MAX_SENTENCE_CHARS) for warning in warnings),
        passes=_whole(message.passes, "opened.passes", 0, ID_LIMIT),
        token_rows=_whole(message.token_rows, "opened.token_rows", 0, ID_LIMIT),
        cloud_ms=_real(message.cloud_ms, "opened.cloud_ms", 0, 1e12),
    )


def _log_probs(value: object, name: str) -> tuple[float, ...]:
    """Log-probabilities that were packed: none is NaN, minus infinity or above 0."""
    blob = as_bytes(value, name)
    if len(blob) % 4 or len(blob) > 4 * MAX_TOKENS:
        raise ProtocolError(f"{name} has {len(blob)} bytes; it must hold 4 a token, of {MAX_TOKENS} at most.")
    values = struct.unpack(f"<{len(blob) // 4}f", blob)
    # Rounding may leave a sure token's a little above 0. NaN fails both comparisons.
    if not all(-math.inf < value <= 1e-4 for value in values):
        raise ProtocolError(f"{name} must hold logarithms of probabilities above 0 and at most 1.")
    return values


def _check_law(law: object) -> LawRow:
    if not isinstance(law, LawRow):
        raise ProtocolError(f"patch.law must be a law, got {shown(law)}.")
    ids, values = _ids(law.ids, "patch.law.ids"), _log_probs(law.log_probs, "patch.law.log_probs")
    if ids and len(ids) != len(values):
        raise ProtocolError(f"patch.law has {len(values)} probabilities for {len(ids)} ids; give one each.")
    if any(after <= before for before, after in pairwise(ids)):
        raise ProtocolError("patch.law.ids must rise.")
    if values and not abs(math.fsum(map(math.exp, values)) - 1.0) <= 1e-3:
        raise ProtocolError("patch.law must have probabilities that sum to 1.")
    return LawRow(ids, law.log_probs)


def _check_draft(message: Draft) -> Draft:
    ids = _ids(message.ids, "draft.ids")
    certain = _row(message.certain, "draft.certain", MAX_TOKENS)
    features = as_bytes(message.features, "draft.features")
    want = _whole(message.want, "draft.want", 0, MAX_TOKENS)
    if not all(type(flag) is bool for flag in certain):
        raise ProtocolError("draft.certain must hold true or false for each id.")
    if len(certain) != len(ids):
        raise ProtocolError(f"draft.certain has {len(certain)} flags for {len(ids)} ids; give one each.")
    if bool(ids) == bool(want):
        raise ProtocolError("A draft must either hold ids or want tokens, and not both.")
    if features and (not ids or len(features) % len(ids)):
        raise ProtocolError(f"draft.features has {len(features)} bytes, no multiple of {len(ids)} ids.")
    if len(_log_probs(message.log_probs, "draft.log_probs")) not in (0, len(ids)):
        raise ProtocolError(f"draft.log_probs must hold one number for each of {len(ids)} ids, or none.")
    if len(as_bytes(message.levels, "draft.levels")) not in (0, len(ids)):
        raise ProtocolError(f"draft.levels must hold one byte for each of {len(ids)} ids, or none.")
    parents = _row(message.parents, "draft.parents", MAX_TOKENS)
    if len(parents) not in (0, len(ids)):
        raise ProtocolError(
            f"draft.parents has {len(parents)} items for {len(ids)} ids; give one each or none."
        )
    if not all(type(parent) is int and -1 <= parent < node for node, parent in enumerate(parents)):
        raise ProtocolError("draft.parents must name ids that come before their children, or -1.")
    return Draft(
        step=_whole(message.step, "draft.step", 0, ID_LIMIT - 1),
        start=_span(message.start, max(depths_of(parents), default=len(ids)) + want, "draft"),
        ids=ids,
        certain=certain,
        want=want,
        features=features,
        log_probs=message.log_probs,
        levels=message.levels,
        until=_whole(message.until, "draft.until", 0, MAX_TOKENS),
        parents=parents,
    )


def _check_cost(cost: object) -> Cost:
    if not isinstance(cost, Cost):
        raise ProtocolError(f"cost must be a cost, got {shown(cost)}.")
    return Cost(
        passes=_whole(cost.passes, "cost.passes", 0, ID_LIMIT - 1),
        token_rows=_whole(cost.token_rows, "cost.token_rows", 0, (1 << 53) - 1),
        cloud_ms=_real(cost.cloud_ms, "cost.cloud_ms", 0, 1e12),
    )


def _check_patch(message: Patch) -> Patch:
    ids = _ids(message.ids, "patch.ids")
    decided = _deciders(message.decided, "patch.decided")
    if len(decided) != len(ids):
        raise ProtocolError(f"patch.decided has {len(decided)} items for {len(ids)} ids; give one each.")
    return Patch(
        step=_whole(message.step, "patch.step", 0, ID_LIMIT - 1),
        start=_span(message.start, len(ids), "patch"),
        ids=ids,
        decided=decided,
        horizon=_whole(message.horizon, "patch.horizon", 0, MAX_TOKENS),
        cost=_check_cost(message.cost),
        law=_check_law(message.law),
        features=as_bytes(message.features, "patch.features"),
    )


def _check_done(message: Done) -> Done:
    return Done(ids=_ids(message.ids, "done.ids"), cost=_check_cost(message.cost))


def _check_error(message: Error) -> Error:
    return Error(
        code=_choice(message.code, "error.code", ERROR_CODES),
        message=_text(message.message, "error.message", MAX_SENTENCE_CHARS),
        retry_after_s=_real(message.retry_after_s, "error.retry_after_s", 0, 1e6),
    )


_CHECKS: dict[type, Callable[[Any], Message]] = {
    Open: _check_open,
    Opened: _check_opened,
    Draft: _check_draft,
    Patch: _check_patch,
    Done: _check_done,
    Error: _check_error,
    Cancel: lambda message: message,
}


def check(message: _Checked) -> _Checked:
    """Check every field of a message and return it with numbers in their declared type.

    Raises:
        ProtocolError: a field has the wrong type or is out of range, or fields contradict each other.
    """
    checker = _CHECKS.get(type(message))
    if checker is None:
        raise ProtocolError(f"A {type(message).__name__} is not a message of this protocol.")
    return cast(_Checked, checker(message))


# ---------------------------------------------------------------------------------------------------
# Messages to and from the array of a frame.

_NUMBERS: dict[type, int] = {Open: 0, Opened: 1, Draft: 2, Patch: 3, Done: 4, Error: 5, Cancel: 6}


def _to_map(message: Any) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in fields(message)}


def _settings_map(settings: Settings) -> dict[str, Any]:
    """All fields; no options are no field, so that a cloud of an older version understands them too."""
    found = _to_map(settings)
    options = dict(found.pop("options"))
    return found | ({"options": options} if options else {})


def _settings_from(value: object) -> Settings:
    # A device of an older version sends no options.
    given = {"options": {}} | value if type(value) is dict else value
    found = _from_map(given, Settings, "open.settings")
    if type(found["options"]) is not dict:
        raise ProtocolError(f"settings.options must be a map, got {shown(found['options'])}.")
    return Settings(**found | {"options": tuple(found["options"].items())})


def _from_map(value: object, kind: type, name: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise ProtocolError(f"{name} must be a map of its fields, got {shown(value)}.")
    known = {field.name for field in fields(kind)}
    if value.keys() != known:
        missing, unknown = len(known - value.keys()), len(value.keys() - known)
        raise ProtocolError(
            f"{name} must have exactly the fields {', '.join(sorted(known))}; {missing} are missing and "
            f"{unknown} are unknown. Both sides must run the same protocol version."
        )
    return value


def _to_array(message: Message) -> list[Any]:
    match message:
        case Open():
            packed = {
                "settings": _settings_map(message.settings),
                "history": pack_ids(message.history),
                "history_decided": pack_small(message.history_decided, 2),
            }
            return [_to_map(message) | packed]
        case Draft():
            ids, flags = pack_ids(message.ids), pack_small(message.certain, 1)
            head = [message.step, message.start, ids, flags, message.want, message.features]
            if message.parents:
                parents = pack_ids([parent + 1 for parent in message.parents])
                return [*head, message.log_probs, message.levels, message.until, parents]
            if message.levels or message.until:
                return [*head, message.log_probs, message.levels, message.until]
            return [*head, message.log_probs] if message.log_probs else head
        case Patch(cost=cost):
            decided = pack_small(message.decided, 2)
            head = [message.step, message.start, pack_ids(message.ids), decided, message.horizon]
            head += [cost.passes, cost.token_rows, cost.cloud_ms]
            law = message.law
            if message.features:
                return [*head, pack_ids(law.ids), law.log_probs, message.features]
            return [*head, pack_ids(law.ids), law.log_probs] if law.log_probs else head
        case Done(cost=cost):
            return [pack_ids(message.ids), cost.passes, cost.token_rows, cost.cloud_ms]
        case Cancel():
            return []
        case Opened() | Error():
            return [_to_map(message)]


def _open_from(values: list[Any]) -> Open:
    found = _from_map(values[0], Open, "open")
    settings = _settings_from(found["settings"])
    history = unpack_ids(found["history"], "open.history")
    # No deciders at all is no bytes; otherwise there is one for each id.
    count = len(history) if found["history_decided"] else 0
    deciders = unpack_small(found["history_decided"], "open.history_decided", 2, count)
    return Open(**found | {"settings": settings, "history": history, "history_decided": deciders})


def _opened_from(values: list[Any]) -> Opened:
    found = _from_map(values[0], Opened, "opened")
    if type(found["warnings"]) is not list:
        raise ProtocolError(f"opened.warnings must be a list, got {shown(found['warnings'])}.")
    return Opened(**found | {"warnings": tuple(found["warnings"])})


def _draft_from(values: list[Any]) -> Draft:
    step, start, blob, flags, want, features, *rest = values
    ids = unpack_ids(blob, "draft.ids")
    certain = tuple(map(bool, unpack_small(flags, "draft.certain", 1, len(ids))))
    if len(rest) == 4:
        rest[3] = tuple(parent - 1 for parent in unpack_ids(rest[3], "draft.parents"))
    return Draft(step, start, ids, certain, want, features, *rest)


def _patch_from(values: list[Any]) -> Patch:
    step, start, blob, packed, horizon, passes, token_rows, cloud_ms, *rest = values
    ids = unpack_ids(blob, "patch.ids")
    decided = unpack_small(packed, "patch.decided", 2, len(ids))
    cost = Cost(passes=passes, token_rows=token_rows, cloud_ms=cloud_ms)
    law = LawRow(unpack_ids(rest[0], "patch.law.ids"), rest[1]) if rest else LawRow()
    return Patch(step, start, ids, decided, horizon, cost, law, *rest[2:])


def _done_from(values: list[Any]) -> Done:
    blob, passes, token_rows, cloud_ms = values
    cost = Cost(passes=passes, token_rows=token_rows, cloud_ms=cloud_ms)
    return Done(ids=unpack_ids(blob, "done.ids"), cost=cost)


#: For each type number how many items may follow it, and how they become a message.
_READERS: dict[int, tuple[tuple[int, ...], Callable[[list[Any]], Message]]] = {
    0: ((1,), _open_from),
    1: ((1,), _opened_from),
    2: ((6, 7, 9, 10), _draft_from),
    3: ((8, 10, 11), _patch_from),
    4: ((4,), _done_from),
    5: ((1,), lambda values: Error(**_from_map(values[0], Error, "error"))),
    6: ((0,), lambda values: Cancel()),
}


def _unique_pairs(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A map from its pairs; MessagePack lets a key come twice, and the last would win unseen."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a map has the same key twice")
    return found


def _check_size(frame_bytes: int, limit: int) -> None:
    if frame_bytes > limit:
        raise ProtocolError(f"A frame of {frame_bytes} bytes is larger than the limit of {limit} bytes.")


def encode(message: Message, *, limit: int = MAX_FRAME_BYTES) -> bytes:
    """One message as one frame, checked before it leaves.

    Args:
        message: what to send.
        limit: largest frame allowed, in bytes.

    Raises:
        InputError: a field of ``Open`` is out of range; those come from the user.
        ProtocolError: a field of another message is, or the frame is larger than ``limit``.
    """
    try:
        message = check(message)
    except ProtocolError as error:
        if isinstance(message, Open):
            raise InputError(str(error)) from error
        raise
    frame = cast(bytes, msgpack.packb([_NUMBERS[type(message)], *_to_array(message)], use_bin_type=True))
    _check_size(len(frame), limit)
    return frame


def decode(frame: bytes, *, limit: int = MAX_FRAME_BYTES) -> Message:
    """One message from one frame, every field checked.

    Args:
        frame: bytes as they arrived.
        limit: largest frame allowed, in bytes.

    Raises:
        ProtocolError: whatever is wrong with the frame; no other error is possible.
    """
    if not isinstance(frame, (bytes, bytearray, memoryview)):
        raise ProtocolError(f"A frame must be bytes, got {shown(frame)}.")
    _check_size(len(frame), limit)
    try:
        items = msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_unique_pairs,
            max_array_len=_MAX_ITEMS,
            max_map_len=_MAX_ITEMS,
            max_ext_len=0,
            max_str_len=limit,
            max_bin_len=limit,
        )
    except Exception as error:
        # The reader raises many kinds (truncated, trailing bytes, too deep, bad UTF-8, limits); all of
        # them mean the same to us, and its words may quote the frame.
        raise ProtocolError(
            f"A frame of {len(frame)} bytes is not one whole MessagePack value ({type(error).__name__})."
        ) from error
    if type(items) is not list or not items or type(items[0]) is not int or items[0] not in _READERS:
        raise ProtocolError("A frame must be an array that starts with the number of a known message type.")
    counts, reader = _READERS[items[0]]
    if len(items) - 1 not in counts:
        raise ProtocolError(f"A message of type {items[0]} has {counts[0]} fields, got {len(items) - 1}.")
    return check(reader(items[1:]))
