"""The picture's noise: ``noise(seed, image, position, token)`` is a pure function (DESIGN section 2).

A counter-based integer hash gives a 32-bit word for every key, and the word gives a Gumbel variate.
Both use only operations whose result is the same on every machine: 32-bit integer arithmetic that
wraps (JavaScript's ``Math.imul``, ``^``, ``>>>``) and float64 ``+ - * /``, each rounded once. The
platform's logarithm is not among them, so this module brings its own. One kernel, written with
operators alone, runs on NumPy arrays and on torch tensors; the bits agree because the steps do.

Knows nothing of laws, logits or sessions. Imports torch only inside :func:`gumbel_torch`.

The hash, for a port: all values are 32-bit words, ``mix`` is :func:`_mix`, ``^`` is exclusive or. ::

    (a, b) = (SALT_A, SALT_B)
    for word in (seed_low, seed_high, image, lane, position):
        a = mix(a ^ word)
        b = mix(b ^ a)
    word(token) = mix(mix(token ^ a) ^ b)

``(seed_low, seed_high) -> (a, b)`` is one to one, so two seeds never share a key; and for one
position, tokens have different words. The Gumbel variate of an unsigned word h is
``-log(-log(1 - v))`` with ``v = (h + 1/2) / 2**32``. The subtraction is exact, and small v give
large variates, so the upper tail, which decides an arg-max, is as fine as the word allows (to 22.9).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ciar.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

#: Lanes keep independent uses of one (seed, image, position, token) apart.
GUMBEL_LANE = 0
ACCEPT_LANE = 1
RESIDUAL_LANE = 2
#: Uniform variates of which a position may need any number; the token is the number of the draw.
FRESH_LANE = 3

#: Elements of one block of work: a float64 block and its few temporaries stay in the second-level cache.
BLOCK = 16384

#: Hexadecimal digits of the fractional part of pi, so that nobody has chosen them.
SALT_A = 0x243F6A88
SALT_B = 0x85A308D3

#: Odd multipliers of the mixer, a published low-bias pair (https://github.com/skeeto/hash-prospector),
#: written as the signed 32-bit numbers that ``Math.imul`` sees: 0x21F0AAAD and 0xD35A2D97.
MULTIPLIERS = (0x21F0AAAD, 0xD35A2D97 - (1 << 32))

#: Bits of sqrt(1/2) with the low word cleared; a port needs the high word of a float64 alone.
SQRT_HALF_BITS = 0x3FE6A09E << 32
LN2 = 0.6931471805599453
#: Coefficients of z, z**2, ..., z**7 in ``log((1 + s) / (1 - s)) / s - 2`` with z = s**2, a minimax
#: fit on the range below with error under 2**-58 (as in fdlibm's e_log.c, www.netlib.org/fdlibm).
LOG_COEFFICIENTS = (
    0.6666666666666735,
    0.3999999999940942,
    0.2857142874366239,
    0.22222198432149784,
    0.1818357216161805,
    0.15313837699209373,
    0.14798198605116586,
)

# A NumPy array or a torch tensor: the kernel uses only what both understand in the same way.
_Array = Any


class _Backend(NamedTuple):
    """What differs between NumPy and torch: the names of the types and the call that converts."""

    cast: Callable[[_Array, Any], _Array]
    int64: Any
    float32: Any
    float64: Any


def _astype(x: _Array, dtype: Any) -> _Array:
    return x.astype(dtype)


def _to(x: _Array, dtype: Any) -> _Array:
    return x.to(dtype)


_NUMPY = _Backend(_astype, np.int64, np.float32, np.float64)


def gumbel(
    seed: int, image: int, positions: ArrayLike, tokens: ArrayLike, lane: int = GUMBEL_LANE
) -> NDArray[np.float32]:
    """Gumbel variates (location 0, scale 1) of any keys.

    Args:
        seed: 0 to 2**64 - 1.
        image: 0 to 2**32 - 1; index of the picture among those of one request.
        positions: integers, any shape; taken modulo 2**32.
        tokens: integers, a shape that broadcasts with ``positions``; taken modulo 2**32.
        lane: 0 to 2**32 - 1; which use of the key.

    Returns:
        float32, the broadcast shape; finite, between -3.2 and 22.9.

    Raises:
        InputError: a number is out of range, or positions or tokens are not integers.
    """
    words = hash_words(seed, image, positions, tokens, lane)
    result = np.empty(words.shape, dtype=np.float32)
    flat_words, flat_result = words.reshape(-1), result.reshape(-1)
    for start in range(0, flat_words.size, BLOCK):
        block = slice(start, start + BLOCK)
        flat_result[block] = _gumbel_of_words(flat_words[block], _NUMPY)
    return result


def gumbel_torch(seed: int, image: int, positions: Tensor, tokens: Tensor, lane: int = GUMBEL_LANE) -> Tensor:
    """The same bits as :func:`gumbel`, computed on the tensors' device.

    Call it outside ``torch.compile``: a compiler may fuse a multiplication with an addition, which
    rounds once where two are asked for. Devices without float64 (``mps``) get the numbers from the CPU.

    Args:
        seed: 0 to 2**64 - 1.
        image: 0 to 2**32 - 1.
        positions: integer tensor, any shape.
        tokens: integer tensor, a shape that broadcasts with ``positions``, on the same device.
        lane: 0 to 2**32 - 1.

    Returns:
        float32 tensor of the broadcast shape, on the device of ``positions``.

    Raises:
        InputError: a number is out of range, or positions or tokens are not integers.
    """
    import torch

    for name, tensor in (("positions", positions), ("tokens", tokens)):
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
            raise InputError(f"{name} must be integers, not {tensor.dtype}; convert them with .long().")
    device = positions.device
    if device.type == "mps":
        positions, tokens = positions.cpu(), tokens.cpu()
    backend = _Backend(_to, torch.int64, torch.float32, torch.float64)
    # Narrowing to int32 wraps, which is the reduction modulo 2**32.
    key = _position_keys(_image_key(seed, image, lane), positions.to(torch.int64).to(torch.int32))
    words = _token_words(key, tokens.to(torch.int64).to(torch.int32))
    if words.device.type != "cpu":
        return _gumbel_of_words(words, backend)
    result = torch.empty(words.shape, dtype=torch.float32)
    flat_words, flat_result = words.reshape(-1), result.view(-1)
    for start in range(0, flat_words.numel(), BLOCK):
        block = slice(start, start + BLOCK)
        flat_result[block] = _gumbel_of_words(flat_words[block], backend)
    return result.to(device)


def gumbel_table(
    seed: int, image: int, positions: ArrayLike, vocab_size: int, lane: int = GUMBEL_LANE
) -> NDArray[np.float32]:
    """Gumbel variates of all tokens at many positions, the fast way; same bits as :func:`gumbel`.

    Args:
        seed: 0 to 2**64 - 1.
        image: 0 to 2**32 - 1.
        positions: integers, one axis (a ``range`` will do).
        vocab_size: at least 1; tokens run from 0 to this, exclusive.
        lane: 0 to 2**32 - 1.

    Returns:
        float32 [len(positions), vocab_size].

    Raises:
        InputError: a number is out of range, or ``positions`` is not one axis of integers.
    """
    where = _int32(positions, "positions")
    if where.ndim != 1:
        raise InputError(f"positions must have one axis, not {where.ndim}; pass a range or a list.")
    if vocab_size < 1:
        raise InputError(f"vocab_size must be at least 1, not {vocab_size}.")
    first, second = _position_keys(_image_key(seed, image, lane), where[:, None])
    tokens = np.arange(vocab_size, dtype=np.int32)
    result = np.empty((where.size, vocab_size), dtype=np.float32)
    rows = max(1, BLOCK // vocab_size)
    for row in range(0, where.size, rows):
        key = (first[row : row + rows], second[row : row + rows])
        for column in range(0, vocab_size, BLOCK):
            words = _token_words(key, tokens[column : column + BLOCK])
            result[row : row + rows, column : column + BLOCK] = _gumbel_of_words(words, _NUMPY)
    return result


def uniform(
    seed: int, image: int, positions: ArrayLike, tokens: ArrayLike, lane: int = ACCEPT_LANE
) -> NDArray[np.float64]:
    """Uniform variates in (0, 1), never 0 or 1: ``(h + 1/2) / 2**32``.

    Args:
        seed: 0 to 2**64 - 1.
        image: 0 to 2**32 - 1.
        positions: integers, any shape; taken modulo 2**32.
        tokens: integers, a shape that broadcasts with ``positions``; taken modulo 2**32.
        lane: 0 to 2**32 - 1; not the lane of the Gumbel variates, or the two would be one.

    Returns:
        float64, the broadcast shape.

    Raises:
        InputError: a number is out of range, or positions or tokens are not integers.
    """
    words = hash_words(seed, image, positions, tokens, lane)
    return (words.view(np.uint32).astype(np.float64) + 0.5) * 2.0**-32


def hash_words(
    seed: int, image: int, positions: ArrayLike, tokens: ArrayLike, lane: int = GUMBEL_LANE
) -> NDArray[np.int32]:
    """The 32-bit words of any keys, as signed numbers; see :func:`gumbel` for the arguments.

    Returns:
        int32, the broadcast shape.
    """
    key = _position_keys(_image_key(seed, image, lane), _int32(positions, "positions"))
    # A result without axes would be a NumPy scalar, whose arithmetic warns when it wraps.
    words: NDArray[np.int32] = np.asarray(_token_words(key, _int32(tokens, "tokens")))
    return words


def _int32(values: ArrayLike, name: str) -> NDArray[np.int32]:
    """Integers modulo 2**32, as signed 32-bit numbers."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise InputError(f"{name} must be integers that fit 64 bits, not {array.dtype}.")
    return array.astype(np.int64).astype(np.int32)


def _bounded(value: int, bits: int, name: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise InputError(f"{name} must be an integer, not {type(value).__name__}.") from None
    if not 0 <= number < 1 << bits:
        raise InputError(f"{name} must lie between 0 and 2**{bits} - 1; {number} does not.")
    return number


def _signed(word: int) -> int:
    """The 32-bit word as a signed number, as ``word | 0`` gives it in JavaScript."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def _mix(x: _Array) -> _Array:
    """Mixes int32 words one to one, in place: every input bit flips every output bit half the time.

    The mask after each shift makes it a logical one (``>>>``) although the words are signed.
    """
    x ^= (x >> 16) & 0xFFFF
    x *= MULTIPLIERS[0]
    x ^= (x >> 15) & 0x1FFFF
    x *= MULTIPLIERS[1]
    x ^= (x >> 15) & 0x1FFFF
    return x


def _mix_word(word: int) -> int:
    """:func:`_mix` of one word, as Python integers; signed in, signed out."""
    x = word & 0xFFFFFFFF
    x ^= x >> 16
    x = x * MULTIPLIERS[0] & 0xFFFFFFFF
    x ^= x >> 15
    x = x * MULTIPLIERS[1] & 0xFFFFFFFF
    x ^= x >> 15
    return _signed(x)


def _image_key(seed: int, image: int, lane: int) -> tuple[int, int]:
    """The two key words that are the same for a whole picture, signed."""
    seed = _bounded(seed, 64, "seed")
    image = _bounded(image, 32, "image")
    lane = _bounded(lane, 32, "lane")
    first, second = SALT_A, SALT_B
    for word in (seed & 0xFFFFFFFF, seed >> 32, image, lane):
        first = _mix_word(first ^ word)
        second = _mix_word(second ^ first)
    return _signed(first), _signed(second)


def _position_keys(key: tuple[int, int], positions: _Array) -> tuple[_Array, _Array]:
    """The two key words of each position; ``positions`` are int32."""
    first = _mix(positions.reshape(-1) ^ key[0])
    second = _mix(first ^ key[1])
    return first.reshape(positions.shape), second.reshape(positions.shape)


def _token_words(key: tuple[_Array, _Array], tokens: _Array) -> _Array:
    """int32 words of (position, token); the shapes of key and tokens broadcast."""
    first, second = key
    mixed = tokens ^ first
    shape = mixed.shape
    mixed = _mix(mixed.reshape(-1)).reshape(shape)
    mixed ^= second
    return _mix(mixed.reshape(-1)).reshape(shape)


def _log(x: _Array, backend: _Backend) -> _Array:
    """Natural logarithm of positive, finite, normal float64 numbers; uses ``x`` up.

    ``x = 2**k * m`` with m between sqrt(1/2) and sqrt(2); ``s = (m - 1) / (m + 1)``; then
    ``log(x) = k * LN2 + s * (2 + c1 * z + c2 * z**2 + ...)`` with ``z = s**2``, in exactly this order.
    """
    bits = x.view(backend.int64)  # the same memory: writing bits changes x
    exponent = bits - SQRT_HALF_BITS
    exponent >>= 52
    bits -= exponent << 52  # x is now m
    above = x + 1.0
    x -= 1.0
    x /= above  # x is now s
    z = x * x
    result = z * LOG_COEFFICIENTS[-1]
    for coefficient in LOG_COEFFICIENTS[-2::-1]:
        result += coefficient
        result *= z
    result += 2.0
    result *= x
    scaled = backend.cast(exponent, backend.float64)
    scaled *= LN2
    result += scaled
    return result


def _gumbel_of_words(words: _Array, backend: _Backend) -> _Array:
    """float32 Gumbel variates of int32 words."""
    # With the top bit flipped the signed word is h - 2**31, and 1 - v = (2**31 - 1/2 - (h - 2**31)) / 2**32.
    rest = backend.cast(words ^ -(1 << 31), backend.float64)
    rest *= -(2.0**-32)
    rest += 0.5 - 2.0**-33
    exponential = _log(rest, backend)
    exponential *= -1.0
    result = backend.cast(_log(exponential, backend), backend.float32)
    result *= -1.0
    return result
