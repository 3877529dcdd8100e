"""The codec: every message survives the trip, and nothing but a ProtocolError comes out of a bad frame."""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ciar.errors import InputError, ProtocolError
from ciar.ledger import DECIDERS
from ciar.protocol import (
    ERROR_CODES,
    MAX_FRAME_BYTES,
    MAX_PROMPT_CHARS,
    MAX_TOKENS,
    Cancel,
    Cost,
    Done,
    Draft,
    Error,
    LawRow,
    Message,
    Open,
    Opened,
    Patch,
    Settings,
    check,
    decode,
    encode,
)
from ciar.protocol.codec import DECIDER_COUNT

IDS = st.lists(
    st.one_of(st.integers(0, 255), st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1)), max_size=40
).map(tuple)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,30}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
POSITIONS = st.integers(0, 1000)
COUNTS = st.integers(0, 2**32 - 1)
UNIT = st.floats(0, 1)
COSTS = st.builds(Cost, passes=COUNTS, token_rows=st.integers(0, 2**53 - 1), cloud_ms=st.floats(0, 1e12))
SETTINGS = st.builds(
    Settings,
    strategy=NAMES,
    seed=st.integers(0, 2**64 - 1),
    image=COUNTS,
    guidance=st.floats(0, 1000),
    temperature=st.floats(0, 1000),
    top_k=COUNTS,
    top_p=st.floats(0, 1, exclude_min=True),
    prefix_rate=UNIT,
    window=st.integers(1, MAX_TOKENS),
    action=st.sampled_from(["replace", "verify"]),
    payload=st.sampled_from(["ids", "features"]),
    injection=st.booleans(),
    options=st.dictionaries(
        st.from_regex(r"[a-z][a-z0-9_]{0,20}", fullmatch=True),
        st.integers(-(2**53), 2**53) | st.floats(-1e12, 1e12) | st.sampled_from(["", "left", "a word"]),
        max_size=4,
    ).map(lambda found: tuple(found.items())),
)


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    ids = draw(IDS)
    certain = tuple(draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))))
    width = draw(st.integers(0, 4)) if ids else 0
    features = draw(st.binary(min_size=width * len(ids), max_size=width * len(ids)))
    want = 0 if ids else draw(st.integers(1, 500))
    return Draft(draw(COUNTS), draw(POSITIONS), ids, certain, want, features)


@st.composite
def patches(draw: st.DrawFn) -> Patch:
    ids = draw(IDS)
    decided = tuple(draw(st.lists(st.integers(0, 3), min_size=len(ids), max_size=len(ids))))
    return Patch(draw(COUNTS), draw(POSITIONS), ids, decided, draw(POSITIONS), draw(COSTS))


MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Open,
        backbone=NAMES,
        prompt=TEXTS,
        settings=SETTINGS,
        weights=NAMES | st.just(""),
        negative_prompt=TEXTS,
        history=IDS,
    ),
    st.builds(
        lambda pairs: Open(
            "emoji", "", Settings("ciar"), "", "", *(tuple(part) for part in zip(*pairs, strict=True))
        ),
        st.lists(st.tuples(COUNTS, st.integers(0, 3)), min_size=1, max_size=20),
    ),
    st.builds(
        Opened,
        session=NAMES,
        tokens=st.integers(1, MAX_TOKENS),
        vocab_size=st.integers(1, 2**32),
        max_frame_bytes=st.integers(1, 2**30),
        idle_timeout_s=st.floats(0.001, 1e6),
        warnings=st.lists(TEXTS, max_size=4).map(tuple),
    ),
    drafts(),
    patches(),
    st.builds(Done, ids=IDS, cost=COSTS),
    st.builds(Error, code=st.sampled_from(ERROR_CODES), message=TEXTS, retry_after_s=st.floats(0, 1e6)),
    st.just(Cancel()),
)

OPEN = Open("emoji", "a cat", Settings("ciar"))
DRAFT = Draft(3, 16, (1, 2, 4095), (True, False, True))
PATCH = Patch(3, 16, (1, 2, 7), (1, 2, 3), 19, Cost(1, 3, 2.5))
EXAMPLES: list[Message] = [
    OPEN,
    Opened("s1", 256, 4096, warnings=("cut",)),
    DRAFT,
    PATCH,
    Done((1, 2)),
    Error("busy", "Later.", 2.0),
    Cancel(),
]


@given(MESSAGES)
@settings(max_examples=120, deadline=None)
def test_every_message_survives_the_round_trip(message: Message) -> None:
    found = decode(encode(message))
    assert found == message
    assert type(found) is type(message)


@pytest.mark.parametrize("highest", [4095, 2**16 - 1, 2**16, 2**32 - 1])
def test_ids_at_the_edge_of_each_width(highest: int) -> None:
    assert decode(encode(Done((0, highest)))) == Done((0, highest))


def test_a_draft_of_16_ids_is_small() -> None:
    ids = tuple(range(4080, 4096))
    assert len(encode(Draft(255, 240, ids, (True, False) * 8))) <= 48
    assert len(encode(Patch(255, 240, ids, (1, 2) * 8, 256, Cost(1, 32, 12.5)))) <= 64
    assert len(encode(Done(tuple(range(256)), Cost(1, 32, 12.5)))) <= 2 * 256 + 20


def test_the_largest_picture_fits_a_frame() -> None:
    ids = (2**32 - 1,) * MAX_TOKENS
    message = Patch(0, 0, ids, (3,) * MAX_TOKENS, MAX_TOKENS)
    assert decode(encode(message)) == message


def test_two_bits_hold_every_decider() -> None:
    assert len(DECIDERS) == DECIDER_COUNT == 4


@given(st.binary(max_size=200))
@settings(max_examples=150, deadline=None)
@example(b"")
@example(b"\x91" * 2000)  # nesting beyond any reader's stack
@example(b"\xdd\xff\xff\xff\xff")  # an array that claims four thousand million items
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xc6\xff\xff\xff\xff")
@example(b"\xc7\x0c\xff" + b"\x00" * 12)  # a timestamp
@example(b"\xd4\xff\x00")
@example(b"\x91\x06\x00")  # a whole message and one byte more
@example(b"\x91\xc3")  # a type number that is true
def test_random_bytes_raise_only_protocol_errors(frame: bytes) -> None:
    try:
        message = decode(frame)
    except ProtocolError:
        return
    assert decode(encode(message)) == message


@given(MESSAGES, st.data())
@settings(max_examples=150, deadline=None)
def test_mutated_frames_raise_only_protocol_errors(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(frame) - 1)) if frame else 0
        kind = data.draw(st.sampled_from(["set", "insert", "delete", "cut"]))
        if kind == "set" and frame:
            frame[place] = data.draw(st.integers(0, 255))
        elif kind == "insert":
            frame.insert(place, data.draw(st.integers(0, 255)))
        elif kind == "delete" and frame:
            del frame[place]
        else:
            del frame[place:]
    try:
        found = decode(bytes(frame))
    except ProtocolError:
        return
    assert decode(encode(found)) == found


@st.composite
def values(draw: st.DrawFn) -> Any:
    leaves = st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), TEXTS, st.binary(max_size=20)
    )
    nested = st.lists(leaves, max_size=4) | st.dictionaries(TEXTS, leaves, max_size=4)
    return draw(leaves | nested | st.lists(nested, max_size=3))


@given(st.integers(0, 6), st.lists(values(), max_size=9))
@settings(max_examples=120, deadline=None)
def test_well_formed_nonsense_raises_only_protocol_errors(number: int, rest: list[Any]) -> None:
    try:
        found = decode(msgpack.packb([number, *rest]))
    except ProtocolError:
        return
    assert decode(encode(found)) == found


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_trailing_bytes_and_cut_frames_are_refused(message: Message) -> None:
    frame = encode(message)
    with pytest.raises(ProtocolError, match="not one whole"):
        decode(frame + b"\x00")
    for end in range(len(frame)):
        with pytest.raises(ProtocolError):
            decode(frame[:end])


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_wrong_number_of_fields_is_refused(message: Message) -> None:
    items = msgpack.unpackb(encode(message))
    for wrong in (items[:-1], [*items, 0], items * 2):
        with pytest.raises(ProtocolError):
            decode(msgpack.packb(wrong))


def test_unknown_missing_and_repeated_keys_are_refused() -> None:
    number, found = msgpack.unpackb(encode(OPEN))
    with pytest.raises(ProtocolError, match="1 are unknown"):
        decode(msgpack.packb([number, found | {"guidence": 3.0}]))
    with pytest.raises(ProtocolError, match="1 are missing"):
        decode(msgpack.packb([number, {key: found[key] for key in found if key != "prompt"}]))
    bad_settings = found["settings"] | {"tempreature": 1.0}
    with pytest.raises(ProtocolError, match="settings must have exactly"):
        decode(msgpack.packb([number, found | {"settings": bad_settings}]))
    error = msgpack.unpackb(encode(Error("busy", "Later.")))[1]
    pairs = b"".join(msgpack.packb(item) for pair in [*error.items(), ("code", "input")] for item in pair)
    with pytest.raises(ProtocolError, match="not one whole"):
        decode(b"\x92\x05\x84" + pairs)


BAD_SETTINGS: list[dict[str, Any]] = [
    {"strategy": ""},
    {"strategy": "two words"},
    {"strategy": "x" * 129},
    {"strategy": 3},
    {"seed": -1},
    {"seed": 2**64},
    {"seed": 1.0},
    {"seed": True},
    {"image": -1},
    {"guidance": -0.1},
    {"guidance": math.nan},
    {"guidance": math.inf},
    {"guidance": "3"},
    {"guidance": 1001},
    {"temperature": -1},
    {"temperature": math.nan},
    {"top_k": -1},
    {"top_k": 2.0},
    {"top_p": 0},
    {"top_p": 1.01},
    {"top_p": math.nan},
    {"prefix_rate": 1.5},
    {"window": 0},
    {"window": MAX_TOKENS + 1},
    {"action": "repair"},
    {"action": None},
    {"payload": "intervals"},
    {"injection": 1},
]


@pytest.mark.parametrize("change", BAD_SETTINGS, ids=str)
def test_bad_settings_are_refused_on_both_sides(change: dict[str, Any]) -> None:
    bad = dataclasses.replace(OPEN, settings=dataclasses.replace(OPEN.settings, **change))
    with pytest.raises(InputError, match=next(iter(change))):
        encode(bad)
    number, found = msgpack.unpackb(encode(OPEN))
    try:
        frame = msgpack.packb([number, found | {"settings": found["settings"] | change}])
    except OverflowError:
        return  # not expressible in a frame at all
    with pytest.raises(ProtocolError, match=next(iter(change))):
        decode(frame)


BAD_MESSAGES: list[tuple[Message, dict[str, Any]]] = [
    (OPEN, {"backbone": ""}),
    (OPEN, {"prompt": "x" * (MAX_PROMPT_CHARS + 1)}),
    (OPEN, {"prompt": b"cat"}),
    (OPEN, {"prompt": "\ud83d"}),
    (OPEN, {"history": (2**32,)}),
    (OPEN, {"history": [1]}),
    (OPEN, {"settings": {}}),
    (OPEN, {"history": (1, 2), "history_decided": (1,)}),
    (OPEN, {"history_decided": (1,)}),
    (OPEN, {"history": (1,), "history_decided": (4,)}),
    (EXAMPLES[1], {"tokens": 0}),
    (EXAMPLES[1], {"vocab_size": 0}),
    (EXAMPLES[1], {"idle_timeout_s": 0}),
    (EXAMPLES[1], {"session": "a b"}),
    (EXAMPLES[1], {"warnings": ("x",) * 33}),
    (EXAMPLES[1], {"warnings": (1,)}),
    (DRAFT, {"step": -1}),
    (DRAFT, {"step": 2**32}),
    (DRAFT, {"start": MAX_TOKENS}),
    (DRAFT, {"ids": (1, 2)}),
    (DRAFT, {"ids": (1, 2, -1)}),
    (DRAFT, {"ids": (1, 2, True)}),
    (DRAFT, {"certain": (True, False, 1)}),
    (DRAFT, {"want": 2}),
    (DRAFT, {"ids": (), "certain": ()}),
    (DRAFT, {"features": b"1234"}),
    (DRAFT, {"ids": (), "certain": (), "want": 2, "features": b"1"}),
    (PATCH, {"decided": (1, 2)}),
    (PATCH, {"decided": (1, 2, 4)}),
    (PATCH, {"horizon": -1}),
    (PATCH, {"cost": Cost(-1)}),
    (PATCH, {"cost": Cost(cloud_ms=math.nan)}),
    (PATCH, {"cost": None}),
    (EXAMPLES[5], {"code": "oops"}),
    (EXAMPLES[5], {"retry_after_s": -1}),
    (EXAMPLES[5], {"message": None}),
]


@pytest.mark.parametrize(("message", "change"), BAD_MESSAGES, ids=lambda part: str(part)[:40])
def test_bad_fields_are_refused(message: Message, change: dict[str, Any]) -> None:
    expected = InputError if isinstance(message, Open) else ProtocolError
    with pytest.raises(expected) as caught:
        encode(dataclasses.replace(message, **change))
    assert str(caught.value).endswith(".")


def test_error_sentences_never_repeat_texts() -> None:
    secret = "the secret prompt "
    with pytest.raises(InputError) as caught:
        encode(dataclasses.replace(OPEN, prompt=secret * 200))
    assert "secret" not in str(caught.value)
    with pytest.raises(ProtocolError) as refused:
        decode(msgpack.packb([0, secret]))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("ids", "certain"),
    [
        (b"\x03\x01\x02\x03", b"\x00"),  # a width that does not exist
        (b"\x02", b""),  # a width and nothing after it
        (b"\x02\x01\x00\x02", b"\x00"),  # half an id
        (b"\x02\x01\x00", b"\x02"),  # a flag for an id that is not there
        (b"\x02\x01\x00", b""),
        (b"\x02\x01\x00", b"\x00\x00"),
        ([1], b"\x00"),
        ("\x02\x01\x00", b"\x00"),
    ],
)
def test_badly_packed_ids_and_flags_are_refused(ids: object, certain: object) -> None:
    with pytest.raises(ProtocolError):
        decode(msgpack.packb([2, 0, 0, ids, certain, 0, b""]))


def test_whole_numbers_stand_for_reals_as_browsers_write_them() -> None:
    number, found = msgpack.unpackb(encode(OPEN))
    settings = found["settings"] | {"guidance": 3, "top_p": 1, "temperature": 1}
    message = decode(msgpack.packb([number, found | {"settings": settings}]))
    assert message == OPEN
    assert isinstance(message, Open)
    assert type(message.settings.guidance) is float


def test_size_limits_hold_in_both_directions() -> None:
    frame = encode(OPEN)
    assert decode(frame, limit=len(frame)) == OPEN
    with pytest.raises(ProtocolError, match="larger than the limit"):
        decode(frame, limit=len(frame) - 1)
    with pytest.raises(ProtocolError, match="larger than the limit"):
        encode(OPEN, limit=len(frame) - 1)
    huge = Draft(0, 0, (1,), (True,), features=b"\x00" * MAX_FRAME_BYTES)
    with pytest.raises(ProtocolError, match="larger than the limit"):
        encode(huge)


def test_only_messages_and_bytes_are_taken() -> None:
    with pytest.raises(ProtocolError, match="not a message"):
        check("open")  # type: ignore[type-var]
    with pytest.raises(ProtocolError, match="must be bytes"):
        decode("frame")  # type: ignore[arg-type]
    assert decode(memoryview(encode(Cancel()))) == Cancel()  # type: ignore[arg-type]


# --- options of strategies --------------------------------------------------------------------------


def settings_frame(**changes: Any) -> bytes:
    """A frame of ``Open`` whose settings map is changed; a value of None takes the field out."""
    number, found = msgpack.unpackb(encode(OPEN))
    changed = {k: v for k, v in (found["settings"] | changes).items() if v is not None}
    packed: bytes = msgpack.packb([number, found | {"settings": changed}])
    return packed


def test_settings_without_options_are_those_of_older_versions() -> None:
    """An older cloud reads a frame without options; a frame of an older device is read."""
    _, found = msgpack.unpackb(encode(OPEN))
    assert "options" not in found["settings"]
    assert decode(settings_frame()) == OPEN
    with_options = dataclasses.replace(OPEN.settings, options=(("allowance", 2.0), ("guess", "left")))
    _, found = msgpack.unpackb(encode(dataclasses.replace(OPEN, settings=with_options)))
    assert found["settings"]["options"] == {"allowance": 2.0, "guess": "left"}


@pytest.mark.parametrize(
    "options",
    [
        [],
        7,
        {"Allowance": 1.0},
        {"": 1.0},
        {"a" * 65: 1.0},
        {"a-b": 1.0},
        {"a": math.nan},
        {"a": math.inf},
        {"a": 1e13},
        {"a": 2**53 + 1},
        {"a": True},
        {"a": b"x"},
        {"a": [1]},
        {"a": "x" * 65},
        {f"a{i}": 1 for i in range(33)},
    ],
    ids=repr,
)
def test_options_that_are_refused(options: Any) -> None:
    with pytest.raises(ProtocolError):
        decode(settings_frame(options=options))


@pytest.mark.parametrize("options", [(("a", 1), ("a", 2)), (("a",),), ("ab",), [("a", 1)]])
def test_options_that_do_not_leave(options: Any) -> None:
    settings_ = dataclasses.replace(OPEN.settings, options=options)
    with pytest.raises(InputError):
        encode(dataclasses.replace(OPEN, settings=settings_))


def test_a_strategy_may_have_a_plus_in_its_name() -> None:
    message = dataclasses.replace(OPEN, settings=Settings("lantern++"))
    assert decode(encode(message)) == message


# --- laws and chances -------------------------------------------------------------------------------


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


HALVES = floats(math.log(0.5), math.log(0.5))
TOLD = Draft(3, 5, (7, 300), (False, False), log_probs=floats(-0.5, -2.0))
PATCHED = Patch(3, 5, (7,), (2,), 6, Cost(1, 2, 3.0), LawRow((4, 70000), HALVES))


@pytest.mark.parametrize(
    "message",
    [TOLD, PATCHED, dataclasses.replace(PATCHED, law=LawRow((), HALVES))],
    ids=["draft", "law", "law of all codes"],
)
def test_chances_and_laws_travel(message: Message) -> None:
    assert decode(encode(message)) == message


def test_without_chances_and_laws_frames_are_those_of_older_versions() -> None:
    for message, plain, more in (
        (TOLD, dataclasses.replace(TOLD, log_probs=b""), 1),
        (PATCHED, dataclasses.replace(PATCHED, law=LawRow()), 2),
    ):
        long, short = (msgpack.unpackb(encode(one)) for one in (message, plain))
        assert short == long[:-more]
        with pytest.raises(ProtocolError, match="fields, got"):
            decode(msgpack.packb([*long, *[0] * 9]))


@pytest.mark.parametrize(
    "log_probs",
    [
        *(b"", b"12345", "ab", None, floats(-1.0), floats(-1.0, -1.0, -1.0)),
        *(floats(-1.0, bad) for bad in (math.nan, 0.1, -math.inf)),
    ],
    ids=repr,
)
def test_chances_that_are_refused(log_probs: Any) -> None:
    """Known faults A2 and A3: NaN, a drawn token without any chance, numbers that are no probabilities."""
    message = dataclasses.replace(TOLD, log_probs=log_probs)
    if log_probs == b"":
        assert decode(encode(message)) == message
        return
    with pytest.raises(ProtocolError):
        encode(message)
    frame = msgpack.packb([*msgpack.unpackb(encode(TOLD))[:-1], log_probs])
    with pytest.raises(ProtocolError):
        decode(frame)


@pytest.mark.parametrize(
    "law",
    [
        LawRow((4, 5), floats(-1.0)),
        LawRow((5, 4), HALVES),
        LawRow((4, 4), HALVES),
        LawRow((4, 5), floats(math.log(0.5), math.log(0.6))),
        LawRow((4, 5), floats(0.0, math.nan)),
        LawRow((4, 5), floats(0.0, -math.inf)),
        LawRow((4, 5), b""),
        LawRow((), floats(-1.0)),
        (HALVES,),
    ],
    ids=repr,
)
def test_laws_that_are_refused(law: Any) -> None:
    """Known fault A2: a law must sum to 1."""
    with pytest.raises(ProtocolError, match=r"patch\.law"):
        check(dataclasses.replace(PATCHED, law=law))
