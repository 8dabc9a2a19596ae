"""distcell's own step, over MPI or over gloo, among real ranks or simulated ones."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

import distcell as dc
from benchmarks.measure import Variant
from benchmarks.model import LEARNING_RATE, Batch, Gpt
from distcell.compat import PrefixStore
from distcell.context import launch, set_launch
from distcell.engine.backend import RankBackend
from distcell.engine.state import state_of
from distcell.mesh import Mesh
from distcell.runtime.collectives import Collectives
from distcell.runtime.rank_collectives import RankCollectives
from distcell.runtime.torch_collectives import TorchGroups
from distcell.runtime.world import current_world, store


def our_step(
    name: str, gpt: Gpt, batches: list[Batch], strategy: str, *, over_gloo: bool = False
) -> Variant:
    """The whole step as one program under a strategy.

    Args:
        name: The name of the variant.
        gpt: The model.
        batches: The global batches.
        strategy: The strategy's name.
        over_gloo: Whether gloo carries the program's collectives, not what the job talks over.
    """
    options = replace(launch(), strategy=strategy)
    set_launch(options)
    net = dc.parallelize(gpt)
    if over_gloo:
        state = state_of(net, options)
        state.backend = backend = RankBackend(state.mesh)
        backend.collectives = gloo_collectives(state.mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    compiled = dc.compile_step(net, None, optimizer)

    def step(number: int) -> float:
        set_launch(options)  # variants under other strategies run in this process too
        return float(compiled(*batches[number % len(batches)]).item())

    return Variant(name, step)


@cache
def gloo_collectives(mesh: Mesh) -> Collectives:
    """Collectives over gloo, beside those that the job's ranks talk over."""
    return RankCollectives(mesh, current_world().rank, _gloo_groups().group_of)


@cache
def _gloo_groups() -> TorchGroups:
    # made once: groups of the same ranks would meet at the same keys of the store
    meeting = store()
    assert meeting is not None  # there are several ranks
    rank = current_world().rank
    return TorchGroups("gloo", PrefixStore("benchmarks", meeting), rank, one_host=True)
