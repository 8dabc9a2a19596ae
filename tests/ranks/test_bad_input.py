"""What a user may do wrong on real ranks: the same clear error on each of them, and no hang.

Run with `mpirun -n 2 python -m pytest --with-mpi tests/ranks/test_bad_input.py`, and on 4 ranks.
"""

from __future__ import annotations

import pytest
import torch

import distcell as dc
import distcell.random
from distcell.errors import DataError, DistcellError, OptimizerStateError, RankMismatchError
from distcell.runtime import world
from tests import models
from tests.training import launched, on_ranks

pytestmark = pytest.mark.mpi


def parallel_mlp() -> torch.nn.Module:
    world.init()
    torch.manual_seed(0)
    distcell.random.seed(0)
    return dc.parallelize(models.mlp())


BATCH = models.vector_batches(1)[0]


def step_with_gradients_of_ones(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def test_an_optimizer_with_state_of_the_whole_weights_is_refused() -> None:
    net = parallel_mlp()
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    step_with_gradients_of_ones(net, optimizer)
    with launched(on_ranks("tensor")), pytest.raises(OptimizerStateError) as caught:
        net(*BATCH).backward()
        optimizer.step()
    assert "`exp_avg` of" in caught.value.message
    assert "[64, 16]" in caught.value.message
    assert "first call" in (caught.value.hint or "")


def test_an_optimizer_without_state_stays_valid() -> None:
    net = parallel_mlp()
    optimizer = torch.optim.Adam(net.parameters())
    with launched(on_ranks("tensor")):
        net(*BATCH).backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in dc.local_state_dict(net).values())


def test_weights_with_gradients_of_the_whole_are_refused() -> None:
    net = parallel_mlp()
    net.layers[0].up.weight.grad = torch.ones(64, 16)
    with launched(on_ranks("tensor")), pytest.raises(OptimizerStateError) as caught:
        net(*BATCH)
    assert "`layers.0.up.weight` has a gradient of its global shape" in caught.value.message


def test_an_optimizer_that_looks_at_whole_matrices_is_refused_on_slices() -> None:
    net = parallel_mlp()
    optimizer = torch.optim.Adafactor(net.parameters())
    with launched(on_ranks("tensor")), pytest.raises(OptimizerStateError, match="Adafactor"):
        net(*BATCH).backward()
        optimizer.step()


def test_other_data_on_each_rank_is_refused() -> None:
    net, me = parallel_mlp(), world.init()
    batch = models.vector_batches(1, seed=me.rank)[0]
    with launched(on_ranks("data")), pytest.raises(DistcellError) as caught:
        net(*batch)
    assert isinstance(caught.value, DataError | RankMismatchError)
    assert "inputs" in str(caught.value)
    assert "data: local" in (caught.value.hint or "")


def other_data_from(call: int, me: int) -> list[tuple[torch.Tensor, ...]]:
    """Batches of which those from a call on are in another order on each rank."""
    alike = models.vector_batches(12, seed=0)
    return alike[: call - 1] + models.vector_batches(12, seed=me)[call - 1 :]


@pytest.mark.parametrize(("first", "seen"), [(2, 2), (3, 4), (4, 4), (5, 8)])
@pytest.mark.parametrize("whole_step", [False, True])
def test_data_that_goes_apart_later_is_refused_some_calls_later(
    first: int, seen: int, whole_step: bool
) -> None:
    net, me = parallel_mlp(), world.init()
    done = 0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = dc.compile_step(net, None, optimizer) if whole_step else net
    with launched(on_ranks("data")), pytest.raises(DataError) as caught:
        for batch in other_data_from(first, me.rank):
            step(*batch)
            done += 1
    assert done == seen - 1  # the call that compares does not run
    lowest = {2: 2, 4: 3, 8: 5}[seen]
    when = f"call {seen}" if lowest == seen else f"calls {lowest} to {seen}"
    assert caught.value.message == f"the ranks were given different data: `x` in {when}"
    assert "rank 0: x" in caught.value.where[0]
    assert "data: local" in (caught.value.hint or "")


def seeds_itself(me: int) -> None:
    torch.manual_seed(100 + me)


def steps_alone(me: int) -> None:
    if me == 0:
        weight = torch.nn.Parameter(torch.zeros(1))
        torch.optim.SGD([weight], lr=0.1).step()


@pytest.mark.parametrize("does", [seeds_itself, steps_alone])
@pytest.mark.parametrize("strategy", ["data", "local"])
def test_random_numbers_that_go_apart_later_are_refused(does, strategy: str, tmp_path) -> None:
    net, me = parallel_mlp(), world.init()
    distcell.random.seed(None)
    path = tmp_path / "local.yaml"
    path.write_text('distcell: 1\nmesh: {dp: -1}\ndata: local\ninputs: {"*": [dp]}\n')
    options = on_ranks(str(path) if strategy == "local" else strategy)
    with launched(options), pytest.raises(RankMismatchError) as caught:
        net(*BATCH)
        does(me.rank)
        net(*BATCH)
    assert caught.value.message == "the ranks draw different random numbers in call 2"
    assert "rank 0:" in caught.value.where[0]
    assert "torch.manual_seed" in (caught.value.hint or "")


def test_each_rank_may_pass_its_own_part_where_the_strategy_says_so(tmp_path) -> None:
    net, me = parallel_mlp(), world.init()
    strategy = tmp_path / "local.yaml"
    strategy.write_text('distcell: 1\nmesh: {dp: -1}\ndata: local\ninputs: {"*": [dp]}\n')
    with launched(on_ranks(str(strategy))):
        for batch in models.vector_batches(5, seed=me.rank):
            net(*batch)


def test_other_weights_on_each_rank_are_refused() -> None:
    world.init()
    torch.manual_seed(world.init().rank)
    net = dc.parallelize(models.mlp())
    torch.manual_seed(0)
    with launched(on_ranks("data")), pytest.raises(RankMismatchError, match="parameters"):
        net(*BATCH)


def test_other_seeds_are_refused() -> None:
    net = parallel_mlp()
    torch.manual_seed(world.init().rank)
    with launched(on_ranks("data")), pytest.raises(RankMismatchError, match="seed"):
        net(*BATCH)


def test_another_strategy_on_each_rank_is_refused() -> None:
    net, me = parallel_mlp(), world.init()
    strategy = "data" if me.rank == 0 else "tensor"
    with launched(on_ranks(strategy)), pytest.raises(RankMismatchError, match="strategy"):
        net(*BATCH)


def test_a_rank_that_evaluates_alone_is_told_apart_from_those_that_train() -> None:
    net, me = parallel_mlp(), world.init()
    if me.size == 1:
        pytest.skip("one rank is always alone")
    with launched(on_ranks("data")):
        net(*BATCH).backward()
        with pytest.raises(RankMismatchError, match="do not make the same calls") as caught:
            if me.rank == 0:
                with torch.no_grad():
                    net(*BATCH)
            net(*BATCH).backward()
    first, *others = caught.value.where
    assert first.startswith("rank 0: calls the network in a new way at ")
    assert first.endswith("grad=False")
    assert "test_bad_input.py" in first
    assert len(others) == 1
    assert "calls the network as before at" in others[0]
    assert "out of `if rank == 0`" in (caught.value.hint or "")
