"""A call that fails and is caught leaves no trace."""

from __future__ import annotations

import pytest
import torch

import distcell as dc
from distcell.context import LaunchOptions
from distcell.random import seed
from tests.training import launched


def masks_after_a_bad_batch(options: LaunchOptions) -> list[torch.Tensor]:
    with launched(options):
        torch.manual_seed(0)
        seed(3)
        net = dc.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5)))
        found = [net(torch.ones(4, 4)).detach()]
        with pytest.raises(RuntimeError):
            net(torch.ones(4, 3))
        found += [net(torch.ones(4, 4)).detach(), net(torch.ones(4, 4)).detach()]
    seed(None)
    return found


def test_masks_go_on_after_a_skipped_batch_as_on_one_device() -> None:
    expected = masks_after_a_bad_batch(LaunchOptions(mode="eager"))
    found = masks_after_a_bad_batch(LaunchOptions(mode="simulate", ranks=2))
    assert not torch.equal(expected[1], expected[2])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
