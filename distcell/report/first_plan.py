"""The plan of a script's first training call: the script is stopped there."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer

from distcell.cell import Cell
from distcell.context import LaunchOptions
from distcell.engine.observe import Observer, PlanEvent, Stop
from distcell.errors import LaunchError
from distcell.report.optimizer import OptimizerState, state_of_optimizers
from distcell.report.script import Script


@dataclass(frozen=True)
class FirstPlan:
    """The plan of a script's first training call.

    Args:
        event: The network and its plan.
        optimizer: What the script's optimizer will hold.
    """

    event: PlanEvent
    optimizer: OptimizerState


class _FirstPlan(Observer):
    def __init__(self) -> None:
        self.num_calls = 0
        self.found: FirstPlan | None = None

    def called(self, cell: Cell, optimizer: Optimizer | None = None) -> None:
        self.num_calls += 1

    def planned(self, event: PlanEvent) -> None:
        if event.trains:
            # the optimizer goes with the script's variables when the script is stopped
            self.found = FirstPlan(event, state_of_optimizers(event.cell))
            raise Stop


def first_plan(script: Script, ranks: int, strategy: str | None) -> FirstPlan:
    """The plan of the first call that trains; nothing of that call has run.

    Args:
        script: The script.
        ranks: The number of ranks.
        strategy: The strategy's name or file.

    Raises:
        LaunchError: The script ends without such a call.
        DistcellError: The call cannot be planned.
    """
    observer = _FirstPlan()
    script.run(LaunchOptions(mode="plan", ranks=ranks, strategy=strategy), observer)
    if observer.found is None:
        raise no_training_call(script, observer.num_calls)
    return observer.found


def no_training_call(script: Script, num_calls: int) -> LaunchError:
    """The error of a script that never trains a parallel network."""
    if num_calls:
        found = f"it called one {num_calls} times, never with gradients"
        hint = "call the network in training, outside of `torch.no_grad()`"
    else:
        found = "it called none"
        hint = "make the network parallel: `net = dc.parallelize(net)`, or use `dc.Model`"
    return LaunchError(
        f"`{script.path}` ended without a training call of a parallel network",
        where=[found],
        hint=hint,
    )
