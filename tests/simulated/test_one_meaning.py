"""Under every strategy and on any number of ranks a training is that of one device.

Each model meets each strategy and each number of ranks in one variant, the variants in turn;
`--all` trains every variant, and for longer.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

from tests.models import CASES
from tests.training import (
    STRATEGIES,
    VARIANTS,
    History,
    Variant,
    assert_equal,
    distances,
    reference,
    simulated,
    train_case,
)

RANKS = (2, 4, 8)


def cells() -> list[object]:
    """All models × strategies × ranks × variants; a covering set of them is not marked `full`."""
    found = []
    axes = (list(enumerate(CASES)), list(enumerate(STRATEGIES)), list(enumerate(RANKS)))
    for (i, model), (j, strategy), (k, ranks) in product(*axes):
        for number, variant in enumerate(VARIANTS):
            marks = [pytest.mark.slow]
            if number != (i + j + k) % len(VARIANTS):
                marks.append(pytest.mark.full)
            name = f"{model}-{strategy}-{ranks}-{variant}"
            found.append(pytest.param(model, strategy, ranks, variant, marks=marks, id=name))
    return found


@pytest.fixture(scope="module")
def steps(whole_matrix: bool) -> int:
    return 20 if whole_matrix else 5


@pytest.mark.parametrize(("model", "strategy", "ranks", "variant"), cells())
def test_a_training_is_that_of_one_device(
    model: str, strategy: str, ranks: int, variant: Variant, steps: int
) -> None:
    found = train_case(model, variant, steps, simulated(ranks, strategy))
    assert_equal(found, reference(model, variant, steps), variant.dtype)


@cache
def without_distcell(model: str, variant: Variant) -> History:
    return train_case(model, variant, 5, plain=True)


@pytest.mark.slow
@pytest.mark.parametrize("model", CASES)
def test_on_one_device_without_dropout_nothing_differs_from_plain_torch(model: str) -> None:
    variant = Variant(torch.float32, dropout=False)
    found = train_case(model, variant, 5)
    far = distances(found, without_distcell(model, variant))
    assert far == {"losses": 0.0, "gradients": 0.0, "weights": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("model", CASES)
def test_dropout_changes_the_training(model: str) -> None:
    with_dropout = reference(model, Variant(torch.float64, dropout=True), 5)
    without = reference(model, Variant(torch.float64, dropout=False), 5)
    assert distances(with_dropout, without)["losses"] > 1e-6
