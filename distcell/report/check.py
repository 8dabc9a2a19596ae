"""Whether a script means the same on simulated ranks as on one device.

The script runs twice in this process from the same seeds: as it stands, uncaptured, and with all
ranks simulated by value under the strategy. Losses, gradients and weights are compared as they
come.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distcell.context import LaunchOptions
from distcell.dtype import DTYPES
from distcell.engine.observe import PlanEvent
from distcell.engine.planning import Planned
from distcell.errors import LaunchError
from distcell.report.first_plan import no_training_call
from distcell.report.recorder import Key, Recorder
from distcell.report.script import Script

LIMITS = {"f64": 1e-10, "f32": 1e-5, "f16": 4e-3, "bf16": 3e-2}
"""By the narrowest dtype that the network computes in, how far apart values may lie: the largest
difference by the largest magnitude, over all tensors of a kind."""

LATER = 10
"""How much further gradients may lie apart after the first step, in less than double precision:
they are taken at weights that differ by rounding."""

_FIRST, _LATER_ONES = "gradients of step 1", "gradients of later steps"
KINDS = ("losses", _FIRST, _LATER_ONES, "weights", "buffers")


@dataclass
class Comparison:
    """All tensors of one kind.

    Args:
        kind: One of `KINDS`.
        limit: How far apart they may lie.
        count: How many were compared.
        largest: The largest magnitude of the reference.
        difference: The largest difference.
        worst: Where that is.
        unlike: Tensors that only one run has, or of unlike shapes.
    """

    kind: str
    limit: float = 0.0
    count: int = 0
    largest: float = 0.0
    difference: float = 0.0
    worst: str = ""
    unlike: list[str] = field(default_factory=list)

    @property
    def relative(self) -> float:
        """The largest difference by the largest magnitude."""
        if not self.difference:
            return 0.0
        return self.difference / self.largest if self.largest else math.inf

    @property
    def is_equal(self) -> bool:
        """Whether they are equal to floating-point reordering."""
        return not self.unlike and self.relative <= self.limit

    def add(self, name: str, one: Tensor, other: Tensor) -> None:
        """Compares the tensor of one device with that of the simulation."""
        self.count += 1
        if one.shape != other.shape or one.dtype != other.dtype:
            kinds = [f"{t.dtype} {list(t.shape)}" for t in (one, other)]
            self.unlike.append(f"{name}: {kinds[0]} on one device, {kinds[1]} simulated")
            return
        if not one.numel():
            return
        one, other = (_wide(tensor) for tensor in (one, other))
        self.largest = max(self.largest, float(one.abs().nan_to_num(nan=math.inf).max()))
        apart = torch.where(one == other, 0.0, (one - other).abs()).nan_to_num(nan=math.inf)
        difference = float(apart.max())
        if difference > self.difference or not self.worst:
            self.difference, self.worst = difference, name

    def add_all(self, ones: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
        """Compares tensors of the same names."""
        for name, one in ones.items():
            if name in others:
                self.add(name, one, others[name])
        for where, here, there in (("on one device", ones, others), ("simulated", others, ones)):
            self.unlike += [f"{name}: {where} alone" for name in here if name not in there]

    def __str__(self) -> str:
        found = f"{self.kind}: {self.count} compared, apart by {self.difference:.1e} of "
        found += f"{self.largest:.1e} ({self.relative:.1e}, at most {self.limit:.0e}): {self.worst}"
        return "\n".join([found, *(f"  {text}" for text in self.unlike)])


@dataclass(frozen=True)
class CheckResult:
    """What a check found.

    Args:
        comparisons: One for each kind that there is.
        steps: How many optimizer steps were compared.
        asked: How many were asked for.
        event: The plan that was checked.
        precision: The narrowest dtype that the network computes in.
        notes: What the comparison changed or could not do.
    """

    comparisons: tuple[Comparison, ...]
    steps: int
    asked: int
    event: PlanEvent
    precision: str
    notes: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether everything is equal."""
        return all(comparison.is_equal for comparison in self.comparisons)


def check(script: Script, ranks: int, strategy: str | None, *, steps: int = 3) -> CheckResult:
    """Runs a script on one device and on simulated ranks, and compares the two.

    Args:
        script: The script.
        ranks: The number of ranks.
        strategy: The strategy's name or file.
        steps: The number of optimizer steps.

    Raises:
        LaunchError: The script makes no optimizer step of a parallel network.
        DistcellError: The network cannot be planned under the strategy.
    """
    reference: dict[Key, Tensor | None] = {}

    def store(key: Key, tensor: Tensor | None) -> None:
        reference[key] = None if tensor is None else tensor.clone()

    alone = Recorder(store, steps)
    with alone.attached():
        script.run(LaunchOptions(), alone)
    _check_trained(script, alone)
    comparer = _Comparer(reference)
    simulated = Recorder(comparer.take, steps)
    with simulated.attached():
        script.run(LaunchOptions(mode="check", ranks=ranks, strategy=strategy), simulated)
    comparer.finish()
    event = next((plan for plan in simulated.plans if plan.trains), None)
    if event is None:
        raise no_training_call(script, simulated.num_calls)
    precision = precision_of([event.planned for event in simulated.plans])
    found = [comparer.kinds[kind] for kind in KINDS if kind in comparer.kinds]
    for comparison in found:
        comparison.limit = limit_of(comparison.kind, precision)
    notes = tuple(dict.fromkeys(alone.notes))
    return CheckResult(tuple(found), simulated.num_steps, steps, event, precision, notes)


def precision_of(plans: Sequence[Planned]) -> str:
    """The narrowest floating-point dtype among the values of some plans."""
    dtypes = {v.dtype for planned in plans for v in planned.plan.graph.values.values()}
    floats = [d for d in dtypes if d in DTYPES and DTYPES[d].is_floating_point]
    return max(floats, key=lambda name: torch.finfo(DTYPES[name]).eps, default="f64")


def limit_of(kind: str, precision: str) -> float:
    """How far apart tensors of a kind may lie when the network computes in some dtype."""
    limit = LIMITS.get(precision, max(LIMITS.values()))
    return limit * LATER if kind == _LATER_ONES and precision != "f64" else limit


class _Comparer:
    """Compares the tensors of the second run with those of the first, which it then forgets."""

    def __init__(self, reference: dict[Key, Tensor | None]) -> None:
        self.reference = reference
        self.kinds: dict[str, Comparison] = {}

    def take(self, key: Key, tensor: Tensor | None) -> None:
        kind, name = _kind(key), _name(key)
        comparison = self.kinds.setdefault(kind, Comparison(kind))
        if key not in self.reference:
            comparison.unlike.append(f"{name}: simulated alone")
            return
        one = self.reference.pop(key)
        if one is not None and tensor is not None:
            comparison.add(name, one, tensor)
        elif one is not None or tensor is not None:
            where = "simulated" if one is None else "on one device"
            comparison.unlike.append(f"{name}: {where} alone")

    def finish(self) -> None:
        """Notes what the second run did not give."""
        for key in self.reference:
            kind = _kind(key)
            comparison = self.kinds.setdefault(kind, Comparison(kind))
            comparison.unlike.append(f"{_name(key)}: on one device alone")


def _kind(key: Key) -> str:
    if key.kind != "gradients":
        return key.kind
    return _FIRST if key.step == 1 else _LATER_ONES


def _name(key: Key) -> str:
    if key.kind == "losses":
        return key.name
    which = f" of optimizer {key.optimizer + 1}" if key.optimizer else ""
    return f"{key.name}, step {key.step}{which}"


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)


def _check_trained(script: Script, recorder: Recorder) -> None:
    if not recorder.num_calls:
        raise no_training_call(script, 0)
    if not recorder.num_steps:
        raise LaunchError(
            f"`{script.path}` ended without an optimizer step of a parallel network",
            where=[f"it called one {recorder.num_calls} times"],
            hint="check needs a script that trains: `loss.backward(); optimizer.step()`",
        )
