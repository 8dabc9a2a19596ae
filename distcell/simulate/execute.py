"""The two halves of a program on simulated ranks, called as on a real one."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from distcell.passes.split import Joint
from distcell.runtime.collectives import CollectiveLog
from distcell.runtime.execute import Executable
from distcell.simulate.reductions import ReductionOrder
from distcell.simulate.values import SimulatedRanks


class SimulatedExecutable(Executable):
    """The halves of a program on all ranks: every value is a list with one item for each rank.

    Args:
        joint: The halves.
        order: As in `SimulatedRanks`.
        donated: Names of inputs of forward that may be overwritten while it runs.
        device: The device on which tensors are made.
    """

    def __init__(
        self,
        joint: Joint,
        *,
        order: ReductionOrder = "rank",
        donated: Iterable[str] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self.logs = [CollectiveLog() for _ in range(joint.forward.mesh.size)]
        forward = SimulatedRanks(
            joint.forward, order=order, donated=donated, device=device, logs=self.logs
        )
        backward = SimulatedRanks(joint.backward, order=order, device=device, logs=self.logs)
        super().__init__(joint, forward.run, backward.run)
