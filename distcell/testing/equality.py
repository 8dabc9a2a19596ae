"""Whether a network means the same on simulated ranks as on one device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distcell.capture import flatten
from distcell.cell import inside_engine
from distcell.random import RandomState, current_state, random_mode
from distcell.report.check import Comparison, limit_of, precision_of
from distcell.scope import track
from distcell.simulate.reductions import ReductionOrder
from distcell.strategy import Strategy
from distcell.testing.network_plan import Inputs, NetworkPlan, leaves_of, plan
from distcell.testing.simulation import Simulation, gradient_name, simulate


def assert_one_meaning(
    net: torch.nn.Module,
    inputs: Inputs,
    strategy: str | Path | Strategy,
    ranks: int,
    *,
    steps: int = 3,
    learning_rate: float = 0.1,
    order: ReductionOrder = "rank",
) -> Simulation:
    """Checks that a network means the same on simulated ranks as on one device; returns the values.

    Compared are, over some steps of gradient descent, the losses, the gradients, the weights and
    the buffers. They may differ by floating-point reordering alone: at most 1e-10 of the largest
    magnitude of their kind in double precision, 1e-5 in single.

    Args:
        net: A Cell or any torch module; it is not changed.
        inputs: As for `plan`.
        strategy: As for `plan`.
        ranks: The number of ranks.
        steps: The number of steps.
        learning_rate: How far each goes.
        order: As for `simulate`.

    Raises:
        AssertionError: They differ; it names the worst tensor of each kind.

    >>> _ = assert_one_meaning(torch.nn.Linear(4, 6), torch.ones(5, 4), "data", ranks=2)
    """
    made = plan(net, inputs, strategy, ranks)
    found = simulate(made, order=order, steps=steps, learning_rate=learning_rate)
    reference = _on_one_device(made, steps, learning_rate)
    precision = precision_of([made.planned])
    pairs = {
        "losses": (_numbered(reference.losses), _numbered(found.losses)),
        "gradients": (reference.gradients, found.gradients),
        "weights": (reference.weights, found.weights),
        "buffers": (reference.buffers, found.buffers),
    }
    faults = []
    for kind, (ours, theirs) in pairs.items():
        comparison = Comparison(kind, limit_of(kind, precision))
        comparison.add_all(ours, theirs)
        if not comparison.is_equal:
            faults.append(str(comparison))
    if faults:
        head = f"{ranks} ranks under {made.strategy.source} do not mean what one device does:"
        raise AssertionError("\n".join([head, *faults]))
    return found


def _on_one_device(plan: NetworkPlan, steps: int, learning_rate: float) -> Simulation:
    """The same steps with the uncaptured network, under the same random numbers."""
    net = copy.deepcopy(plan.net)
    args, kwargs = copy.deepcopy((plan.args, dict(plan.kwargs)))
    state = RandomState(seed=current_state().seed)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    result: Any = None
    for _ in range(steps):
        net.zero_grad()
        leaves = leaves_of(net, args, kwargs)
        for leaf in leaves.values():
            leaf.grad = None
        key = state.next_key(training=net.training)
        with inside_engine(), track(net), random_mode(key):
            result = net.forward(*args, **kwargs)
        made = [t for t in flatten(result)[1].values() if t.requires_grad]
        torch.autograd.backward(made, [torch.ones_like(tensor) for tensor in made])
        losses.append(sum(float(tensor.detach().sum()) for tensor in made))
        named: dict[str, Tensor] = dict(net.named_parameters())
        named |= {gradient_name("grad_input", p, dict(named)): t for p, t in leaves.items()}
        gradients = {p: t.grad.clone() for p, t in named.items() if t.grad is not None}
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.sub_(learning_rate * parameter.grad)
        state.optimizer_stepped()
    weights = {path: tensor.detach() for path, tensor in net.named_parameters()}
    buffers = dict(net.named_buffers())
    return Simulation(plan, result, gradients, weights, buffers, tuple(losses), (), {})


def _numbered(losses: Sequence[float]) -> dict[str, Tensor]:
    made = enumerate(losses, start=1)
    return {f"loss {number}": torch.tensor(loss, dtype=torch.float64) for number, loss in made}
