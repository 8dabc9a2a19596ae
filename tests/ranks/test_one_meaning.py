"""Under every strategy a training on real ranks is that of one device.

Run with `mpirun -n 2 python -m pytest --with-mpi tests/ranks/test_one_meaning.py`, and on 4 ranks.
"""

from __future__ import annotations

from itertools import product

import pytest

from tests.models import CASES
from tests.training import (
    STRATEGIES,
    VARIANTS,
    Variant,
    assert_equal,
    on_ranks,
    reference,
    train_case,
)

pytestmark = pytest.mark.mpi


def cells() -> list[object]:
    """All models × strategies × variants; each pair in one variant is not marked `full`."""
    found = []
    for (i, model), (j, strategy) in product(enumerate(CASES), enumerate(STRATEGIES)):
        for number, variant in enumerate(VARIANTS):
            marks = [pytest.mark.slow]
            if number != (i + j + 1) % len(VARIANTS):
                marks.append(pytest.mark.full)
            name = f"{model}-{strategy}-{variant}"
            found.append(pytest.param(model, strategy, variant, marks=marks, id=name))
    return found


@pytest.fixture(scope="module")
def steps(whole_matrix: bool) -> int:
    return 20 if whole_matrix else 5


@pytest.mark.parametrize(("model", "strategy", "variant"), cells())
def test_a_training_is_that_of_one_device(
    model: str, strategy: str, variant: Variant, steps: int
) -> None:
    found = train_case(model, variant, steps, on_ranks(strategy))
    assert_equal(found, reference(model, variant, steps), variant.dtype)
