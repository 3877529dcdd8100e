"""Drafts that are trees, and patches that carry the cloud's features."""

from __future__ import annotations

from dataclasses import replace

import msgpack  # type: ignore[import-untyped]
import pytest

from ciar.errors import ProtocolError
from ciar.protocol import MAX_TOKENS, Draft, Patch, decode, encode

TREE = Draft(3, 5, (7, 300, 7, 9), (False,) * 4, parents=(-1, -1, 1, 2))
PATCH = Patch(3, 5, (7, 300), (2, 3), 7)


def test_trees_and_features_travel() -> None:
    for message in (TREE, replace(PATCH, features=b"\x00\x01"), replace(PATCH, ids=(), decided=())):
        assert decode(encode(message)) == message


def test_what_positions_a_draft_is_about() -> None:
    assert TREE.span == 3
    assert replace(TREE, parents=()).span == 4
    assert Draft(0, 3, want=7).span == 7


def test_what_a_tree_and_features_weigh() -> None:
    """Two bytes a parent beside the two of its token, and the features themselves."""
    plain = replace(TREE, parents=())
    assert 4 * 2 <= len(encode(TREE)) - len(encode(plain)) <= 4 * 2 + 8
    many = replace(PATCH, features=bytes(70_000))
    assert 70_000 <= len(encode(many)) - len(encode(PATCH)) <= 70_000 + 10
    assert len(msgpack.unpackb(encode(plain))) == 7  # frames without are those of older versions
    assert len(msgpack.unpackb(encode(PATCH))) == 9


@pytest.mark.parametrize(
    ("parents", "words"),
    [
        ((-1, -1), "2 items for 4 ids"),
        ((0, -1, -1, -1), "come before"),
        ((-1, -2, 0, 0), "come before"),
        ((-1, 0, 1, 3), "come before"),
        ((-1, 0, 1, True), "come before"),
    ],
)
def test_parents_that_make_no_tree_are_refused(parents: tuple[int, ...], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        encode(replace(TREE, parents=parents))


def test_features_are_bytes() -> None:
    with pytest.raises(ProtocolError, match=r"patch\.features must be bytes"):
        encode(replace(PATCH, features="ab"))  # type: ignore[arg-type]


def test_a_tree_ends_where_its_longest_path_does() -> None:
    last = replace(TREE, start=MAX_TOKENS - 3)
    assert decode(encode(last)) == last
    with pytest.raises(ProtocolError, match="draft ends at position"):
        encode(replace(TREE, start=MAX_TOKENS - 2))
