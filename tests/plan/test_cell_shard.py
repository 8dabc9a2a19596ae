"""`Cell.shard`: what it takes, what it keeps, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distcell import nn
from distcell.cell import Cell, declared_rules
from distcell.errors import NotFoundError, StrategyError, UserTypeError
from distcell.strategy.spec import TensorSpec


def test_numbers_of_slices_and_names_of_axes_are_kept_as_specs() -> None:
    dense = nn.Dense(4, 8)
    assert dense.sharding is None
    assert dense.shard(((2, 1),), out_strategy=((2, 4),)) is dense
    assert dense.sharding is not None
    assert [str(s) for s in dense.sharding.inputs] == ["[2, _]"]
    assert [str(s) for s in dense.sharding.outputs or ()] == ["[2, 4]"]
    dense.shard((("dp", None), None), (("dp", ("tp", "cp")),))
    assert [str(s) for s in dense.sharding.inputs] == ["[dp, _]", "None"]
    assert [str(s) for s in dense.sharding.outputs or ()] == ["[dp, [tp, cp]]"]


def test_the_last_call_wins_whole() -> None:
    dense = nn.Dense(4, 8).shard(((2, 1),), ((2, 4),), {"weight": (4, 1)}).shard(((1, 2),))
    assert dense.sharding is not None
    assert dense.sharding.outputs is None
    assert dense.sharding.params == {}


def test_the_place_of_the_call_is_kept() -> None:
    dense = nn.Dense(4, 8).shard(((2, 1),))
    assert dense.sharding is not None
    assert dense.sharding.source.startswith(__file__)
    assert dense.sharding.inputs[0] is not None
    assert dense.sharding.inputs[0].source == dense.sharding.source


def test_parameter_plan_names_parameters_relative_to_the_cell() -> None:
    net = Cell()
    net.up = nn.Dense(4, 8)
    net.shard((None,), parameter_plan={"self.up.weight": ("tp", None), "up.bias": (2,)})
    assert net.sharding is not None
    assert net.sharding.params == {
        "up.weight": TensorSpec.of(("tp", None)),
        "up.bias": TensorSpec.of((2,)),
    }


def test_declared_rules_come_in_the_order_of_the_network() -> None:
    net = Cell()
    net.up, net.down = nn.Dense(4, 8), nn.Dense(8, 4)
    net.down.shard((("tp", None),))
    net.up.shard(((1, 2),), parameter_plan={"weight": (2, 1)})
    rules = declared_rules(net)
    assert [rule.pattern for rule in rules] == ["up", "down"]
    assert str(rules[0].params["weight"]) == "[2, _]"
    assert rules[1].source.startswith(__file__)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ([(2, 1)], "`in_strategy` is a list; it takes a tuple of tuples"),
        (None, "`in_strategy` is a NoneType"),
        ((2, 1), r"`in_strategy\[0\]` is a int, not a tuple"),
        (([2, 1],), r"`in_strategy\[0\]` is a list, not a tuple"),
        (((2.0, 1),), r"dim 0 of `in_strategy\[0\]` is 2\.0"),
        (((True, 1),), r"dim 0 of `in_strategy\[0\]` is True"),
        (((1, (2, "tp")),), r"dim 1 of `in_strategy\[0\]` is \(2, 'tp'\)"),
        (((1, ["tp"]),), r"dim 1 of `in_strategy\[0\]` is \['tp'\]"),
    ],
)
def test_another_type_is_a_type_error_that_says_where(strategy: Any, message: str) -> None:
    with pytest.raises(UserTypeError, match=message) as raised:
        nn.Dense(4, 8).shard(strategy)
    assert __file__ in str(raised.value)
    assert raised.value.hint


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (((0, 1),), "a dim cannot have 0 slices"),
        ((("DP", None),), "`DP` is not the name of an axis"),
        ((("dp", "dp"),), "axis `dp` is used twice on one tensor"),
    ],
)
def test_an_entry_that_is_no_dim_is_a_value_error_that_says_where(
    strategy: Any, message: str
) -> None:
    with pytest.raises(StrategyError, match=message) as raised:
        nn.Dense(4, 8).shard(((1, 1),), out_strategy=strategy)
    assert "out_strategy[0]" in str(raised.value)
    assert str(raised.value).count(__file__) == 1


def test_a_wrong_parameter_plan_says_what_is_wrong() -> None:
    dense = nn.Dense(4, 8)
    with pytest.raises(NotFoundError, match="names `wieght`") as raised:
        dense.shard((None,), parameter_plan={"wieght": (2, 1)})
    assert raised.value.hint == "did you mean `weight`?"
    with pytest.raises(StrategyError, match="names 3 dims, the parameter has 2"):
        dense.shard((None,), parameter_plan={"weight": (2, 1, 1)})
    with pytest.raises(UserTypeError, match="`parameter_plan` is a list"):
        dense.shard((None,), parameter_plan=[("weight", (2, 1))])  # type: ignore[arg-type]
    with pytest.raises(UserTypeError, match="key 1, which is no name"):
        dense.shard((None,), parameter_plan={1: (2, 1)})  # type: ignore[dict-item]
    with pytest.raises(UserTypeError, match=r"`parameter_plan\['weight'\]` is a NoneType"):
        dense.shard((None,), parameter_plan={"weight": None})  # type: ignore[dict-item]


def test_a_refused_call_leaves_the_cell_as_it_was() -> None:
    dense = nn.Dense(4, 8).shard(((2, 1),))
    before = dense.sharding
    with pytest.raises(NotFoundError):
        dense.shard(((1, 1),), parameter_plan={"nothing": (1,)})
    assert dense.sharding is before


def test_annotations_change_nothing_on_one_device() -> None:
    dense, x = nn.Dense(4, 8), torch.ones(2, 4)
    before = dense(x)
    assert torch.equal(dense.shard(((2, 1),), ((2, 4),))(x), before)
