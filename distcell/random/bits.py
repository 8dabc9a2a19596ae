"""Random bits as a function of place: a counter-based generator in plain torch operations.

The bits of an element depend on who asks (seed, step, micro-step, stream) and on the element's
index in the *global* tensor, never on what else was drawn. Each rank can so make its own part.

How: the four words of who asks are absorbed into 64 bits, from which come the keys; these enter
between the rounds of a 32-bit mixer of the index. All that is done per element are int32
operations with wrap-around: int64 has no vectorised multiplication on CPUs and is nine times
slower. The multipliers and shifts are figures from the published search for mixers of low bias
("triple32"); that of the 64-bit part is the golden ratio's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1
_ABSORB = 0x1E3779B97F4A7C15
_HIGH = 0x2C1B3C6D
_ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
_LAST_SHIFT = 14
_CHUNK = 1 << 17
"""Elements worked on at a time on a CPU: the two buffers stay in its cache, and memory is small."""


@dataclass(frozen=True)
class Lattice:
    """Which elements of a global tensor are meant: offset + sum(i * stride), in row-major order.

    Args:
        sizes: How many steps there are in each direction, outer to inner.
        strides: How far a step goes in the global tensor.
        offset: The global index of the first element.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, shape: Sequence[int], box: Sequence[int] | None = None) -> Lattice:
        """The lattice of a flat box (*sizes, *strides, offset), or all of a shape without one.

        Raises:
            ValueError: When the box has not as many elements as the shape.

        Example:
            >>> Lattice.of((2, 2), (2, 2, 6, 1, 4))
            Lattice(sizes=(2, 2), strides=(6, 1), offset=4)
        """
        if box is None:
            return cls((math.prod(shape),), (1,))
        rank = len(box) // 2
        sizes, strides = tuple(box[:rank]), tuple(box[rank : 2 * rank])
        if len(box) % 2 == 0 or math.prod(sizes) != math.prod(shape):
            raise ValueError(f"the box {tuple(box)} has not the elements of shape {tuple(shape)}")
        pairs = _merged(sizes, strides)
        return cls(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs), box[-1])

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    @property
    def last(self) -> int:
        """The global index of the last element."""
        steps = zip(self.sizes, self.strides, strict=True)
        return self.offset + sum((size - 1) * stride for size, stride in steps)

    def pieces(self, limit: int) -> Iterator[Lattice]:
        """This lattice cut into pieces of at most `limit` elements, in order."""
        if self.count <= limit:
            yield self
            return
        inner = math.prod(self.sizes[1:])
        rows = max(1, limit // inner)
        for start in range(0, self.sizes[0], rows):
            count = min(rows, self.sizes[0] - start)
            offset = self.offset + start * self.strides[0]
            if count == 1:
                yield from Lattice(self.sizes[1:], self.strides[1:], offset).pieces(limit)
            else:
                yield Lattice((count, *self.sizes[1:]), self.strides, offset)

    def indices(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """The global indices, flat, modulo the range of the integer type."""
        directions = list(zip(self.sizes, self.strides, strict=True)) or [(1, 1)]
        index = None
        for size, stride in reversed(directions):
            steps = torch.arange(size, dtype=dtype, device=device)
            if stride != 1:
                steps.mul_(_wrap(stride, dtype))
            index = steps if index is None else (steps[:, None] + index).view(-1)
            if index is steps and self.offset:
                index.add_(_wrap(self.offset, dtype))
        assert index is not None
        return index


def _merged(sizes: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """The sizes and strides of the same lattice with as few directions as possible."""
    pairs: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if pairs and pairs[-1][1] == size * stride:
            pairs[-1] = (pairs[-1][0] * size, stride)
        else:
            pairs.append((size, stride))
    return pairs


def _wrap(number: int, dtype: torch.dtype) -> int:
    """The number that a signed integer type holds after wrap-around."""
    half = 1 << (8 * dtype.itemsize - 1)
    return (number + half) % (2 * half) - half


def derive_keys(key: torch.Tensor, stream: int, word: int = 0) -> tuple[torch.Tensor, ...]:
    """The three keys of a draw: int32 tensors without dims.

    Args:
        key: int64[3]: seed, step, micro-step.
        stream: Which draw of the step it is.
        word: Which of the draw's 32-bit words, where an element needs more than one.
    """
    state: Any = 0
    if key.device.type == "cpu":
        for part in (*key.tolist(), stream, word):
            state = _absorb_int(state, part)
        more = _absorb_int(state, 1)
        halves = [state & _MASK32, state >> 32, more & _MASK32]
        return torch.tensor(
            [_wrap(half, torch.int32) for half in halves], dtype=torch.int32
        ).unbind()
    for part in (*key.unbind(), stream, word):
        state = _absorb_tensor(state, part)
    more = _absorb_tensor(state, 1)
    return tuple(half.to(torch.int32) for half in (state, state >> 32, more))


def _absorb_int(state: int, part: int) -> int:
    state = ((state ^ part) * _ABSORB) & _MASK64
    state = ((state ^ (state >> 32)) * _ABSORB) & _MASK64
    return state ^ (state >> 29)


def _absorb_tensor(state: Any, part: Any) -> Any:
    """The same in int64: on an accelerator the host does not wait for the numbers."""
    state = (state ^ part) * _ABSORB
    state = (state ^ ((state >> 32) & _MASK32)) * _ABSORB
    return state ^ ((state >> 29) & (_MASK64 >> 29))


def fill(
    out: torch.Tensor,
    lattice: Lattice,
    keys: Sequence[tuple[torch.Tensor, ...]],
    convert: Callable[..., None],
) -> None:
    """Fills a flat tensor from the random words of the elements of a lattice.

    Args:
        out: As many elements as the lattice has.
        lattice: The places of the elements.
        keys: For each word that an element needs its keys.
        convert: Called with a piece of `out` and its words (int32, may be overwritten).
    """
    done = 0
    for piece in lattice.pieces(_CHUNK if out.device.type == "cpu" else 1 << 28):
        words = [random_words(piece, each, out.device) for each in keys]
        convert(out.narrow(0, done, piece.count), *words)
        done += piece.count


def random_words(
    lattice: Lattice, keys: tuple[torch.Tensor, ...], device: torch.device
) -> torch.Tensor:
    """32 random bits as an int32 for each element of a lattice."""
    high = None
    if lattice.count and lattice.last > _MASK32:
        wide = lattice.indices(device, torch.int64)
        words, high = wide.to(torch.int32), (wide >> 32).to(torch.int32)
    else:
        words = lattice.indices(device, torch.int32)
    buffer = torch.empty_like(words)
    for number, (shift, factor) in enumerate(_ROUNDS):
        words.add_(keys[number])
        _xor_shift(words, shift, buffer).mul_(scalar(_wrap(factor, torch.int32)))
        if number == 0 and high is not None:
            # Nothing is mixed in where the high word is 0, so that both branches agree.
            words.bitwise_xor_(high.mul_(_HIGH))
    return _xor_shift(words, _LAST_SHIFT, buffer)


def _xor_shift(words: torch.Tensor, shift: int, buffer: torch.Tensor) -> torch.Tensor:
    """`words ^= words >>> shift`; torch's own shift of a signed number copies the sign."""
    torch.bitwise_right_shift(words, scalar(shift), out=buffer)
    return words.bitwise_xor_(buffer.bitwise_and_(scalar(_MASK32 >> shift)))


@lru_cache(maxsize=256, typed=True)
def scalar(number: int | float) -> torch.Tensor:
    """A constant operand, kept: making one of a Python number costs more than a small operation."""
    dtype = torch.float32 if isinstance(number, float) else torch.int32
    return torch.tensor(number, dtype=dtype, device="cpu")
