"""Captures a whole training step: loss, gradients and the optimizer's update in one graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from distcell.capture.arguments import argument_names
from distcell.capture.cell import Captured, Job, capture
from distcell.capture.convert import Namer
from distcell.capture.probe import StateMeta
from distcell.capture.tree import Spec, rebuild
from distcell.capture.update import Adjust, capture_update
from distcell.errors import CaptureError
from distcell.graph import GRADIENTS, Graph, Input, Op, Output, Ref, verify, without_dead_ops


@dataclass(frozen=True)
class CapturedStep:
    """A training step as data.

    Args:
        graph: Its inputs are of kind `param`, `buffer`, `input`, `random`, `constant`, `state` and
            `scalar`; its outputs are `output` (the loss first), the new `param`, `buffer` and
            `state`, and the `grad` of parameters when asked for.
        constants: The tensors that the code made or found, by the path of their input.
        output_spec: What the loss function returned.
        tied: For each further path of a parameter or buffer the path that it goes by.
        state_meta: The optimizer's state that does not exist yet, by path.
        scalars: The hyperparameters that are inputs, with their values at capture.
    """

    graph: Graph
    constants: Mapping[str, Tensor]
    output_spec: Spec
    tied: Mapping[str, str] = field(default_factory=dict)
    state_meta: Mapping[str, StateMeta] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)

    def result(self, outputs: Sequence[Any]) -> Any:
        """What the loss function returns, given the values of the outputs."""
        return rebuild(self.output_spec, outputs)


def capture_step(
    module: nn.Module,
    loss: Callable[..., Any],
    optimizer: Optimizer,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    with_grads: bool = False,
    adjust: Adjust | None = None,
) -> CapturedStep:
    """The ops of the loss, its backward and the optimizer's step, at global shapes.

    Neither the module nor the optimizer is changed.

    Args:
        module: The network.
        loss: Called as `loss(module, *args, **kwargs)`; returns the loss, a scalar, or a tuple
            whose first item is the loss.
        optimizer: Of any class that works as torch's do; its loops over lists of tensors
            (`foreach`, `fused`) are written out.
        args: Further arguments of `loss`.
        kwargs: Its keyword arguments.
        shapes: Global shapes of parameters and buffers by path, where the module holds slices.
        with_grads: Whether the gradients leave the graph too.
        adjust: Called with the parameters, which have their gradients, before the update: to
            clip them, for example.

    Raises:
        CaptureError: When the step does something that a graph cannot say.

    Example:
        >>> import torch
        >>> net, x = nn.Linear(3, 1), torch.ones(4, 3)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> step = capture_step(net, lambda net, x: net(x).sum(), optimizer, (x,), {})
        >>> [f"{output.kind} {output.path}" for output in step.graph.outputs]
        ['output 0', 'param weight', 'param bias']
    """
    _refuse_gradient_hooks(module)
    names = argument_names(loss, 1 + len(args))[1:]

    def run(*args: Any, **kwargs: Any) -> Any:
        return loss(module, *args, **kwargs)

    captured = capture(Job(module, run, shapes=shapes or {}, from_loss=True), names, args, kwargs)
    _check_loss(captured)
    grads = {o.path: captured.graph.values[o.value].shape for o in captured.graph.outputs
             if o.kind == "grad"}  # fmt: skip
    paths = {id(p): path for path, p in module.named_parameters()}
    trained = {path: shape for path, shape in grads.items() if path in set(paths.values())}
    update = capture_update(optimizer, paths, trained, adjust)
    graph = captured.graph
    if update.adjustment is not None:
        graph = join(graph, update.adjustment)
    graph = without_dead_ops(_without_grads(join(graph, update.graph), with_grads))
    verify(graph)
    return CapturedStep(
        graph,
        {**captured.constants, **update.constants},
        captured.output_spec,
        captured.tied,
        update.state_meta,
        update.scalars,
    )


def _refuse_gradient_hooks(module: nn.Module) -> None:
    for path, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CaptureError(
                f"the parameter `{path}` has a hook on its gradient, which would not be called",
                hint="remove it, or train in a loop of your own",
            )


def _check_loss(captured: Captured) -> None:
    outputs = [o.value for o in captured.graph.outputs if o.kind == "output"]
    first = captured.graph.values[outputs[0]] if outputs else None
    if first is None or first.shape or 0 not in captured.differentiable:
        found = "no tensor" if first is None else str(first)
        raise CaptureError(
            "the loss must be a scalar that depends on parameters",
            where=[f"the loss function returns {found} first"],
            hint="return the loss, or a tuple of the loss and whatever else",
        )


def join(graph: Graph, update: Graph) -> Graph:
    """One graph that does both; the second takes what the first makes, by kind and path."""
    made = {(o.kind, o.path): o.value for o in graph.outputs}
    given = {(i.kind, i.path): i.value for i in graph.inputs}
    namer = Namer(graph.values)
    names: dict[str, str] = {}
    inputs: list[Input] = []
    for item in update.inputs:
        key = (item.kind, item.path)
        known = made.get(key) or given.get(key)
        names[item.value] = known or namer(item.value)
        if known is None:
            inputs.append(Input(names[item.value], item.kind, item.path))
    names |= {name: namer(name) for op in update.ops for name in op.outputs}
    ops = [_renamed(op, names) for op in update.ops]
    values = dict(graph.values)
    for old, new in names.items():
        values.setdefault(new, replace(update.values[old], name=new))
    written = [Output(names[o.value], o.kind, o.path) for o in update.outputs]
    replaced = {(o.kind, o.path) for o in written}
    kept = [o for o in graph.outputs if (o.kind, o.path) not in replaced]
    return Graph(
        (*graph.inputs, *inputs), (*graph.ops, *ops), (*kept, *written), values, graph.borders
    )


def _without_grads(graph: Graph, with_grads: bool) -> Graph:
    outputs = tuple(
        o for o in graph.outputs if o.kind not in GRADIENTS or (with_grads and o.kind == "grad")
    )
    return replace(graph, outputs=outputs)


def _renamed(op: Op, names: Mapping[str, str]) -> Op:
    changed = op.map_refs(lambda name: Ref(names[name]))
    return replace(changed, outputs=tuple(names[name] for name in op.outputs))
