"""What is split stays split: no op without a rule, no rank that computes what others compute."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import distcell as dc
from distcell.engine.planning import Planned
from distcell.engine.state import state_of
from distcell.graph import Graph
from distcell.program import Program
from distcell.rules.flops import flops
from tests import models
from tests.training import STRATEGIES, launched, simulated

pytestmark = pytest.mark.slow

BATCH = 40
"""Neither it nor a multiple of it is the size of a dim of the models' weights."""

CASES = {
    "gpt": lambda: (models.gpt(), models.token_batches(1, batch=BATCH)[0]),
    "llama": lambda: (models.llama(), models.token_batches(1, batch=BATCH)[0]),
    "cnn": lambda: (models.cnn(), models.image_batches(1, batch=BATCH)[0]),
    "mlp": lambda: (models.mlp(), models.vector_batches(1, batch=BATCH)[0]),
}


@cache
def plan_of(model: str, strategy: str) -> Planned:
    """The plan of a call on 8 ranks."""
    options = simulated(8, strategy)
    torch.manual_seed(0)
    net, batch = CASES[model]()
    with launched(options):
        dc.parallelize(net)(*batch)
        planned = state_of(net, options).planned
    assert planned is not None
    return planned


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", CASES)
def test_every_op_has_a_rule(model: str, strategy: str) -> None:
    notes = plan_of(model, strategy).plan.notes
    assert [note.text for note in notes if note.kind == "no rule"] == []


def flops_of(program: Program, rank: int) -> int:
    """What a rank computes, at the shapes of its pieces."""
    graph = program.graph

    def shapes(names: tuple[str, ...]) -> list[tuple[int, ...]]:
        tensors = [name for name in names if graph.values[name].is_tensor]
        return [program.local_shape(name, rank) for name in tensors]

    return sum(flops(op, shapes(op.inputs), shapes(op.outputs)) for op in graph.ops)


def flops_of_one_device(graph: Graph) -> int:
    """The same at global shapes."""

    def shapes(names: tuple[str, ...]) -> list[tuple[int, ...]]:
        return [graph.values[name].shape for name in names if graph.values[name].is_tensor]

    return sum(flops(op, shapes(op.inputs), shapes(op.outputs)) for op in graph.ops)


@pytest.mark.parametrize("model", CASES)
def test_a_captured_step_computes_what_torch_counts(model: str) -> None:
    net, batch = CASES[model]()
    # torch's counter does not know the attention of CPUs; from its parts it misses, of 7 products,
    # the one that is made again in backward
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        net(*batch).backward()
    ours = flops_of_one_device(plan_of(model, "data-tensor").plan.graph)
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("model", CASES)
def test_each_of_8_ranks_computes_an_eighth(model: str) -> None:
    planned = plan_of(model, "data-tensor")
    whole = flops_of_one_device(planned.plan.graph)
    shares = [flops_of(planned.program, rank) / whole for rank in range(8)]
    assert max(shares) <= 1.1 / 8


@dataclass(frozen=True)
class Whole:
    """A value of the batch that is not split over dp."""

    text: str
    made_by: str


def replicated_over(axis: str, program: Program) -> list[Whole]:
    """The tensors with a dim of the batch's size that an axis does not split."""
    states = {i.value for i in program.graph.inputs if i.kind in ("param", "buffer")}
    found = []
    for name, value in program.graph.values.items():
        if not value.is_tensor or name in states or not any(map(is_of_batch, value.shape)):
            continue
        if axis not in program.layouts[name].axes:
            maker = program.graph.producers.get(name)
            found.append(Whole(program.describe(name), str(maker)))
    return found


def is_of_batch(size: int) -> bool:
    """Whether a dim is the batch, alone or flattened with others."""
    return size >= BATCH and size % BATCH == 0


@pytest.mark.parametrize("strategy", ["data", "data-tensor", "sequence"])
@pytest.mark.parametrize("model", CASES)
def test_no_activation_is_whole_on_every_data_parallel_rank(model: str, strategy: str) -> None:
    assert replicated_over("dp", plan_of(model, strategy).program) == []
