"""A whole training step as one program: loss, backward, reductions and optimizer.

The fast path of `Model.train`, `TrainOneStepCell` and `compile_step`. The optimizer stays torch's
own object: its state lives where torch keeps it, as the pieces of this rank, and what its schedule
changes (learning rate, momentum) goes in as numbers at every step.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from distcell.capture import capture_step, flatten, hyperparameters, rebuild
from distcell.capture.arguments import argument_names
from distcell.capture.guard import call_key
from distcell.capture.update import Adjust
from distcell.cell import Cell, inside_engine
from distcell.compat import without_overrides
from distcell.context import auto_parallel_context, launch
from distcell.dtype import DTYPES, name_of
from distcell.engine.backend import Backend, Piece, RankBackend
from distcell.engine.observe import StepEvent, observer
from distcell.engine.optimizers import check_optimizer
from distcell.engine.state import MAX_CALLS, ParallelState, state_of
from distcell.engine.transfer import Loadable
from distcell.engine.wrapped import check_unwrapped
from distcell.errors import UserTypeError
from distcell.graph import Input
from distcell.lazy import materialize
from distcell.parameter import global_shape
from distcell.random import current_state, random_mode
from distcell.scope import track

Loss = Callable[..., Any]
Step = Callable[..., Any]


def compile_step(
    net: torch.nn.Module, loss_fn: Callable[..., Any] | None, optimizer: Optimizer
) -> Step:
    """A function that makes one training step and returns the loss before it.

    Args:
        net: A Cell, or a module made parallel by `parallelize`.
        loss_fn: Takes the network's output and the last item of the batch. None: the network takes
            the whole batch and returns the loss.
        optimizer: A torch optimizer of the network's parameters.

    Raises:
        UserTypeError: When the network is not parallel.

    Example:
        >>> import distcell as dc
        >>> net = dc.parallelize(torch.nn.Linear(2, 1))
        >>> step = compile_step(net, torch.nn.MSELoss(), torch.optim.SGD(net.parameters(), 0.1))
        >>> step(torch.zeros(4, 2), torch.zeros(4, 1)).shape
        torch.Size([])
    """
    if not isinstance(net, Cell) or not net.is_auto_parallel:
        raise UserTypeError("the network is not parallel", hint="call `dc.parallelize(net)` first")
    return _StepFunction(net, loss_fn, optimizer)


def _loss(net: Cell, loss_fn: Callable[..., Any] | None) -> Loss:
    # called inside of the engine, where calls of Cells are plain ones
    if loss_fn is None:
        return lambda module, *batch: module(*batch)
    return lambda module, *batch: loss_fn(module(*batch[:-1]), batch[-1])


class _StepFunction:
    """What `compile_step` returns."""

    def __init__(self, net: Cell, loss_fn: Callable[..., Any] | None, optimizer: Optimizer) -> None:
        self.net, self.loss, self.optimizer = net, _loss(net, loss_fn), optimizer
        self._has_label = loss_fn is not None
        self._functions = () if loss_fn is None else (loss_fn,)
        self._steps: OrderedDict[Hashable, LoadedStep] = OrderedDict()
        self._named: dict[Hashable, list[str]] = {}

    def __call__(self, *batch: Any) -> Any:
        options = launch()
        observer().called(self.net, self.optimizer)
        is_alone = auto_parallel_context().parallel_mode == "stand_alone"
        if options.mode == "eager" or is_alone or not self.net.is_auto_parallel:
            return self._on_one_device(batch)
        state = state_of(self.net, options)
        given = dict(zip(self._names(len(batch)), batch, strict=True))
        _, leaves = flatten(given)
        key = self._key(state, batch)
        step = self._steps.get(key)
        if step is None:
            step = self._load(state, batch, leaves)
            # the first call cuts the parameters, and their shapes are part of the key
            key = self._key(state, batch)
            self._steps[key] = step
            while len(self._steps) > MAX_CALLS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        with current_state().outermost_call(training=self.net.training) as random_key:
            state.watch(leaves, random_key)
            with without_overrides():  # what the program runs on is the rank's own, piece or not
                result = step(leaves, random_key)
        current_state().optimizer_stepped()
        return result

    def _key(self, state: ParallelState, batch: Sequence[Any]) -> Hashable:
        with without_overrides():
            key = call_key(self.net, batch, {}, own_hooks=True, functions=self._functions)
        return id(state), key, optimizer_key(self.optimizer)

    def _names(self, count: int) -> list[str]:
        """The names of the items of a batch, as patterns on inputs match them."""
        asked = (count, self.net.forward)
        if asked not in self._named:  # to look at a signature takes long
            self._named[asked] = self._find_names(count)
        return self._named[asked]

    def _find_names(self, count: int) -> list[str]:
        taken = count - 1 if self._has_label else count
        names = [name.replace(".", "_") for name in argument_names(self.net, taken)]
        if self._has_label:  # it goes to the loss function, not to the network
            names.append("label_" if "label" in names else "label")
        return names

    def _on_one_device(self, batch: Sequence[Any]) -> Any:
        materialize(*self.net.parameters())
        self.optimizer.zero_grad()
        counted = current_state().outermost_call(training=self.net.training)
        with counted as key, inside_engine(), track(self.net), random_mode(key):
            result = self.loss(self.net, *batch)
        loss = result[0] if isinstance(result, tuple) else result
        loss.backward()
        self.optimizer.step()
        return _detached(result)

    def _load(
        self, state: ParallelState, batch: Sequence[Any], leaves: Mapping[str, Tensor]
    ) -> LoadedStep:
        check_unwrapped(self.net)
        check_optimizer(self.optimizer)

        def make() -> Loadable:
            shapes = {
                path: tuple(global_shape(tensor))
                for path, tensor in (*self.net.named_parameters(), *self.net.named_buffers())
            }
            whole, _ = state.global_arguments(batch, {}, leaves)
            with inside_engine(), current_state().held():
                captured = capture_step(
                    self.net,
                    self._named_loss(len(batch)),
                    self.optimizer,
                    whole,
                    {},
                    shapes=shapes,
                    with_grads=observer().wants_gradients,
                    adjust=_multiply(state.gradient_factor),
                )
            state.planned = state.plan(self.net, captured)
            metas = {
                path: [list(meta.shape), name_of(meta.dtype), meta.fill]
                for path, meta in captured.state_meta.items()
            }
            return Loadable(
                state.planned.program, captured.constants, captured.output_spec, (), metas
            )

        loadable = state.together(self.net, leaves, make)
        state.shard_parameters(self.net, loadable.program)
        backend = state.backend_for(loadable.program.mesh, self.net)
        return LoadedStep(self.net, self.optimizer, loadable, backend)

    def _named_loss(self, count: int) -> Loss:
        """The loss with the batch's names as its arguments', for patterns on inputs to match."""
        loss = self.loss

        def named(module: Any, *batch: Any) -> Any:
            return loss(module, *batch)

        names = self._names(count)
        first = "net_" if "net" in names else "net"
        kind = inspect.Parameter.POSITIONAL_ONLY
        parameters = [inspect.Parameter(name, kind) for name in (first, *names)]
        named.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return named


def _multiply(factor: int) -> Adjust | None:
    """What multiplies gradients before the update; None for a factor of one."""
    if factor == 1:
        return None

    def multiply(parameters: list[Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad * factor

    return multiply


def _detached(result: Any) -> Any:
    spec, leaves = flatten(result)
    return rebuild(spec, [leaf.detach() for leaf in leaves.values()])


def optimizer_key(optimizer: Optimizer) -> Hashable:
    """What a captured step depends on in an optimizer: everything but the numbers that go in."""
    inputs = {path.split(".")[1] for path, _ in hyperparameters(optimizer)}
    groups = []
    for group in optimizer.param_groups:
        rest = {name: item for name, item in group.items() if name != "params"}
        fixed = {n: item for n, item in rest.items() if n not in inputs}
        groups.append((repr(sorted(fixed.items())), tuple(map(id, group["params"]))))
    return tuple(groups), tuple(path for path, _ in hyperparameters(optimizer))


_plain = Tensor.detach
"""The tensor without its gradient, whatever kind of parameter it is."""


class LoadedStep:
    """A training step under a plan, as one or all ranks run it."""

    def __init__(
        self, net: Cell, optimizer: Optimizer, loadable: Loadable, backend: Backend
    ) -> None:
        self.net, self.optimizer, self.loadable, self.backend = net, optimizer, loadable, backend
        program = self.program = loadable.program
        written = {(o.kind, o.path) for o in program.graph.outputs}
        donated = [
            i.value
            for i in program.graph.inputs
            if i.kind in ("param", "state") and (i.kind, i.path) in written
        ]
        self._run = backend.load(program, donated)
        self._parameters = dict(net.named_parameters())
        # buffers are looked up at each step: users put others in their place
        self._buffers: dict[str, Tensor] = {}
        self._has_buffers = any(item.kind == "buffer" for item in program.graph.inputs)
        self._constants = {
            item.value: backend.enter(program, item.value, loadable.constants[item.path])
            for item in program.graph.inputs
            if item.kind == "constant"
        }
        self._state_names = {i.path: i.value for i in program.graph.inputs if i.kind == "state"}

    def __call__(self, inputs: Mapping[str, Tensor], key: Tensor) -> Any:
        """What the loss function returned; parameters, buffers and state are updated."""
        program = self.program
        if self._has_buffers:
            self._buffers = dict(self.net.named_buffers())
        self._make_state()
        scalars = dict(hyperparameters(self.optimizer))
        givens = {"inputs": inputs, "scalars": scalars, "key": key}
        boxed = [self._piece(item, givens) for item in program.graph.inputs]
        made = self._run(boxed)
        outputs: list[Tensor] = []
        gradients: dict[str, Tensor] = {}
        for output, piece in zip(program.graph.outputs, made, strict=True):
            if output.kind == "output":
                outputs.append(self.backend.leave(program, output.value, piece))
            elif output.kind == "grad":
                gradients[output.path] = self.backend.leave(program, output.value, piece)
            elif not self.backend.holds_pieces or output.kind == "buffer":
                held = self._held(output.kind, output.path)
                self.backend.write(program, output.value, piece, held)
        if observer().wants_steps:
            weights = {path: _plain(parameter) for path, parameter in self._parameters.items()}
            event = StepEvent(self.net, self.optimizer, outputs[0], gradients, weights)
            observer().stepped(event)
        return rebuild(self.loadable.output_spec, outputs)

    def _piece(self, item: Input, givens: Mapping[str, Any]) -> Piece:
        if item.kind == "constant":
            return self._constants[item.value]
        if item.kind == "scalar":
            return self.backend.enter(self.program, item.value, givens["scalars"][item.path])
        if item.kind == "random":
            return self.backend.enter(self.program, item.value, givens["key"])
        if item.kind == "input":
            return self.backend.enter(
                self.program, item.value, givens["inputs"][item.path].detach()
            )
        held = _plain(self._held(item.kind, item.path))
        if item.kind == "buffer" and not self.backend.holds_pieces:
            return self.backend.enter(self.program, item.value, held)
        return self.backend.enter_held(self.program, item.value, held)

    def _held(self, kind: str, path: str) -> Tensor:
        if kind == "param":
            return self._parameters[path]
        if kind == "buffer":
            return self._buffers[path]
        parameter, _, name = path.rpartition("/")
        found: Tensor = self.optimizer.state[self._parameters[parameter]][name]
        return found

    def _make_state(self) -> None:
        """Gives the optimizer the state that it has not made yet, as the pieces of this rank."""
        names = self._state_names
        for path, (shape, dtype, fill) in self.loadable.extra.items():
            if path not in names:
                continue
            parameter, _, name = path.rpartition("/")
            state = self.optimizer.state[self._parameters[parameter]]
            if name not in state:
                if isinstance(self.backend, RankBackend):
                    rank = self.backend.collectives.rank
                    shape = self.program.local_shape(names[path], rank)
                device = self._parameters[parameter].device if shape else "cpu"
                state[name] = torch.full(shape, fill, dtype=DTYPES[dtype], device=device)
