"""What a network returns on simulated ranks: as on real ones (`tests/ranks/test_outputs.py`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distcell.context import LaunchOptions
from tests.ranks.test_outputs import RETURNS, check_gradients, check_writing
from tests.training import launched


@pytest.fixture(params=["data", "tensor"], autouse=True)
def _strategy(request) -> Iterator[None]:
    with launched(LaunchOptions(mode="simulate", ranks=2, strategy=request.param)):
        yield


@pytest.mark.parametrize("case", RETURNS)
def test_each_output_has_the_gradient_that_it_has_on_one_device(case: str) -> None:
    check_gradients(case)


def test_an_output_may_be_written_into() -> None:
    check_writing()
