"""What the simulation says of a training is what real ranks do: bytes, counts, and values.

Run with `mpirun -n 2 python -m pytest --with-mpi` and this file, and on 4 ranks.
"""

from __future__ import annotations

import pytest
import torch

from distcell.runtime import world
from tests.models import CASES
from tests.training import (
    STRATEGIES,
    History,
    Variant,
    distances,
    on_ranks,
    simulated,
    train_case,
)

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

VARIANT = Variant(torch.float32, dropout=True)


def trainings(model: str, strategy: str) -> tuple[History, History]:
    """On real ranks and on as many simulated ones."""
    size = world.init().size
    real = train_case(model, VARIANT, 3, on_ranks(strategy))
    return real, train_case(model, VARIANT, 3, simulated(size, strategy))


PAIRS = [
    pytest.param(model, strategy, marks=[pytest.mark.full] if (i + j) % 2 else [])
    for i, model in enumerate(CASES)
    for j, strategy in enumerate(STRATEGIES)
]


@pytest.mark.parametrize(("model", "strategy"), PAIRS)
def test_the_simulation_is_the_program(model: str, strategy: str) -> None:
    real, simulation = trainings(model, strategy)
    me = world.init()
    assert real.totals[0]
    assert real.totals[0] == simulation.totals[me.rank]
    far = distances(real, simulation)
    if me.size == 2:
        assert far == {"losses": 0.0, "gradients": 0.0, "weights": 0.0}
    assert max(far.values()) < 1e-5
