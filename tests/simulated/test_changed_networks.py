"""Networks that share parts, or get others after the first call, train as on one device."""

from __future__ import annotations

import pytest
import torch

from distcell.context import LaunchOptions
from tests.changes import CHANGES, what_comes_of
from tests.training import simulated


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data", "tensor"])
@pytest.mark.parametrize("name", CHANGES)
def test_simulated_ranks_give_what_one_device_gives(name: str, strategy: str) -> None:
    expected = what_comes_of(name, LaunchOptions(mode="eager"))
    found = what_comes_of(name, simulated(2, strategy))
    torch.testing.assert_close(found, expected)
