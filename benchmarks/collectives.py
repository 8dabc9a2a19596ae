"""Single collectives beside gloo's and beside a copy in memory. Every rank runs this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.measure import Row, row_of, take_pairs
from benchmarks.step import together
from distcell.mesh import Mesh
from distcell.runtime.collectives import Collectives
from distcell.runtime.world import collectives_for, current_world

KINDS = ("all_reduce", "all_reduce_owned", "all_gather", "reduce_scatter")
"""`all_reduce_owned` sums where programs compute their gradients: in a buffer that is shared."""

SIZES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20)
_SHORT = 256 << 10
_LONG = 25 << 20
_PAIR = 2
_PER_SAMPLE = 2 << 20
"""Bytes in one sample: of small messages it has many, or their times would be the clock's."""

_MOST_CALLS = 32
Call = Callable[[], object]


@dataclass(frozen=True)
class _Calls:
    """One collective, by each means; all on the same values."""

    ours: Callable[[], Tensor]
    gloo: Callable[[], Tensor]
    memcpy: Call


def measure(pairs: int, *, small: bool = False) -> list[Row]:
    """The rows of all kinds and sizes, beside gloo and memcpy.

    The size is that of the whole buffer: what all-gather makes, what reduce-scatter takes.

    Args:
        pairs: How many pairs of times each row is made of.
        small: Leave large messages out: for trying the command.
    """
    world = current_world()
    ranks = collectives_for(Mesh((("dp", world.size),)))
    dist.init_process_group("gloo")
    rows = []
    for kind in KINDS:
        for nbytes in SIZES[:2] if small else SIZES:
            calls = _calls(kind, nbytes, ranks)
            if not torch.allclose(calls.ours(), calls.gloo()):
                raise RuntimeError(f"{kind} of {nbytes} bytes: ours and gloo's differ")
            times = max(1, min(_MOST_CALLS, _PER_SAMPLE // nbytes))
            case = f"{kind}/{_size_text(nbytes)}/{world.size}"
            ours = _repeated(calls.ours, times)
            for peer, call in (("gloo", calls.gloo), ("memcpy", calls.memcpy)):
                other = _repeated(call, times)
                ours(), other()
                found = take_pairs(ours, other, pairs=pairs, together=together(ranks))
                limit = limit_of(kind, nbytes, world.size, peer)
                rows.append(row_of(case, world.backend, peer, found, calls=times, limit=limit))
    dist.destroy_process_group()
    return rows


def limit_of(kind: str, nbytes: int, ranks: int, peer: str) -> float | None:
    """What the ratio should be at most; None where nothing is asked.

    >>> limit_of("all_reduce", 4 << 10, 4, "gloo"), limit_of("all_reduce", 4 << 10, 4, "memcpy")
    (0.2, None)
    """
    owned = kind == "all_reduce_owned"
    if peer == "memcpy":
        return 1.5 if owned and nbytes == _LONG and ranks == _PAIR else None
    if nbytes <= _SHORT and ranks > _PAIR:
        return 1 / 5
    if nbytes == _LONG:
        return 1 / 2.5 if owned else 1 / 1.8
    return 1.0


def _calls(kind: str, nbytes: int, ranks: Collectives) -> _Calls:
    axes, size, count = ranks.mesh.names, ranks.mesh.size, nbytes // 4
    block = count // size
    draws = torch.Generator().manual_seed(ranks.rank)
    x = torch.randn(block * size, generator=draws)
    out, copied = torch.empty(block * size), torch.empty(block * size)
    mine = x[:block].clone()
    part = torch.empty(block)

    def gloo_all_reduce() -> Tensor:
        dist.all_reduce(out)
        return out

    def gloo_all_gather() -> Tensor:
        dist.all_gather_single(out, mine)
        return out

    def gloo_reduce_scatter() -> Tensor:
        dist.reduce_scatter_single(part, x)
        return part

    def memcpy() -> object:
        return copied.copy_(x)

    if kind == "all_reduce":
        x.zero_()  # reduced in place again and again: the values must not grow
        out.zero_()
        return _Calls(lambda: ranks.all_reduce(x, axes, inplace=True), gloo_all_reduce, memcpy)
    if kind == "all_reduce_owned":
        out.zero_()
        owned = ranks.lend_many([x], axes, label="benchmark")
        owned[0].zero_()

        def ours() -> Tensor:
            return ranks.all_reduce_many(owned, axes, label="benchmark")[0]

        return _Calls(ours, gloo_all_reduce, memcpy)
    if kind == "all_gather":
        sizes = [block] * size
        return _Calls(lambda: ranks.all_gather(mine, axes, 0, sizes), gloo_all_gather, memcpy)
    sizes = [block] * size
    return _Calls(lambda: ranks.reduce_scatter(x, axes, 0, sizes), gloo_reduce_scatter, memcpy)


def _repeated(call: Call, times: int) -> Call:
    def run() -> None:
        for _ in range(times):
            call()

    return run


def _size_text(nbytes: int) -> str:
    return f"{nbytes >> 20}MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10}KiB"
