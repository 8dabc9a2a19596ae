"""The two operators of random numbers that graphs hold: `distcell::uniform` and `::keep_mask`.

Both are functions of their arguments alone, so they may be moved, repeated and split. Their `box`
says which elements of the global tensor are made (`distcell.graph.Box`); without it, all are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from distcell.random.bits import Lattice, derive_keys, fill, scalar

__all__ = ["keep_mask", "uniform"]

_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""How many random bits a uniform number of a type has: as many as keep it below 1."""

torch.library.define(
    "distcell::uniform",
    "(Tensor key, int stream, int[] shape, int[]? box=None, *, ScalarType dtype=float) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "distcell::keep_mask",
    "(Tensor key, int stream, float p, int[] shape, int[]? box=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _uniform(
    key: torch.Tensor,
    stream: int,
    shape: Sequence[int],
    box: Sequence[int] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    if dtype not in _BITS:
        raise ValueError(f"uniform numbers are of type {', '.join(map(str, _BITS))}, not {dtype}")
    out = torch.empty(shape, dtype=dtype, device=key.device)
    keys = [derive_keys(key, stream, word) for word in range(2 if dtype == torch.float64 else 1)]
    convert = _to_double if dtype == torch.float64 else _to_float
    fill(out.view(-1), Lattice.of(shape, box), keys, convert)
    return out


def _keep_mask(
    key: torch.Tensor,
    stream: int,
    p: float,
    shape: Sequence[int],
    box: Sequence[int] | None = None,
) -> torch.Tensor:
    # Of the words, as signed numbers, those below the bound are kept: as `uniform() < p`.
    below = math.ceil(p * (1 << 24)) - (1 << 23)
    out = torch.empty(shape, dtype=torch.bool, device=key.device)
    if below <= -(1 << 23) or below >= 1 << 23:
        return out.fill_(below > 0)

    bound = scalar(below << 8)

    def convert(piece: torch.Tensor, words: torch.Tensor) -> None:
        torch.lt(words, bound, out=piece)

    fill(out.view(-1), Lattice.of(shape, box), [derive_keys(key, stream)], convert)
    return out


def _to_float(out: torch.Tensor, words: torch.Tensor) -> None:
    bits = _BITS[out.dtype]
    words.bitwise_right_shift_(scalar(32 - bits))
    numbers = out.copy_(words) if out.dtype == torch.float32 else words.to(torch.float32)
    numbers.mul_(scalar(2.0**-bits)).add_(scalar(0.5))
    if numbers is not out:
        out.copy_(numbers)


def _to_double(out: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    # The leading 24 bits are those of the float32.
    out.copy_(low.bitwise_right_shift_(scalar(11)).bitwise_and_(scalar((1 << 21) - 1)))
    out.add_(high, alpha=1 << 21).mul_(2.0**-53).add_(0.5)


def _fake_uniform(
    key: torch.Tensor,
    stream: int,
    shape: Sequence[int],
    box: Sequence[int] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    return key.new_empty(shape, dtype=dtype)


def _fake_keep_mask(
    key: torch.Tensor,
    stream: int,
    p: float,
    shape: Sequence[int],
    box: Sequence[int] | None = None,
) -> torch.Tensor:
    return key.new_empty(shape, dtype=torch.bool)


torch.library.impl("distcell::uniform", "default", _uniform)
torch.library.impl("distcell::keep_mask", "default", _keep_mask)
torch.library.register_fake("distcell::uniform", _fake_uniform)
torch.library.register_fake("distcell::keep_mask", _fake_keep_mask)

uniform = torch.ops.distcell.uniform.default
"""Uniform numbers in [0, 1): `(key, stream, shape, box=None, *, dtype=torch.float32)`.

Args:
    key: int64[3]: seed, step, micro-step. The result is on its device.
    stream: Which draw of the step it is.
    shape: The shape of the result.
    box: Which elements of the global tensor they are: flat (*sizes, *strides, offset).
    dtype: float32 (24 random bits), float64 (53), float16 (11) or bfloat16 (8).

Example:
    >>> key = torch.tensor([7, 0, 0])
    >>> whole = uniform(key, 1, [4, 6])
    >>> torch.equal(uniform(key, 1, [2, 3], [2, 3, 6, 1, 9]), whole[1:3, 3:])
    True
"""

keep_mask = torch.ops.distcell.keep_mask.default
"""True with probability `p`, where `uniform` is below it: `(key, stream, p, shape, box=None)`.

Example:
    >>> key = torch.tensor([7, 0, 0])
    >>> torch.equal(keep_mask(key, 1, 0.9, [4, 6]), uniform(key, 1, [4, 6]) < 0.9)
    True
"""
