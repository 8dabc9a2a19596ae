"""Training steps on real ranks beside the peers'. Every rank runs this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import distributed as dist

from benchmarks.hand import hand_step
from benchmarks.measure import Row, Together, Variant, alike, row_of, take_pairs
from benchmarks.model import Size, make_batches, make_gpt
from benchmarks.ours import our_step
from benchmarks.peers import ddp_step, dtensor_step, eager_step
from distcell.mesh import Mesh
from distcell.runtime.collectives import Collectives
from distcell.runtime.world import collectives_for, current_world

BATCHES = (2, 8)

CASES = (
    ("tp-gpt", "dtensor-gloo", 0.6),
    ("tp-gpt-gloo", "dtensor-gloo", 0.75),
    ("tp-gpt", "hand", 1.1),
    ("dp-gpt", "ddp-gloo", 0.85),
    ("dp-gpt-gloo", "ddp-gloo", 1.0),
)
"""What is compared on several ranks: case, peer, and what the ratio should be at most."""

ALONE = (("one-rank", "eager", 1.05),)
"""The same on one rank."""


def measure(size: Size, pairs: int, only: Sequence[str] = ()) -> list[Row]:
    """The rows of all cases; on one rank those that need no other.

    Args:
        size: The model.
        pairs: How many pairs of times each row is made of.
        only: Names of cases; all when empty.
    """
    world = current_world()
    ranks = collectives_for(Mesh((("tp", world.size),)))
    if world.size > 1:
        dist.init_process_group("gloo")
    rows = []
    for rows_of_batch in BATCHES:
        make = lru_cache(_maker(size, rows_of_batch, ranks))
        for case, peer, limit in CASES if world.size > 1 else ALONE:
            if only and case not in only:
                continue
            one, other = make(case), make(peer)
            alike(one, other)
            times = take_pairs(one.run, other.run, pairs=pairs, together=together(ranks))
            carrier = "gloo" if case.endswith("-gloo") else world.backend
            ours = f"distcell-{carrier}" if world.size > 1 else "distcell"
            rows.append(row_of(case, ours, peer, times, limit=limit, batch=rows_of_batch))
    if world.size > 1:
        dist.destroy_process_group()
    return rows


def together(ranks: Collectives) -> Together:
    """What the ranks do together while times are taken, over what carries our collectives."""
    axes, one = ranks.mesh.names, torch.zeros(1)

    def meet() -> None:
        # not the barrier, which sleeps when it has to wait
        ranks.all_reduce(one, axes)

    def total(number: float) -> float:
        return float(ranks.all_reduce(torch.tensor([number], dtype=torch.float64), axes))

    return Together(meet, total)


def _maker(size: Size, rows: int, ranks: Collectives) -> Callable[[str], Variant]:
    batches = make_batches(size, rows)
    makers: dict[str, Callable[[], Variant]] = {
        "tp-gpt": lambda: our_step("tp-gpt", make_gpt(size), batches, "tensor"),
        "tp-gpt-gloo": lambda: our_step(
            "tp-gpt-gloo", make_gpt(size), batches, "tensor", over_gloo=True
        ),
        "dp-gpt": lambda: our_step("dp-gpt", make_gpt(size), batches, "data"),
        "dp-gpt-gloo": lambda: our_step(
            "dp-gpt-gloo", make_gpt(size), batches, "data", over_gloo=True
        ),
        "one-rank": lambda: our_step("one-rank", make_gpt(size), batches, "data"),
        "hand": lambda: hand_step(make_gpt(size), batches, ranks),
        "dtensor-gloo": lambda: dtensor_step(make_gpt(size), batches),
        "ddp-gloo": lambda: ddp_step(make_gpt(size), batches),
        "eager": lambda: eager_step("eager", make_gpt(size), batches),
    }

    def make(name: str) -> Variant:
        variant = makers[name]()
        variant.warm()
        return variant

    return make
