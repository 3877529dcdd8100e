"""The noise: the same bits everywhere, and as good as random."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ciar import noise
from ciar.errors import InputError

GOLDEN = json.loads((Path(__file__).parent / "golden" / "noise.json").read_text())
WORD = 0xFFFFFFFF
EULER = 0.5772156649015329

seeds = st.one_of(st.sampled_from([0, 1, WORD, WORD + 1, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))
words32 = st.one_of(st.sampled_from([0, 1, 2**31 - 1, 2**31, WORD]), st.integers(0, WORD))


# A second implementation, one number at a time in plain Python: what a port to another language does.


def reference_mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x21F0AAAD & WORD
    x ^= x >> 15
    x = x * 0xD35A2D97 & WORD
    return x ^ x >> 15


def reference_word(seed: int, image: int, position: int, token: int, lane: int) -> int:
    a, b = 0x243F6A88, 0x85A308D3
    for word in (seed & WORD, seed >> 32, image, lane, position):
        a = reference_mix(a ^ word)
        b = reference_mix(b ^ a)
    return reference_mix(reference_mix(token ^ a) ^ b)


def reference_log(x: float) -> float:
    mantissa, exponent = math.frexp(x)
    if mantissa < struct.unpack(">d", bytes.fromhex("3fe6a09e00000000"))[0]:
        mantissa, exponent = 2.0 * mantissa, exponent - 1
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    total = z * noise.LOG_COEFFICIENTS[6]
    for i in range(5, -1, -1):
        total = (total + noise.LOG_COEFFICIENTS[i]) * z
    return (total + 2.0) * s + exponent * noise.LN2


def reference_gumbel(word: int) -> np.float32:
    v = (word + 0.5) / 2**32
    return np.float32(-reference_log(-reference_log(1.0 - v)))


def bits(x: Any) -> np.ndarray:
    return np.asarray(x, dtype=np.float32).view(np.uint32)


@settings(deadline=None)
@given(seeds, words32, words32, words32, words32)
def test_words_and_variates_are_those_of_the_reference(
    seed: int, image: int, position: int, token: int, lane: int
) -> None:
    word = reference_word(seed, image, position, token, lane)
    assert int(noise.hash_words(seed, image, position, token, lane)) & WORD == word
    assert bits(noise.gumbel(seed, image, position, token, lane)) == bits(reference_gumbel(word))
    assert float(noise.uniform(seed, image, position, token, lane)) == (word + 0.5) / 2**32


@settings(deadline=None)
@given(
    seeds,
    words32,
    words32,
    st.lists(words32, min_size=1, max_size=9),
    st.lists(words32, min_size=1, max_size=9),
)
def test_numpy_and_torch_give_the_same_bits(
    seed: int, image: int, lane: int, positions: list[int], tokens: list[int]
) -> None:
    ours = noise.gumbel(seed, image, np.array(positions)[:, None], np.array(tokens), lane)
    theirs = noise.gumbel_torch(seed, image, torch.tensor(positions)[:, None], torch.tensor(tokens), lane)
    assert theirs.dtype == torch.float32
    assert np.array_equal(bits(ours), bits(theirs.numpy()))


@settings(max_examples=20, deadline=None)
@given(st.lists(words32, min_size=1, max_size=200))
def test_the_kernel_gives_the_same_bits_for_any_word(words: list[int]) -> None:
    signed = np.array(words, dtype=np.uint32).view(np.int32)
    backend = noise._Backend(noise._to, torch.int64, torch.float32, torch.float64)
    ours = noise._gumbel_of_words(signed.copy(), noise._NUMPY)
    theirs = noise._gumbel_of_words(torch.from_numpy(signed.copy()), backend)
    assert np.array_equal(bits(ours), bits(theirs.numpy()))
    assert np.array_equal(bits(ours), bits([reference_gumbel(word) for word in words]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_an_accelerator_gives_the_same_bits() -> None:
    positions, tokens = torch.arange(256).unsqueeze(1), torch.arange(4096)
    there = noise.gumbel_torch(5, 1, positions.cuda(), tokens.cuda())
    assert there.is_cuda
    assert np.array_equal(bits(there.cpu().numpy()), bits(noise.gumbel_table(5, 1, range(256), 4096)))


@pytest.mark.parametrize(("count", "vocab"), [(1, 1), (3, 5), (7, 4096), (2, 16385), (9, 40000), (0, 8)])
def test_the_table_is_the_same_noise(count: int, vocab: int) -> None:
    positions = range(11, 11 + count)
    table = noise.gumbel_table(3, 4, positions, vocab)
    assert table.shape == (count, vocab)
    assert np.array_equal(table, noise.gumbel(3, 4, np.arange(11, 11 + count)[:, None], np.arange(vocab)))
    where = torch.arange(11, 11 + count).unsqueeze(1)
    assert np.array_equal(table, noise.gumbel_torch(3, 4, where, torch.arange(vocab)).numpy())


def test_golden_vectors() -> None:
    assert len(GOLDEN["keys"]) >= 20
    for row in GOLDEN["keys"]:
        key = (int(row["seed"]), row["image"], row["position"], row["token"], row["lane"])
        assert int(noise.hash_words(*key)) & WORD == row["word"], row
        assert int(bits(noise.gumbel(*key))) == row["gumbel_bits"], row
        assert float(noise.uniform(*key)) == row["uniform"], row
    edges = np.array([row["word"] for row in GOLDEN["words"]], dtype=np.uint32).view(np.int32)
    expected = [row["gumbel_bits"] for row in GOLDEN["words"]]
    assert bits(noise._gumbel_of_words(edges, noise._NUMPY)).tolist() == expected


def test_variates_are_accurate_to_float32_in_both_tails() -> None:
    rng = np.random.default_rng(0)
    words = np.concatenate([np.arange(1000), WORD - np.arange(1000), rng.integers(0, WORD, 100_000)])
    ours = noise._gumbel_of_words(words.astype(np.uint32).view(np.int32), noise._NUMPY)
    exact = -np.log(-np.log1p(-(words + 0.5) / 2**32))
    assert np.abs(ours - exact).max() <= 2.0**-20  # half a unit in the last place at 22.9
    assert ours.max() == np.float32(-math.log(-math.log1p(-(2.0**-33))))  # 22.87, finite
    assert ours.min() == np.float32(-math.log(33 * math.log(2)))  # -3.13


def test_scalars_and_empty_arrays() -> None:
    assert noise.gumbel(1, 0, 5, 6).shape == ()
    assert noise.gumbel(1, 0, [], [1]).shape == (0,)
    assert noise.gumbel_torch(1, 0, torch.tensor(5), torch.tensor(6)).item() == noise.gumbel(1, 0, 5, 6)
    wrapped = noise.gumbel(1, 0, np.array([-1]), np.uint64(2**32 + 3))
    assert wrapped == noise.gumbel(1, 0, WORD, 3)


def test_arguments_are_not_written_to() -> None:
    positions, tokens = np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32)
    noise.gumbel(1, 0, positions, tokens)
    there = torch.arange(4, dtype=torch.int32)
    noise.gumbel_torch(1, 0, there, there)
    noise.gumbel_torch(1, 0, there[:1], there)
    for kept in (positions, tokens, there.numpy()):
        assert kept.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, "7"])
def test_a_seed_out_of_range_is_refused(seed: Any) -> None:
    for call in (noise.gumbel, noise.uniform, noise.gumbel_table):
        with pytest.raises(InputError, match="seed"):
            call(seed, 0, [0], 1)
    with pytest.raises(InputError, match="seed"):
        noise.gumbel_torch(seed, 0, torch.tensor([0]), torch.tensor([0]))


def test_other_bad_arguments_are_refused() -> None:
    with pytest.raises(InputError, match="image"):
        noise.gumbel(0, -1, 0, 0)
    with pytest.raises(InputError, match="lane"):
        noise.gumbel(0, 0, 0, 0, lane=2**32)
    with pytest.raises(InputError, match="positions"):
        noise.gumbel(0, 0, 0.5, 0)
    with pytest.raises(InputError, match="tokens"):
        noise.gumbel_torch(0, 0, torch.tensor(0), torch.tensor(0.5))
    with pytest.raises(InputError, match="vocab_size"):
        noise.gumbel_table(0, 0, range(2), 0)
    with pytest.raises(InputError, match="one axis"):
        noise.gumbel_table(0, 0, [[1, 2]], 4)


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, ciar.noise; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# As good as random. All keys are fixed, so these either hold or do not.


@pytest.fixture(scope="module")
def table() -> np.ndarray:
    return noise.gumbel_table(20240601, 0, range(256), 4096)


def test_words_are_uniform() -> None:
    words = noise.hash_words(0, 0, np.arange(256)[:, None], np.arange(4096)).view(np.uint32).reshape(-1)
    for shift in range(0, 32, 8):
        counts = np.bincount((words >> shift) & 255, minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-3, shift


def test_variates_are_gumbel(table: np.ndarray) -> None:
    assert stats.kstest(table.reshape(-1)[:200_000], "gumbel_r").pvalue > 1e-3
    assert table.mean(dtype=np.float64) == pytest.approx(EULER, abs=4 * math.pi / math.sqrt(6 * table.size))
    assert table.var(dtype=np.float64) == pytest.approx(math.pi**2 / 6, abs=0.02)
    # Columns and rows on their own, too: no token and no position is favoured.
    for axis in (0, 1):
        means = (table.mean(axis, dtype=np.float64) - EULER) * math.sqrt(table.shape[axis] * 6) / math.pi
        assert stats.kstest(means, "norm").pvalue > 1e-3


def test_uniform_variates_are_uniform_and_another_lane() -> None:
    keys = (9, 2, np.arange(64)[:, None], np.arange(1024))
    values = noise.uniform(*keys).reshape(-1)
    assert 0.0 < values.min() < values.max() < 1.0
    assert stats.kstest(values, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(values, noise.gumbel(*keys).reshape(-1))[0, 1]) < 4.5 / math.sqrt(values.size)
    assert len({noise.GUMBEL_LANE, noise.ACCEPT_LANE, noise.RESIDUAL_LANE}) == 3


def test_neighbouring_keys_are_independent(table: np.ndarray) -> None:
    seed, positions, vocab = 20240601, range(256), 4096
    neighbours = {
        "seed + 1": noise.gumbel_table(seed + 1, 0, positions, vocab),
        "seed, high word": noise.gumbel_table(seed + 2**32, 0, positions, vocab),
        "image + 1": noise.gumbel_table(seed, 1, positions, vocab),
        "lane 1": noise.gumbel_table(seed, 0, positions, vocab, lane=1),
        "lane 2": noise.gumbel_table(seed, 0, positions, vocab, lane=2),
        "seed + 1, image - 1 swapped": noise.gumbel_table(1, seed, positions, vocab),
        "position + 1": np.roll(table, 1, axis=0),
        "token + 1": np.roll(table, 1, axis=1),
        "one row of 16 up": np.roll(table, 16, axis=0),
        "transposed": table[:, :256].T,
    }
    for name, other in neighbours.items():
        mine = table[:, : other.shape[1]]
        for transform in (np.asarray, np.abs, lambda x: np.exp(-x)):
            a, b = transform(mine).reshape(-1), transform(other).reshape(-1)
            if name == "transposed":  # a diagonal correlates with itself
                off = ~np.eye(256, dtype=bool).reshape(-1)
                a, b = a[off], b[off]
            assert abs(np.corrcoef(a, b)[0, 1]) < 5.0 / math.sqrt(a.size), name


def test_every_input_bit_flips_every_output_bit_half_the_time() -> None:
    rng = np.random.default_rng(1)
    count = 8192
    positions, tokens = rng.integers(0, 2**32, (2, count))
    small_positions, small_tokens = rng.integers(0, 256, count), rng.integers(0, 4096, count)
    seed, image, lane = 12345, 3, 0

    def check(a: np.ndarray, b: np.ndarray, name: str) -> None:
        flips = (((a ^ b).view(np.uint32)[:, None] >> np.arange(32, dtype=np.uint32)) & 1).mean(0)
        assert np.abs(flips - 0.5).max() < 0.032, name  # 5.8 standard errors; 12,288 of these are looked at

    for where, what in ((positions, tokens), (small_positions, small_tokens)):
        base = noise.hash_words(seed, image, where, what, lane)
        for bit in range(64):
            check(base, noise.hash_words(seed ^ 1 << bit, image, where, what, lane), f"seed {bit}")
        for bit in range(32):
            check(base, noise.hash_words(seed, image ^ 1 << bit, where, what, lane), f"image {bit}")
            check(base, noise.hash_words(seed, image, where, what, lane ^ 1 << bit), f"lane {bit}")
            check(base, noise.hash_words(seed, image, where ^ (1 << bit), what, lane), f"position {bit}")
            check(base, noise.hash_words(seed, image, where, what ^ (1 << bit), lane), f"token {bit}")


def test_the_arg_max_follows_the_law() -> None:
    law = np.random.default_rng(2).dirichlet(np.full(24, 0.5))
    draws = 100_000
    choice = (np.log(law) + noise.gumbel_table(77, 0, range(draws), law.size)).argmax(1)
    expected = law * draws
    enough = expected >= 5
    observed = np.bincount(choice, minlength=law.size)
    pooled = [np.append(x[enough], x[~enough].sum() + 1e-9) for x in (observed, expected)]
    assert stats.chisquare(pooled[0], pooled[1] * pooled[0].sum() / pooled[1].sum()).pvalue > 1e-3


def test_the_arg_max_follows_the_law_over_seeds_and_joint_over_positions() -> None:
    law = np.array([0.5, 0.3, 0.15, 0.05])
    pairs = np.zeros((4, 4))
    for seed in range(4000):
        first, second = (np.log(law) + noise.gumbel_table(seed, 0, range(2), 4)).argmax(1)
        pairs[first, second] += 1
    assert stats.chisquare(pairs.reshape(-1), np.outer(law, law).reshape(-1) * 4000).pvalue > 1e-3


def test_within_a_position_no_two_tokens_share_a_word() -> None:
    words = noise.hash_words(8, 0, 3, np.arange(100_000))
    assert np.unique(words).size == 100_000
