"""What a network returns on simulated ranks: as on real ones (`tests/ranks/test_outputs.py`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from distcell.context import LaunchOptions
from tests.ranks.test_outputs import RETURNS, gradients, make
from tests.training import launched


@pytest.fixture(params=["data", "tensor"], autouse=True)
def _strategy(request) -> Iterator[None]:
    with launched(LaunchOptions(mode="simulate", ranks=2, strategy=request.param)):
        yield


@pytest.mark.parametrize("case", RETURNS)
def test_each_output_has_the_gradient_that_it_has_on_one_device(case: str) -> None:
    alone, net = make(RETURNS[case])
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected, found = alone(x), net(x)
    assert [o.requires_grad for o in found] == [o.requires_grad for o in expected]
    pairs = zip(gradients(net, found), gradients(alone, expected), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_an_output_may_be_written_into() -> None:
    alone, net = make(lambda h: (h * 2.0, h.view(-1) * 3.0))
    x = torch.ones(6, 4, dtype=torch.float64)
    found = {}
    for each in (alone, net):
        first, second = each(x)
        first[:, 0] = -9.0
        second.mul_(0.5)
        found[each] = gradients(each, (first, second))
    for one, other in zip(found[net], found[alone], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
