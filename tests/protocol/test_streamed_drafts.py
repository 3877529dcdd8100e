"""What streamed drafts say beside their tokens: levels, and the horizon that the device waits for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from ciar.errors import ProtocolError
from ciar.protocol import Draft, decode, encode

PLAIN = Draft(3, 5, (7, 300), (False, True))


@pytest.mark.parametrize(
    "values", [{"levels": b"\x00\xff"}, {"until": 7}, {"levels": b"\x01\x02", "until": 65536}]
)
def test_levels_and_until_travel(values: dict[str, Any]) -> None:
    message = replace(PLAIN, **values)
    assert decode(encode(message)) == message


def test_without_them_a_frame_is_that_of_older_versions() -> None:
    assert len(msgpack.unpackb(encode(PLAIN))) == 7
    long = msgpack.unpackb(encode(replace(PLAIN, until=7)))
    assert msgpack.unpackb(encode(PLAIN)) == long[:7]
    for wrong in (long[:9], [*long, 0, 0]):
        with pytest.raises(ProtocolError, match="fields, got"):
            decode(msgpack.packb(wrong))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"levels": b"\x00"}, "one byte for each of 2 ids"),
        ({"levels": "ab"}, "must be bytes"),
        ({"until": -1}, "from 0 to 65536"),
        ({"until": True}, "whole number"),
        ({"until": 65537}, "from 0 to 65536"),
    ],
)
def test_bad_ones_are_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        encode(replace(PLAIN, **values))
