"""Says which names of the seed documents a test is about."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_F = TypeVar("_F", bound=Callable[..., object])


def about(*names: str) -> Callable[[_F], _F]:
    """Marks a test; `test_every_name` reads the marks from the source.

    Args:
        names: of the class and method, `Cell.shard`; with the error for one that is documented,
            `Cell.to_float ValueError`.
    """
    assert names
    return lambda test: test
