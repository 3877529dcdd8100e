"""Fields as packed bytes: token ids and small numbers.

Each check names the field and what is possible, and never repeats text that it was given, since texts
may be prompts and the sentence may be logged.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ciar.errors import ProtocolError


def shown(value: object) -> str:
    """A value for an error sentence: numbers as they are, everything else by its type."""
    is_short_number = type(value) in (int, float, bool) and len(repr(value)) < 40
    return repr(value) if is_short_number else f"a {type(value).__name__}"


def as_bytes(value: object, name: str) -> bytes:
    """The value, if it is bytes."""
    if type(value) is not bytes:
        raise ProtocolError(f"{name} must be bytes, got {shown(value)}.")
    return value


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as a width and numbers of that width; none are no bytes."""
    if not ids:
        return b""
    width, letter = (2, "H") if max(ids) < 1 << 16 else (4, "I")
    return bytes((width,)) + struct.pack(f"<{len(ids)}{letter}", *ids)


def unpack_ids(value: object, name: str) -> tuple[int, ...]:
    """What :func:`pack_ids` packed."""
    blob = as_bytes(value, name)
    if not blob:
        return ()
    letter = {2: "H", 4: "I"}.get(blob[0])
    if letter is None or len(blob) == 1 or (len(blob) - 1) % blob[0]:
        raise ProtocolError(f"{name} must be a width of 2 or 4 and ids of that many bytes each.")
    return struct.unpack(f"<{(len(blob) - 1) // blob[0]}{letter}", blob[1:])


def pack_small(values: Sequence[int], bits: int) -> bytes:
    """Pack values below ``2**bits``, lowest bits of each byte first; ``bits`` divides 8."""
    per_byte = 8 // bits
    packed = bytearray(-(-len(values) // per_byte))
    for index, value in enumerate(values):
        packed[index // per_byte] |= value << (index % per_byte * bits)
    return bytes(packed)


def unpack_small(value: object, name: str, bits: int, count: int) -> tuple[int, ...]:
    """What :func:`pack_small` packed, of ``count`` values."""
    blob = as_bytes(value, name)
    per_byte = 8 // bits
    if len(blob) != -(-count // per_byte):
        raise ProtocolError(f"{name} has {len(blob)} bytes, which is not the size for {count} ids.")
    mask = (1 << bits) - 1
    values = [byte >> shift & mask for byte in blob for shift in range(0, 8, bits)]
    if any(values[count:]):
        raise ProtocolError(f"{name} has bits set beyond its last id.")
    return tuple(values[:count])
