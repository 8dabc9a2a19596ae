"""The steps from one layout to another."""

from __future__ import annotations

import pytest

from distcell.layout import Layout
from distcell.mesh import Mesh
from distcell.partition.reshard import reshard_steps

MESH = Mesh.parse("dp=2 tp=2")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("[3*6@tp]{+dp}", "[18@tp]{+dp}"),
        ("[3*6@tp, 4]{+dp}", "[18@tp, 4]{+dp}"),
        ("[3*6@tp]{+dp}", "[18]{+dp}"),
    ],
)
def test_a_partial_sum_stays_one_where_it_shall(source: str, target: str) -> None:
    steps = reshard_steps(Layout.parse(source), Layout.parse(target), MESH)
    assert steps[-1].after == Layout.parse(target)
    assert {"all_reduce", "reduce_scatter"}.isdisjoint(step.kind for step in steps)


def test_a_partial_sum_that_shall_be_reduced_is_reduced_before_dims_are_gathered() -> None:
    steps = reshard_steps(Layout.parse("[3*6@tp]{+dp}"), Layout.parse("[18@tp]"), MESH)
    assert next(step.kind for step in steps if step.kind != "reshape") == "all_reduce"
    assert steps[-1].after == Layout.parse("[18@tp]")
