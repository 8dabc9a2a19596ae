"""How the job was started, and the auto-parallel context: defaults, checks, reset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import distcell as dc
from distcell import context, nn
from distcell.context import (
    AutoParallelContext,
    LaunchOptions,
    auto_parallel_context,
    get_auto_parallel_context,
    launch,
    reset_auto_parallel_context,
    set_auto_parallel_context,
    set_launch,
)
from distcell.errors import LaunchError, NotFoundError, StrategyError, UserTypeError


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = launch()
    yield
    set_launch(before)
    reset_auto_parallel_context()


def test_a_script_by_itself_runs_on_one_device() -> None:
    set_launch(LaunchOptions())
    assert (launch().mode, launch().ranks, launch().strategy) == ("eager", 1, None)


def test_what_is_set_is_what_is_read() -> None:
    options = LaunchOptions(mode="simulate", ranks=8, strategy="tensor")
    set_launch(options)
    assert launch() is options


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mode": "rank"}, "no mode `rank`\n  = hint: did you mean `ranks`"),
        ({"backend": "nccl2"}, "no backend `nccl2`\n  = hint: did you mean `nccl`"),
        ({"ranks": 0}, "0 ranks cannot run"),
        ({"stall_after": 0.0}, "a stall cannot be seen after 0.0 seconds"),
    ],
)
def test_options_that_mean_nothing_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        LaunchOptions(**wrong)


def test_settings_are_changed_one_by_one_and_reset_together() -> None:
    set_auto_parallel_context(full_batch=False)
    set_auto_parallel_context(strategy="tensor", gradients_mean=False)
    assert auto_parallel_context() == AutoParallelContext(
        strategy="tensor", gradients_mean=False, full_batch=False
    )
    assert get_auto_parallel_context("strategy") == "tensor"
    reset_auto_parallel_context()
    assert auto_parallel_context() == AutoParallelContext()


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ({"paralel_mode": "stand_alone"}, StrategyError, "no key `paralel_mode`.*\n.*`parallel_m"),
        ({"device_num": 8}, StrategyError, "no key `device_num`.*\n.*the launcher's"),
        ({"parallel_mode": "data_paralel"}, StrategyError, "did you mean `data_parallel`"),
        ({"full_batch": 1}, UserTypeError, "`full_batch` is 1, a int; it takes bool"),
        ({"strategy": 3}, UserTypeError, "it takes str or None"),
        ({"parallel_mode": "hybrid_parallel"}, StrategyError, "is not a mode here"),
        ({"search_mode": "dynamic_programming"}, StrategyError, "is not built"),
        ({"search_mode": "sharding"}, StrategyError, "no search mode"),
        ({"pipeline_stages": 0}, StrategyError, "at least 1 stage"),
        ({"pipeline_stages": True}, UserTypeError, "it takes int"),
        ({"dataset_strategy": ((2, 1),)}, StrategyError, "as tuples has no meaning"),
        ({"dataset_strategy": "full"}, StrategyError, "no dataset strategy `full`"),
        ({"dataset_strategy": [2]}, UserTypeError, "it takes str"),
        ({"comm_fusion": []}, UserTypeError, "it takes dict"),
        ({"comm_fusion": {"reduce": {}}}, NotFoundError, "no key `reduce`"),
        ({"comm_fusion": {"allreduce": 3}}, UserTypeError, "it takes dict"),
        ({"comm_fusion": {"allreduce": {"mode": "auto"}}}, NotFoundError, "no `config`"),
        (
            {"comm_fusion": {"allreduce": {"mode": "siez", "config": 3}}},
            NotFoundError,
            "no mode `siez`",
        ),
        (
            {"comm_fusion": {"allgather": {"mode": "size", "config": "3"}}},
            UserTypeError,
            "not a number of MiB",
        ),
        (
            {"comm_fusion": {"allgather": {"mode": "size", "config": -3}}},
            StrategyError,
            "at least 0",
        ),
        (
            {"comm_fusion": {"allreduce": {"mode": "index", "config": [3, 2]}}},
            UserTypeError,
            "not ascending numbers",
        ),
        (
            {"comm_fusion": {"allreduce": {"mode": "index", "config": [2, 3]}}},
            StrategyError,
            "by `index` has no meaning here",
        ),
        (
            {"comm_fusion": {"allreduce": {"mode": "auto", "config": 3}}},
            UserTypeError,
            "with mode `auto` it is None",
        ),
        (
            {"comm_fusion": {"reducescatter": {"mode": "size", "config": 3}}},
            StrategyError,
            "`reducescatter` has no meaning here",
        ),
    ],
)
def test_a_wrong_setting_changes_nothing(
    wrong: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        set_auto_parallel_context(gradients_mean=False, **wrong)
    assert auto_parallel_context() == AutoParallelContext()


def test_an_unknown_key_cannot_be_read() -> None:
    with pytest.raises(StrategyError, match="did you mean `strategy`"):
        get_auto_parallel_context("stratgy")


def test_mindspores_settings_are_read_under_its_names() -> None:
    fusion = {"openstate": True, "allreduce": {"mode": "size", "config": 32}}
    set_auto_parallel_context(dataset_strategy="data_parallel", comm_fusion=fusion)
    set_auto_parallel_context(parallel_mode="auto_parallel", pipeline_stages=2)
    set_auto_parallel_context(auto_parallel_search_mode="sharding_propagation")
    assert get_auto_parallel_context("full_batch") is False
    assert get_auto_parallel_context("dataset_strategy") == "data_parallel"
    assert get_auto_parallel_context("comm_fusion") == fusion
    set_launch(LaunchOptions(mode="simulate", ranks=8))
    assert get_auto_parallel_context("device_num") == 8
    assert get_auto_parallel_context("global_rank") == 0


@pytest.mark.parametrize("key", ["enable_parallel_optimizer", "enable_alltoall", "pipeline_config"])
def test_what_has_no_meaning_here_says_why(key: str) -> None:
    with pytest.raises(StrategyError, match=f"no key `{key}`") as raised:
        set_auto_parallel_context(**{key: True})
    assert raised.value.hint


def test_the_other_contexts_know_their_keys() -> None:
    context.set_context(mode=context.GRAPH_MODE, device_target="CPU")
    assert context.get_context("mode") == context.GRAPH_MODE
    context.set_context(mode=context.PYNATIVE_MODE)
    for wrong, kind, message in (
        ({"mode": 2}, ValueError, "no mode 2"),
        ({"mode": "graph"}, TypeError, "`mode` is 'graph'"),
        ({"device_target": "Ascend"}, RuntimeError, "no Ascend device"),
        ({"device_target": "TPU"}, ValueError, "no device `TPU`"),
        ({"device_id": 1}, ValueError, "no key `device_id`"),
    ):
        with pytest.raises(kind, match=message):
            context.set_context(**wrong)  # type: ignore[arg-type]
    context.set_ps_context(enable_ps=True)
    assert context.get_ps_context("enable_ps") is True
    context.reset_ps_context()
    assert context.get_ps_context("enable_ps") is False
    with pytest.raises(TypeError, match="`enable_ps` is 1"):
        context.set_ps_context(enable_ps=1)
    with pytest.raises(ValueError, match="no key `enable`"):
        context.set_ps_context(enable=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "messages"),
    [
        ({}, 1),
        ({"allreduce": {"mode": "auto", "config": None}}, 1),
        ({"allreduce": {"mode": "size", "config": 1}}, 2),
        ({"allreduce": {"mode": "size", "config": 0}}, 4),
        ({"openstate": False}, 4),
    ],
)
def test_gradients_are_exchanged_as_the_context_says(
    setting: dict[str, Any], messages: int
) -> None:
    set_auto_parallel_context(comm_fusion=setting)
    net = nn.SequentialCell(nn.Dense(512, 512), nn.Dense(512, 8))  # 1 MiB, and little more
    planned = dc.plan(net, torch.zeros(4, 512), "data", ranks=2)
    targets = [op.target for op in planned.program.graph.ops]
    assert len([name for name in targets if name.startswith("distcell.all_reduce")]) == messages


def test_a_network_is_not_run_as_if_there_were_a_pipeline() -> None:
    set_launch(LaunchOptions(mode="simulate", ranks=2))
    set_auto_parallel_context(pipeline_stages=2)
    with pytest.raises(StrategyError, match="a pipeline is not built"):
        nn.Dense(2, 2).set_auto_parallel()(torch.zeros(2, 2))
