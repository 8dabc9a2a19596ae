"""Pairs of times, taken in turn, and the ratios that they give."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WARM_STEPS = 5
PATIENCE = 4
"""How many times as many pairs as wanted are taken at most, where the machine is not quiet."""

DISTURBED = 0.1
"""What other processes may have computed during a pair, in cores: clock ticks are coarse."""

_STATISTICS = Path("/proc/stat")

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
        pairs: How many pairs it is made of.
        taken: How many were taken; the rest was disturbed by other processes.
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
    taken: int = 0
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


@dataclass(frozen=True)
class Together:
    """What the ranks that measure do together; a single process by default.

    Args:
        meet: Waits for the other ranks. A time ends when the last rank is done.
        total: The sum of a number over all ranks.
    """

    meet: Run = lambda: None
    total: Callable[[float], float] = float


@dataclass(frozen=True)
class Pairs:
    """The times that were taken.

    Args:
        times: Ours and the peer's, in seconds.
        taken: How many pairs there were, those left out included.
    """

    times: list[tuple[float, float]]
    taken: int


def take_pairs(ours: Run, peer: Run, *, pairs: int, together: Together | None = None) -> Pairs:
    """The times of both, taken in turn; each goes first in half of the pairs.

    Pairs during which other processes of the machine computed are left out, and more are taken
    instead; where too few are left, all are used.

    Args:
        ours: What is compared.
        peer: What it is compared with.
        pairs: How many undisturbed pairs are wanted.
        together: What the ranks do together.
    """
    ranks = together or Together()
    gc.collect()
    gc.freeze()  # what was made before is not looked through again while times are taken
    taken: list[tuple[float, float]] = []
    quiet: list[tuple[float, float]] = []
    while len(quiet) < pairs and len(taken) < pairs * PATIENCE:
        before = _others(ranks)
        if len(taken) % 2 == 0:
            one = _time(ours, ranks)
            pair = (one, _time(peer, ranks))
        else:
            other = _time(peer, ranks)
            pair = (_time(ours, ranks), other)
        taken.append(pair)
        if _others(ranks) - before <= DISTURBED * sum(pair):
            quiet.append(pair)
    gc.unfreeze()
    return Pairs(quiet if 2 * len(quiet) >= pairs else taken, len(taken))


def _time(run: Run, ranks: Together) -> float:
    ranks.meet()
    start = time.perf_counter()
    run()
    ranks.meet()
    return time.perf_counter() - start


def _others(ranks: Together) -> float:
    """The processor time in seconds that others have had: of all processes less our own.

    The sum over the ranks of each one's view of it, divided by their number, so that all ranks get
    the same number and decide alike.
    """
    here = os.times()
    busy = _busy() - ranks.total(here.user + here.system)
    return ranks.total(busy) / ranks.total(1.0)


def _busy() -> float:
    """The processor time of all processes, and of a host's other guests; 0 where it is not told."""
    if not _STATISTICS.is_file():
        return 0.0
    numbers = _STATISTICS.read_text(encoding="ascii").split(maxsplit=9)[1:9]
    user, nice, system, _, _, irq, softirq, stolen = map(int, numbers)
    return (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")


def row_of(case: str, ours: str, peer: str, found: Pairs, *, calls: int = 1, **more: Any) -> Row:
    """The row of some pairs of times, each of which is that of `calls` calls."""
    times = [(one / calls, other / calls) for one, other in found.times]
    low, ratio, high = quartiles([one / other for one, other in times])
    one, other = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    load = os.getloadavg()[0]
    return Row(
        case,
        ours,
        peer,
        ratio,
        low,
        high,
        one,
        other,
        pairs=len(times),
        taken=found.taken,
        load=load,
        **more,
    )


def quartiles(numbers: Sequence[float]) -> tuple[float, float, float]:
    """The quartiles; of a single number that number, three times.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    (2.0, 3.0, 4.0)
    """
    if len(numbers) == 1:
        return numbers[0], numbers[0], numbers[0]
    low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return low, middle, high
