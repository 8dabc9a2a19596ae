"""Pairs of times, taken in turn, and the ratios that they give."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

WARM_STEPS = 5
TOLERANCE = 1e-4
"""How far losses may be apart, relative to their size: float32 sums in another order."""


@dataclass
class Variant:
    """One way to make a training step.

    Args:
        name: As it stands in the table.
        step: Makes the step of a number and returns its loss. It is timed.
        reported: The loss of the global batch, from what `step` returned. It is not timed.
    """

    name: str
    step: Callable[[int], float]
    reported: Callable[[float], float] = float
    losses: list[float] = field(default_factory=list)
    steps: int = 0

    def run(self) -> float:
        """Makes the next step."""
        self.steps += 1
        return self.step(self.steps - 1)

    def warm(self, steps: int = WARM_STEPS) -> None:
        """Makes the first steps and keeps their losses."""
        while self.steps < steps:
            self.losses.append(self.reported(self.run()))


@dataclass(frozen=True)
class Row:
    """Two variants compared: the first six fields are the format that other tools read.

    Args:
        case: What was measured.
        ours: The variant of distcell.
        peer: What it is compared with.
        ratio: Our time by the peer's: the median over the pairs.
        low: The first quartile of the ratios.
        high: The third.
        ours_ms: The median of our times; None where no times are compared.
        peer_ms: The median of the peer's.
        limit: What the ratio should be at most; None where there is no such limit.
        pairs: How many pairs were taken.
        batch: The rows of the global batch, where there is one.
        load: The machine's load when the row was done: how far to trust it.
    """

    case: str
    ours: str
    peer: str
    ratio: float
    low: float
    high: float
    ours_ms: float | None = None
    peer_ms: float | None = None
    limit: float | None = None
    pairs: int = 0
    batch: int | None = None
    load: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values."""
        return asdict(self)


def alike(ours: Variant, peer: Variant) -> None:
    """Raises when two variants do not train the same model on the same data.

    Raises:
        RuntimeError: When the losses of the first steps differ.
    """
    for step, (one, other) in enumerate(zip(ours.losses, peer.losses, strict=True)):
        if not abs(one - other) <= TOLERANCE * abs(other):
            raise RuntimeError(
                f"step {step}: {ours.name} has loss {one!r}, {peer.name} has {other!r}: "
                "they do not do the same, and no time is taken"
            )


Run = Callable[[], object]


def take_pairs(
    ours: Run, peer: Run, *, pairs: int, meet: Run = lambda: None
) -> list[tuple[float, float]]:
    """The times of both, in seconds, taken in turn; each goes first in half of the pairs.

    Args:
        ours: What is compared.
        peer: What it is compared with.
        pairs: How many pairs.
        meet: Waits for the other ranks. A time ends when the last rank is done.
    """
    gc.collect()
    gc.freeze()  # what was made before is not looked through again while times are taken
    taken = []
    for index in range(pairs):
        if index % 2 == 0:
            one = _time(ours, meet)
            taken.append((one, _time(peer, meet)))
        else:
            other = _time(peer, meet)
            taken.append((_time(ours, meet), other))
    gc.unfreeze()
    return taken


def _time(run: Run, meet: Run) -> float:
    meet()
    start = time.perf_counter()
    run()
    meet()
    return time.perf_counter() - start


def row_of(
    case: str, ours: str, peer: str, times: Sequence[tuple[float, float]], **more: Any
) -> Row:
    """The row of some pairs of times in seconds."""
    low, ratio, high = quartiles([one / other for one, other in times])
    one, other = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    load = os.getloadavg()[0]
    return Row(case, ours, peer, ratio, low, high, one, other, pairs=len(times), load=load, **more)


def quartiles(numbers: Sequence[float]) -> tuple[float, float, float]:
    """The quartiles; of a single number that number, three times.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    (2.0, 3.0, 4.0)
    """
    if len(numbers) == 1:
        return numbers[0], numbers[0], numbers[0]
    low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return low, middle, high
