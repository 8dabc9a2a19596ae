"""A strategy that does not fit a model: one clear error, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distcell as dc
from distcell.capture import capture_call
from distcell.engine.planning import Planned, plan_graph
from distcell.errors import DistcellError, PlanError, StrategyError
from distcell.mesh import Mesh
from distcell.strategy import Strategy, load_strategy
from tests import models
from tests.training import launched, simulated

HEAD = 'distcell: 1\nmesh: {dp: -1, tp: 2}\ninputs: {"*": [dp]}\n'


def plan(
    strategy: Strategy, *, ranks: int = 4, net: nn.Module | None = None, rows: int = 8
) -> Planned:
    net = net or models.mlp(width=16, hidden=64)
    batch = models.vector_batches(1, batch=rows)[0]
    mesh = Mesh(strategy.mesh_for(ranks))
    return plan_graph(capture_call(net, batch, {}).graph, net, strategy, mesh)


def refused(tmp_path: Path, text: str, **how: object) -> tuple[DistcellError, str]:
    """The error of a strategy file, and its text."""
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(DistcellError) as caught:
        plan(load_strategy(str(path)), **how)
    return caught.value, str(caught.value)


STRATEGY_ERRORS = [
    ("cels: {}", "unknown key `cels`", "4:1", "did you mean `cells`?"),
    ('cells: {"**.up": {parms: {}}}', "unknown key `parms`", "4:19", "did you mean `params`?"),
    ('cells: {"**.up": {params: {weight: [pt]}}}', "no axis `pt`", "4:37", "`dp`, `tp`"),
    (
        'cells: {"**.upp": {params: {weight: [tp]}}}',
        "pattern `**.upp` matches no cell",
        "4:9",
        "did you mean `layers.0.up`?",
    ),
    (
        'cells: {"**.up": {params: {wieght: [tp]}}}',
        "`layers.0.up` has no parameter `wieght`",
        "4:36",
        "did you mean `weight`?",
    ),
    (
        'cells: {"**.up": {params: {weight: [tp, tp]}}}',
        "axis `tp` is used twice on one tensor",
        "4:36",
        "at most one dim",
    ),
    (
        'cells: {"**.up": {params: {weight: [tp, _, _]}}}',
        "`layers.0.up.weight` has 2 dims, its strategy names 3",
        "4:36",
        "give 2 or fewer",
    ),
    (
        'cells: {"**.up": {in: [[dp, _, _, _]], params: {weight: [tp]}}}',
        "`layers.0.up` has 2 dims, its strategy names 4",
        "4:24",
        "give 2 or fewer",
    ),
    (
        'cells: {"**.up": {in: [[dp], [dp]], params: {weight: [tp]}}}',
        "`layers.0.up` has 1 tensor input",
        "4:24",
        "one entry for each tensor",
    ),
    (
        'cells: {"**.up": {out: [[dp], [dp]], params: {weight: [tp]}}}',
        "`layers.0.up` has 1 tensor output",
        "4:25",
        "one entry for each tensor",
    ),
]


@pytest.mark.parametrize(("line", "what", "place", "hint"), STRATEGY_ERRORS)
def test_a_line_that_does_not_fit_is_named_with_what_to_do(
    tmp_path: Path, line: str, what: str, place: str, hint: str
) -> None:
    error, text = refused(tmp_path, HEAD + line + "\n")
    assert isinstance(error, StrategyError)
    assert what in error.message
    assert f"mine.yaml:{place}" in text
    assert hint in (error.hint or "")


def test_an_input_that_the_network_does_not_have_is_named(tmp_path: Path) -> None:
    text = 'distcell: 1\nmesh: {dp: -1}\ninputs: {"targts": [dp]}\n'
    error, _ = refused(tmp_path, text)
    assert isinstance(error, StrategyError)
    assert error.message == "input pattern `targts` matches no input of the outermost cell"
    assert error.hint == "did you mean `targets`?"


def test_an_input_with_more_dims_than_it_has_is_named(tmp_path: Path) -> None:
    error, _ = refused(tmp_path, 'distcell: 1\nmesh: {dp: -1}\ninputs: {"*": [dp, _, _]}\n')
    assert isinstance(error, StrategyError)
    assert error.message == "input `x` has 2 dims, its strategy names 3"


@pytest.mark.parametrize(
    ("mesh", "what", "hint"),
    [
        ("{dp: 3, tp: 2}", "the mesh has 6 ranks, the job has 4", "start 6 ranks"),
        ("{dp: -1, tp: 3}", "the mesh needs a multiple of 3 ranks, the job has 4", "start 3 or 6"),
    ],
)
def test_a_mesh_that_is_not_the_number_of_ranks_is_refused(
    tmp_path: Path, mesh: str, what: str, hint: str
) -> None:
    error, text = refused(tmp_path, f'distcell: 1\nmesh: {mesh}\ninputs: {{"*": [dp]}}\n')
    assert error.message == what
    assert "mine.yaml" in text
    assert hint in (error.hint or "")


def test_an_input_that_cannot_be_split_evenly_is_refused_where_that_was_asked(
    tmp_path: Path,
) -> None:
    text = 'distcell: 1\nmesh: {dp: -1}\nuneven: false\ninputs: {"*": [dp]}\n'
    error, shown = refused(tmp_path, text, rows=6)
    assert isinstance(error, PlanError)
    assert error.message == "dim 0 of `x` cannot be split over dp"
    assert "f32[6@dp, 16]        6 is not a multiple of 4" in shown
    assert "mesh  dp=4" in shown
    assert "mine.yaml:4:15" in shown
    assert "remove `uneven: false`" in (error.hint or "")


def test_a_weight_that_cannot_be_split_evenly_is_refused_where_that_was_asked(
    tmp_path: Path,
) -> None:
    text = (
        "distcell: 1\nmesh: {dp: 2, tp: -1}\nuneven: false\n"
        'inputs: {"*": [dp]}\ncells: {"**.up": {params: {weight: [tp]}}}\n'
    )
    error, shown = refused(tmp_path, text, ranks=8, net=models.mlp(hidden=6))
    assert error.message == "dim 0 of `layers.0.up.weight` cannot be split over tp"
    assert "f32[6@tp, 16]        6 is not a multiple of 4" in shown
    assert error.hint == "dp=2 divides 6; or remove `uneven: false`"


def test_an_axis_that_splits_nothing_is_refused(tmp_path: Path) -> None:
    error, text = refused(tmp_path, HEAD)
    assert isinstance(error, PlanError)
    assert error.message == "axis tp splits nothing"
    assert "mesh  dp=2 tp=2" in text
    assert "annotate" in (error.hint or "")


def test_an_axis_of_one_rank_may_split_nothing() -> None:
    text = 'distcell: 1\nmesh: {dp: -1, tp: 1}\ninputs: {"*": [dp]}\n'
    assert plan(Strategy.from_text(text)).plan.mesh.size == 4


class Strange(nn.Module):
    """A network whose names no strategy of the library knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (self.second(self.first(x).relu()) - targets).pow(2).mean()


@pytest.mark.parametrize("name", ["tensor", "data-tensor", "sequence"])
def test_a_library_strategy_that_knows_no_cell_of_a_model_proposes_lines(name: str) -> None:
    with pytest.raises(StrategyError) as caught:
        plan(load_strategy(name), net=Strange())
    assert "first" in str(caught.value)
    assert "params" in str(caught.value)


# - What `Cell.shard` is told in tuples


class Two(dc.nn.Cell):
    """Two layers, of which the first is told how it is split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = dc.nn.Dense(8, 16), dc.nn.Dense(16, 8)

    def construct(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)).sum()


SHARD_ERRORS = [
    ({"in_strategy": ((3, 1),)}, "cannot have 3 slices", "free axes  dp=4"),
    ({"in_strategy": ((8, 1),)}, "cannot have 8 slices", "mesh  dp=4"),
    ({"in_strategy": ((2, 4),)}, "cannot have 4 slices", "free axes  dp.1=2"),
    ({"in_strategy": ((0, 1),)}, "cannot have 0 slices", "in_strategy[0] = (0, 1)"),
    ({"in_strategy": ((2, 1), (1, 1))}, "its strategy names 2", "one entry for each tensor"),
    ({"in_strategy": ((2, 1, 1),)}, "has 2 dims, its strategy names 3", "give 2 or fewer"),
    ({"in_strategy": (("dq", None),)}, "no axis `dq`", "did you mean `dp`?"),
    ({"in_strategy": (("dp", "dp"),)}, "`dp` is used twice", "at most one dim"),
    (
        {"in_strategy": ((1, 1),), "out_strategy": ((2, 2, 2),)},
        "has 2 dims, its strategy names 3",
        "give 2 or fewer",
    ),
    (
        {"in_strategy": ((1, 1),), "parameter_plan": {"weigth": (2, 1)}},
        "`weigth`, which is no parameter",
        "did you mean `weight`?",
    ),
    (
        {"in_strategy": ((1, 1),), "parameter_plan": {"weight": (2, 4)}},
        "dim 1 of param `up.weight` cannot have 4 slices",
        "free axes  dp.1=2",
    ),
]


@pytest.mark.parametrize(("told", "what", "more"), SHARD_ERRORS)
def test_a_tuple_that_does_not_fit_is_named_with_its_line(
    told: dict[str, Any], what: str, more: str
) -> None:
    net = Two().set_auto_parallel()
    with launched(simulated(4, "data")), pytest.raises(DistcellError) as caught:
        net.up.shard(**told)
        net(torch.ones(4, 8))
    assert what in caught.value.message
    assert more in str(caught.value)
    assert any(f"{Path(__file__).name}:" in line for line in caught.value.where)
    assert caught.value.hint
    assert not dc.layout(net.down.weight).axes  # nothing was begun
