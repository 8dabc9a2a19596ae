"""Random numbers by place: the same for every split, and random."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distcell.graph import Box
from distcell.layout import Layout, Part
from distcell.mesh import Mesh
from distcell.random import keep_mask, stream_of, uniform
from distcell.random.bits import (
    Lattice,
    _absorb_int,
    _absorb_tensor,
    derive_keys,
    fill,
    random_words,
)
from distcell.random.ops import _to_double, _to_float

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1
MESH = Mesh.parse("dp=2 tp=3 ep=2")
KEY = torch.tensor([7, 3, 1])
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def words_of(count: int, *key: int, stream: int = 1, offset: int = 0) -> torch.Tensor:
    """32-bit words, 0 to 2**32 - 1, as int64."""
    keys = derive_keys(torch.tensor(key or (7, 3, 1)), stream)
    words = random_words(Lattice((count,), (1,), offset), keys, torch.device("cpu"))
    return words.to(torch.int64) & MASK32


def word_in_python(index: int, key: list[int], stream: int, word: int = 0) -> int:
    """The same, of one element, written down once more with unbounded integers."""
    factor, state = 0x1E3779B97F4A7C15, 0

    def absorb(state: int, part: int) -> int:
        state = ((state ^ part) * factor) & MASK64
        state = ((state ^ (state >> 32)) * factor) & MASK64
        return state ^ (state >> 29)

    for part in (*key, stream, word):
        state = absorb(state, part & MASK64)
    keys = (state & MASK32, state >> 32, absorb(state, 1) & MASK32)
    low, high = index & MASK32, index >> 32
    rounds = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
    for number, (shift, multiplier) in enumerate(rounds):
        low = (low + keys[number]) & MASK32
        low = ((low ^ (low >> shift)) * multiplier) & MASK32
        if number == 0:
            low ^= (high * 0x2C1B3C6D) & MASK32
    return low ^ (low >> 14)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    axes = draw(st.permutations(["dp", "tp", "ep"]))
    dims = []
    for _ in range(draw(st.integers(0, 3))):
        parts = []
        for _ in range(draw(st.integers(1, 2))):
            taken = [axes.pop() for _ in range(draw(st.integers(0, min(2, len(axes)))))]
            parts.append(Part(draw(st.integers(0, 7)), tuple(taken)))
        dims.append(tuple(parts))
    return Layout(tuple(dims))


@pytest.mark.slow
@given(layouts(), st.sampled_from(DTYPES))
def test_every_rank_makes_its_piece_of_the_global_tensor(
    layout: Layout, dtype: torch.dtype
) -> None:
    whole = uniform(KEY, 5, layout.shape, dtype=dtype)
    mask = keep_mask(KEY, 5, 0.6, layout.shape)
    for rank in range(MESH.size):
        shape, box = layout.local_shape(MESH, rank), Box(layout).at(MESH, MESH.coords(rank))
        piece = uniform(KEY, 5, shape, box, dtype=dtype)
        assert torch.equal(piece, layout.shard(whole, MESH, rank))
        assert torch.equal(keep_mask(KEY, 5, 0.6, shape, box), layout.shard(mask, MESH, rank))


@given(
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=3, max_size=3),
    st.integers(0, (1 << 63) - 1),
    st.integers(0, 1 << 50),
    st.integers(1, 1 << 40),
)
def test_the_int32_arithmetic_is_that_of_unbounded_integers(
    key: list[int], stream: int, offset: int, stride: int
) -> None:
    lattice = Lattice((3, 2), (stride, 5), offset)
    keys = derive_keys(torch.tensor(key), stream)
    words = random_words(lattice, keys, torch.device("cpu")).tolist()
    places = [offset + i * stride + j * 5 for i in range(3) for j in range(2)]
    assert [word & MASK32 for word in words] == [word_in_python(i, key, stream) for i in places]


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=3, max_size=3))
def test_keys_derived_on_an_accelerator_are_those_of_the_host(key: list[int]) -> None:
    # What runs there is tensor arithmetic; it can run here too.
    host, tensor = 0, 0
    for part, item in zip(key, torch.tensor(key).unbind(), strict=True):
        host, tensor = _absorb_int(host, part), _absorb_tensor(tensor, item)
    assert int(tensor) & MASK64 == host


@pytest.mark.parametrize("offset", [(1 << 32) - 100, (1 << 31) - 100, (5 << 32) - 100])
def test_indices_beyond_32_bits_do_not_depend_on_the_split(offset: int) -> None:
    whole = uniform(KEY, 1, [200], [200, 1, offset])
    parts = [uniform(KEY, 1, [40], [40, 1, offset + 40 * i]) for i in range(5)]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, uniform(KEY, 1, [200], [200, 1, offset % (1 << 32)])) or (
        offset < 1 << 32
    )


@given(st.integers(1, 60))
def test_the_size_of_the_pieces_worked_on_does_not_matter(limit: int) -> None:
    lattice = Lattice((3, 1, 4, 5), (100, 7, 20, 2), 11)
    pieces = list(lattice.pieces(limit))
    assert all(piece.count <= limit for piece in pieces)
    places = [piece.indices(torch.device("cpu"), torch.int64) for piece in pieces]
    assert torch.equal(torch.cat(places), lattice.indices(torch.device("cpu"), torch.int64))


def test_large_tensors_are_made_of_several_pieces() -> None:
    whole = uniform(KEY, 2, [3, 150_000]).view(-1)
    piece = uniform(KEY, 2, [2, 7], [2, 7, 150_000, 1, 289_993])
    assert torch.equal(piece[0], whole[289_993:290_000])
    wide = uniform(KEY, 2, [290_000], [2, 145_000, 150_000, 1, 5])
    assert torch.equal(wide, torch.cat([whole[5:145_005], whole[150_005:295_005]]))


def test_a_box_of_other_size_than_the_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"box \(3, 1, 0\) has not the elements of shape \(2,\)"):
        uniform(KEY, 1, [2], [3, 1, 0])


def test_only_floating_point_numbers_are_uniform() -> None:
    with pytest.raises(ValueError, match=r"not torch\.int64"):
        uniform(KEY, 1, [2], dtype=torch.int64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_uniform_numbers_lie_in_the_half_open_interval(dtype: torch.dtype) -> None:
    low, high = -(1 << 31), (1 << 31) - 1

    def convert(out: torch.Tensor, words: torch.Tensor, *more: torch.Tensor) -> None:
        words.copy_(torch.tensor([low, -1, 0, high]))
        for word in more:
            word.copy_(torch.tensor([0, -1, 0, -1]))
        (_to_double if more else _to_float)(out, words, *more)

    out = torch.empty(4, dtype=dtype)
    keys = [derive_keys(KEY, 1)] * (2 if dtype == torch.float64 else 1)
    fill(out, Lattice((4,), (1,)), keys, convert)
    step = 2.0 ** -{torch.float64: 53, torch.float32: 24, torch.float16: 11}.get(dtype, 8)
    assert out.tolist() == [0, 0.5 - step, 0.5, 1 - step]


def test_a_float32_is_the_leading_bits_of_the_float64() -> None:
    wide = uniform(KEY, 4, [1000], dtype=torch.float64)
    assert torch.equal((wide * 2**24).floor() * 2**-24, uniform(KEY, 4, [1000]).double())


@given(st.floats(0, 1) | st.sampled_from([2**-24, 1 - 2**-24, 0.1, 0.9]))
def test_the_mask_is_where_uniform_is_below_p(p: float) -> None:
    numbers = uniform(KEY, 9, [3000])
    assert torch.equal(keep_mask(KEY, 9, p, [3000]), numbers.double() < p)


def test_streams_differ_by_cell_and_ordinal() -> None:
    numbers = {stream_of(f"blocks.{i}", j) for i in range(100) for j in range(100)}
    assert len(numbers) == 10_000
    assert all(0 <= number < 1 << 63 for number in numbers)


# --- statistics: all within what chance gives once in about a million times ----------------------

COUNT = 1 << 19


def deviation(words: torch.Tensor, bins: int) -> float:
    """Chi square of numbers in [0, bins), in standard deviations of its mean."""
    counts = torch.bincount(words, minlength=bins).double()
    expected = len(words) / bins
    freedom = bins - 1
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.slow
@pytest.mark.parametrize("key", [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (-1, 10**6, -3)])
def test_bytes_and_pairs_of_neighbours_are_uniform(key: tuple[int, int, int]) -> None:
    words = words_of(COUNT, *key)
    for shift in (0, 8, 16, 24):
        assert abs(deviation((words >> shift) & 255, 256)) < 6
    top = words >> 26
    for lag in (1, 2, 3, 64, 1024):
        assert abs(deviation(top[:-lag] * 64 + top[lag:], 4096)) < 6
    first, second, third = top[:-2] >> 1, top[1:-1] >> 1, top[2:] >> 1
    assert abs(deviation(first * 1024 + second * 32 + third, 1 << 15)) < 6


@pytest.mark.slow
def test_streams_steps_and_seeds_are_independent() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2, 0, 0), (1, 1, 0), (1 << 32, 0, 0)]
    draws = [words_of(COUNT, *key) for key in keys] + [words_of(COUNT, *keys[0], stream=2)]
    for i, first in enumerate(draws):
        for second in draws[:i]:
            pairs = (first >> 26) * 64 + (second >> 26)
            assert abs(deviation(pairs, 4096)) < 6
            equal = int((first == second).sum())
            assert equal < 8


@pytest.mark.slow
def test_the_same_element_of_successive_steps_is_uniform() -> None:
    for place in (0, 12345):
        numbers = torch.cat([words_of(1, 0, step, 0, offset=place) for step in range(10_000)])
        assert abs(deviation(numbers >> 24, 256)) < 6
        pairs = torch.tensor([a * 16 + b for a, b in pairwise((numbers >> 28).tolist())])
        assert abs(deviation(pairs, 256)) < 6


@pytest.mark.slow
def test_every_bit_of_the_index_turns_every_bit_of_the_word_half_of_the_time() -> None:
    count = 1 << 12
    base = words_of(count, offset=1 << 20)
    for bit in (*range(12, 32), 33, 40, 50):
        other = words_of(count, offset=(1 << 20) ^ (1 << bit))
        changed = torch.stack([((base ^ other) >> i) & 1 for i in range(32)]).double().mean(1)
        assert (changed - 0.5).abs().max() < 6 * 0.5 / math.sqrt(count)
    index = torch.arange(count)
    for bit in range(12):
        other = base[index ^ (1 << bit)]
        changed = torch.stack([((base ^ other) >> i) & 1 for i in range(32)]).double().mean(1)
        assert (changed - 0.5).abs().max() < 6 * 0.5 / math.sqrt(count / 2)


@pytest.mark.slow
def test_every_bit_of_the_key_turns_every_bit_of_the_word_half_of_the_time() -> None:
    count = 1 << 10
    base = words_of(count, 11, 12, 13, stream=14)
    for part in range(4):
        for bit in range(63):
            key = [11, 12, 13, 14]
            key[part] ^= 1 << bit
            other = words_of(count, *key[:3], stream=key[3])
            changed = torch.stack([((base ^ other) >> i) & 1 for i in range(32)]).double().mean(1)
            assert (changed - 0.5).abs().max() < 6 * 0.5 / math.sqrt(count)


def test_as_many_numbers_occur_twice_as_chance_has_it() -> None:
    numbers = words_of(1 << 15) >> 8
    expected = (1 << 15) ** 2 / 2 / (1 << 24)
    twice = len(numbers) - len(numbers.unique())
    assert abs(twice - expected) < 6 * math.sqrt(expected)


def test_float64_words_are_independent() -> None:
    numbers = uniform(KEY, 1, [1 << 16], dtype=torch.float64)
    low = (numbers * 2**53).to(torch.int64) & 0xFFF
    high = (numbers * 64).to(torch.int64)
    assert abs(deviation(high * 64 + (low >> 6), 4096)) < 6
