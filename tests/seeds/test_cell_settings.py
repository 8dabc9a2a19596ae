"""MindSpore's Cell: settings that other parts act on, and what is expected of inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import distcell as dc
from distcell import Parameter, Tensor, nn
from distcell.cell_settings import Recompute
from distcell.context import LaunchOptions, launch, set_launch
from tests.seeds.about import about


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = launch()
    yield
    set_launch(before)
    dc.reset_auto_parallel_context()
    dc.reset_ps_context()


def net() -> Any:
    return nn.SequentialCell(nn.Dense(2, 3), nn.SequentialCell(nn.Dense(3, 1), nn.BatchNorm1d(1)))


@about("Cell.recompute")
def test_recompute_is_said_once_and_checked_before_it_takes_effect() -> None:
    cell = net()
    with pytest.raises(ValueError, match=r"no argument `mp_comm`\n.*`mp_comm_recompute`"):
        cell.recompute(mp_comm=True)
    with pytest.raises(TypeError, match="`mp_comm_recompute` is 1"):
        cell.recompute(mp_comm_recompute=1)
    assert cell.recompute_setting is None
    cell[1].recompute(parallel_optimizer_comm_recompute=True)
    assert cell[1].recompute_setting == Recompute(True, True)
    assert cell[1][0].weight.parallel_optimizer_comm_recompute
    assert not cell[0].weight.parallel_optimizer_comm_recompute
    with pytest.raises(RuntimeError, match="said of this cell already"):
        cell[1].recompute()
    with pytest.raises(RuntimeError, match="said of the cell `1` below it"):
        cell.recompute()


@about("Cell.set_comm_fusion")
def test_the_last_comm_fusion_wins() -> None:
    cell = net()
    assert cell[0].weight.comm_fusion == 1
    assert cell[1].set_comm_fusion(3) is cell[1]
    assert [p.comm_fusion for p in cell.trainable_params()] == [1, 1, 3, 3, 3, 3]
    cell.set_comm_fusion(0)
    assert {p.comm_fusion for p in cell.trainable_params()} == {0}
    cell[1].set_comm_fusion(2, recurse=False)
    assert {p.comm_fusion for p in cell.trainable_params()} == {0}
    with pytest.raises(ValueError, match="it is at least 0"):
        cell.set_comm_fusion(-1)
    for wrong in ("1", True, 1.0):
        with pytest.raises(TypeError, match="not an int"):
            cell.set_comm_fusion(wrong)
    with pytest.raises(ValueError, match="`comm_fusion` is -1"):
        cell[0].weight.comm_fusion = -1


@about("Cell.set_param_ps")
def test_a_parameter_server_must_be_in_use() -> None:
    cell = net()
    with pytest.raises(RuntimeError, match="does not use a parameter server"):
        cell.set_param_ps()
    dc.set_ps_context(enable_ps=True)
    cell[1].set_param_ps(init_in_server=True)
    assert [p.is_param_ps for p in cell.trainable_params()] == [False] * 2 + [True] * 4
    assert cell[1][0].weight.init_in_server
    cell.set_param_ps(recurse=False)
    assert not cell[0].weight.is_param_ps
    with pytest.raises(TypeError, match="`init_in_server` is 1"):
        cell.set_param_ps(init_in_server=1)


@about("Cell.set_param_fl")
def test_each_call_of_set_param_fl_sets_all_three() -> None:
    cell = net()
    cell[0].bias.requires_grad_(False)
    cell.set_param_fl(push_to_server=True, pull_from_server=True, requires_aggr=False)
    bias = cell[0].bias
    assert (bias.push_weight_to_server, bias.pull_weight_from_server, bias.requires_aggr) == (
        True,
        True,
        False,
    )
    cell.set_param_fl()
    assert (bias.push_weight_to_server, bias.pull_weight_from_server, bias.requires_aggr) == (
        False,
        False,
        True,
    )
    with pytest.raises(TypeError, match="`requires_aggr` is None"):
        cell.set_param_fl(requires_aggr=None)


@about("Cell.infer_param_pipeline_stage", "Cell.infer_param_pipeline_stage RuntimeError")
def test_parameters_of_a_stage_are_those_of_its_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = net()
    cell[0].pipeline_stage = 0
    assert cell[0].pipeline_stage == 0
    with pytest.raises(RuntimeError, match=r"`1\.0\.weight` belongs to no stage(.|\n)*1\.1\.bias"):
        cell.infer_param_pipeline_stage()
    cell[1].pipeline_stage = 1
    shared = Parameter(torch.ones(1))
    cell.shared = shared
    shared.add_pipeline_stage(0)
    shared.add_pipeline_stage(1)
    dc.set_auto_parallel_context(pipeline_stages=2)
    set_launch(LaunchOptions(mode="ranks", ranks=4))
    for rank, wanted in ((1, ["shared", "0.weight", "0.bias"]), (2, ["shared", "1.0.weight"])):
        monkeypatch.setenv("RANK", str(rank))
        found = [param.name for param in cell.infer_param_pipeline_stage()]
        assert found[: len(wanted)] == wanted
    set_launch(LaunchOptions(mode="simulate", ranks=3))
    with pytest.raises(RuntimeError, match="3 ranks do not divide among 2 stages"):
        cell.infer_param_pipeline_stage()


def test_a_stage_is_a_number_from_0() -> None:
    cell = net()
    for wrong in (True, "0", 1.0):
        with pytest.raises(TypeError, match="not an int"):
            cell.pipeline_stage = wrong
    with pytest.raises(ValueError, match="counted from 0"):
        cell.pipeline_stage = -1
    for wrong in (-1, "0", True):
        with pytest.raises(TypeError, match="no number from 0"):
            cell[0].weight.add_pipeline_stage(wrong)


@about("Cell.set_auto_parallel")
def test_set_auto_parallel_returns_the_cell() -> None:
    cell = net()
    assert cell.set_auto_parallel() is cell
    assert cell.is_auto_parallel
    assert not cell.set_auto_parallel(False).is_auto_parallel
    with pytest.raises(TypeError, match="`mode` is 1"):
        cell.set_auto_parallel(1)


def test_shard_checks_device_and_level_in_either_order() -> None:
    cell = net()
    cell.shard(((1, 1),), (None,), "CPU", 1)
    cell.shard(((1, 1),), (None,), None, device="GPU", level=2)
    with pytest.raises(ValueError, match="no device `TPU`"):
        cell.shard(((1, 1),), device="TPU")
    with pytest.raises(TypeError, match="`device` is 3"):
        cell.shard(((1, 1),), device=3)
    with pytest.raises(ValueError, match="no level 3"):
        cell.shard(((1, 1),), level=3)
    with pytest.raises(TypeError, match="`level` is '0'"):
        cell.shard(((1, 1),), level="0")


def test_calls_are_compared_with_set_inputs() -> None:
    cell = nn.MatMul()
    cell.set_inputs(Tensor(shape=[2, None], dtype=dc.float32), torch.ones(3, 2))
    assert cell(torch.ones(2, 3), x2=torch.ones(3, 2)).shape == (2, 2)
    one = torch.ones(2, 3)
    with pytest.raises(ValueError, match="1 inputs come in, `set_inputs` was told of 2"):
        cell(one)
    for wrong in (torch.ones(3, 3), torch.ones(3), one.double()):
        with pytest.raises(ValueError, match=r"told of \[2, None\] of torch.float32"):
            cell(wrong, torch.ones(3, 2))
    with pytest.raises(TypeError, match="input `1` is a list"):
        cell(one, [1.0])
    with pytest.raises(TypeError, match="input 0 is a str"):
        cell.set_inputs("x")
    cell.set_inputs()
    assert cell.get_inputs() is None
    assert cell(one, one.T).shape == (2, 2)


def test_a_tensor_is_made_of_data_or_of_a_shape() -> None:
    assert Tensor([1, 2]).dtype == torch.int64
    x = torch.ones(2)
    assert Tensor(x) is not x
    assert Tensor(x, dc.float16).dtype == torch.float16
    with pytest.raises(TypeError, match="both data and a shape"):
        Tensor(x, shape=[2])
    with pytest.raises(TypeError, match="made of data"):
        Tensor()
    with pytest.raises(ValueError, match="a size is -1"):
        Tensor(shape=[-1], dtype=dc.float32)
