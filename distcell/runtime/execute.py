"""What runs the calls of a Cell: the two halves of its program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from distcell.errors import InternalError
from distcell.passes.split import Joint
from distcell.runtime.codegen import load
from distcell.runtime.collectives import Collectives

Local = Any
"""What a rank holds of a value, a tensor or a number; of simulated ranks a list with one each."""

Runner = Callable[[list[Local]], list[Local]]
"""A program that is ready to run: one list of all inputs, which it empties, to all outputs."""


class Executable:
    """The two halves of a program, ready to run.

    A real rank and the simulator (`distcell.simulate.execute.simulate`) are called alike: what a
    value is differs, not how it goes in and out.

    Args:
        joint: The halves.
        forward: What runs the first.
        backward: What runs the second.
    """

    def __init__(self, joint: Joint, forward: Runner, backward: Runner) -> None:
        self.joint = joint
        self.inputs = joint.forward.graph.inputs
        self.outputs = joint.forward.graph.outputs[: -len(joint.saved) or None]
        self.tangents = tuple(i for i in joint.backward.graph.inputs if i.kind == "tangent")
        self.gradients = joint.backward.graph.outputs
        self._forward, self._backward = forward, backward
        place = {item.value: index for index, item in enumerate(self.inputs)}
        backward_inputs = [item for item in joint.backward.graph.inputs if item.kind != "tangent"]
        self._passed = [place[item.value] for item in backward_inputs if item.kind != "saved"]

    def forward(self, boxed: list[Local]) -> tuple[list[Local], list[Local]]:
        """The outputs of forward, and what `backward` needs.

        Args:
            boxed: One item for each of `inputs`. The list is emptied.
        """
        passed = [boxed[index] for index in self._passed]
        results = self._forward(boxed)
        count = len(self.outputs)
        return results[:count], passed + results[count:]

    def backward(self, saved: list[Local], tangents: Sequence[Local]) -> list[Local]:
        """The outputs of backward: one item for each of `gradients`.

        Args:
            saved: What `forward` gave. It is emptied: to run backward twice, pass a copy.
            tangents: One item for each of `tangents`.

        Raises:
            InternalError: When backward ran already, or the gradients are not those it takes.
        """
        inputs = self.joint.backward.graph.inputs
        if len(saved) + len(self.tangents) != len(inputs):
            raise InternalError("what forward saved was used up by an earlier backward")
        if len(tangents) != len(self.tangents):
            raise InternalError(f"backward takes {len(self.tangents)} gradients: {len(tangents)}")
        coming, kept = iter(tangents), iter(saved)
        boxed = [next(coming if item.kind == "tangent" else kept) for item in inputs]
        saved.clear()
        del coming, kept
        return self._backward(boxed)


def load_executable(
    joint: Joint,
    rank: int,
    collectives: Collectives,
    *,
    donated: Iterable[str] = (),
    device: torch.device | str = "cpu",
) -> Executable:
    """The halves of a program as one rank runs them.

    Args:
        joint: The halves.
        rank: The rank.
        collectives: What exchanges tensors with the other ranks.
        donated: Names of inputs of forward that may be overwritten while it runs.
        device: The device of the rank.
    """
    forward = load(joint.forward, rank, collectives, donated=donated, device=device)
    return Executable(joint, forward, load(joint.backward, rank, collectives, device=device))
