"""Sizes that the ranks do not divide, down to ranks that hold nothing: equal all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import nn

from tests import models
from tests.training import STRATEGIES, Batch, History, assert_equal, simulated, train

F64 = torch.float64

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Odd:
    """A model of odd size with its batches."""

    build: Callable[[], nn.Module]
    batches: Callable[[], list[Batch]]


ODD = {
    "vocab-257": Odd(
        lambda: models.gpt(vocab=257, layers=1, width=16, dtype=F64),
        lambda: models.token_batches(3, vocab=257),
    ),
    "6-heads": Odd(
        lambda: models.gpt(heads=6, width=24, layers=1, dtype=F64),
        lambda: models.token_batches(3),
    ),
    "6-heads-of-llama-with-3-keys": Odd(
        lambda: models.llama(heads=6, kv_heads=3, width=24, layers=1, dtype=F64),
        lambda: models.token_batches(3),
    ),
    "batch-5-gpt": Odd(
        lambda: models.gpt(layers=1, width=16, dtype=F64),
        lambda: models.token_batches(3, batch=5),
    ),
    "batch-5-cnn": Odd(
        lambda: models.cnn(dtype=F64), lambda: models.image_batches(3, batch=5, dtype=F64)
    ),
    "batch-3-gpt": Odd(
        lambda: models.gpt(layers=1, width=16, dtype=F64),
        lambda: models.token_batches(3, batch=3),
    ),
    "batch-3-cnn": Odd(
        lambda: models.cnn(dtype=F64), lambda: models.image_batches(3, batch=3, dtype=F64)
    ),
    "batch-3-mlp": Odd(
        lambda: models.mlp(dtype=F64), lambda: models.vector_batches(3, batch=3, dtype=F64)
    ),
    "width-10-mlp": Odd(
        lambda: models.mlp(width=10, hidden=10, dtype=F64),
        lambda: models.vector_batches(3, width=10, dtype=F64),
    ),
    "width-10-gpt": Odd(
        lambda: models.gpt(width=10, heads=2, layers=1, dtype=F64),
        lambda: models.token_batches(3),
    ),
    "context-13": Odd(
        lambda: models.gpt(context=13, layers=1, width=16, dtype=F64),
        lambda: models.token_batches(3, context=13, batch=5),
    ),
    "5-channels": Odd(
        lambda: models.cnn(channels=5, classes=7, dtype=F64),
        lambda: models.image_batches(3, classes=7, dtype=F64),
    ),
}

RANKS = {name: 8 if name.startswith("batch-3") else 4 for name in ODD}


@cache
def on_one_device(name: str) -> History:
    return train(ODD[name].build, ODD[name].batches())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ODD)
def test_an_odd_size_trains_as_on_one_device(name: str, strategy: str) -> None:
    found = train(ODD[name].build, ODD[name].batches(), simulated(RANKS[name], strategy))
    assert_equal(found, on_one_device(name), F64)


@pytest.mark.parametrize("strategy", ["data", "tensor"])
def test_ranks_that_hold_nothing_at_all_train_along(strategy: str) -> None:
    odd = Odd(
        lambda: models.mlp(width=3, hidden=2, dtype=F64),
        lambda: models.vector_batches(3, width=3, batch=2, dtype=F64),
    )
    found = train(odd.build, odd.batches(), simulated(8, strategy))
    assert_equal(found, train(odd.build, odd.batches()), F64)
