"""What the engine keeps for one outermost Cell: strategy, mesh, layouts, loaded calls."""

from __future__ import annotations

import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from distcell.capture import Captured, CapturedStep, capture_call, flatten, rebuild
from distcell.capture.arguments import argument_names
from distcell.capture.guard import call_key
from distcell.cell import Cell, declared_rules, inside_engine
from distcell.compat import without_overrides, without_saved_tensor_hooks
from distcell.context import LaunchOptions, auto_parallel_context
from distcell.engine.agreement import check_agreement, fingerprint
from distcell.engine.backend import Backend, RankBackend, SimulatedBackend, cut
from distcell.engine.call import Context, LoadedCall
from distcell.engine.garbage import collector_paused
from distcell.engine.observe import PlanEvent, observer
from distcell.engine.planning import Planned, plan_graph, with_rules
from distcell.engine.replicas import replicas_of
from distcell.engine.state_dict import install_state_dict_hooks
from distcell.engine.transfer import Loadable, plan_on_one_rank
from distcell.engine.watch import Watch
from distcell.engine.whole import note_cut
from distcell.engine.wrapped import check_unwrapped
from distcell.errors import OptimizerStateError, StrategyError
from distcell.layout import Layout
from distcell.lazy import is_lazy, materialize
from distcell.mesh import Mesh
from distcell.parameter import global_shape, is_placed, layout, set_layout
from distcell.piece import guard_piece, plain
from distcell.program import Program
from distcell.random import current_state
from distcell.runtime.world import collectives_for
from distcell.strategy import Strategy, load_strategy

MAX_CALLS = 64
"""How many captured calls of one Cell are kept; the one that was not used longest goes first."""

Leaves = Mapping[str, Tensor]
"""The tensors of a call by path."""

_states: WeakKeyDictionary[torch.nn.Module, ParallelState] = WeakKeyDictionary()


def state_of(cell: Cell, options: LaunchOptions) -> ParallelState:
    """The state of an outermost Cell, made at its first call.

    Raises:
        StrategyError: When the strategy was changed after parameters got their layouts.
    """
    found = _states.get(cell)
    asked = _asked(cell)
    if found is not None and found.options == options and found.asked == asked:
        return found
    if found is not None and found.options == options and found.layouts:
        raise StrategyError(
            "the strategy of the network was changed after its first call",
            where=[f"planned under  {found.strategy.source or 'the strategy of before'}"],
            hint="call `shard` and `set_auto_parallel_context` before the first call",
        )
    found = _states[cell] = ParallelState(cell, options, asked)
    return found


def _asked(cell: Cell) -> Hashable:
    """What the user has asked for in code: the context, and the cells' own `shard` calls."""
    declared = [m.sharding for m in cell.modules() if isinstance(m, Cell)]
    return auto_parallel_context(), tuple(id(each) for each in declared if each is not None)


def leaves_of(cell: Cell, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Leaves:
    """The tensors of a call by path: the argument's name, then the place in it.

    Raises:
        TypeError: When an argument is given twice, as Python says it.
    """
    names = argument_names(cell, len(args))
    if twice := set(names) & set(kwargs):
        raise TypeError(f"{type(cell).__name__} got multiple values for argument {min(twice)!r}")
    _, leaves = flatten({**dict(zip(names, args, strict=True)), **kwargs})
    return leaves


class ParallelState:
    """One network under one strategy on one mesh."""

    def __init__(self, cell: Cell, options: LaunchOptions, asked: Hashable = None) -> None:
        self.options, self.asked = options, asked
        self.strategy = strategy_for(cell, options)
        install_state_dict_hooks(cell)
        self.mesh = Mesh(self.strategy.mesh_for(options.ranks))
        # what the parameters' gradients are multiplied by
        mean = auto_parallel_context().gradients_mean
        self.gradient_factor = 1 if mean else replicas_of(self.strategy, self.mesh)
        self.layouts: dict[str, Layout] = {}
        self.backend: Backend | None = None
        # the last plan that this process made; None on ranks that received the program
        self.planned: Planned | None = None
        self.calls: OrderedDict[Hashable, LoadedCall] = OrderedDict()
        # calls that were planned and are not to run; in mode `plan` alone
        self.prepared: set[Hashable] = set()
        self._watch = Watch()

    def call(self, cell: Cell, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the network returns under the plan."""
        leaves = leaves_of(cell, args, kwargs)
        with without_overrides():  # the key asks each parameter, piece or not, for a few attributes
            key = call_key(cell, args, kwargs)
        loaded = self.calls.get(key)
        if loaded is None:
            loaded = self._load(cell, args, kwargs, leaves)
            # the first call cuts the parameters, and their shapes are part of the key
            key = call_key(cell, args, kwargs)
            self.calls[key] = loaded
            while len(self.calls) > MAX_CALLS:
                self.calls.popitem(last=False)
        self.calls.move_to_end(key)
        with current_state().outermost_call(training=cell.training) as random_key:
            self.watch(leaves, random_key)
            if torch.is_grad_enabled():
                loaded = self._special(loaded, cell, (args, kwargs), leaves) or loaded
            states = {**dict(cell.named_parameters()), **dict(cell.named_buffers())}
            return loaded(Context(states, leaves, random_key))

    def watch(self, leaves: Leaves, key: Tensor) -> None:
        """Looks whether all ranks still draw the same numbers and pass the same data.

        Raises:
            DataError: They pass other data.
            RankMismatchError: They draw other numbers.
        """
        if self.options.mode == "ranks" and self.mesh.size > 1:
            alike = leaves if self.strategy.data == "full" else {}
            self._watch.saw(alike, key, collectives_for(self.mesh))

    def plan_only(self, cell: Cell, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Plans what `call` would run."""
        leaves = leaves_of(cell, args, kwargs)
        key = call_key(cell, args, kwargs)
        if key not in self.prepared:
            self.prepared.add(key)
            self.prepare(cell, args, kwargs, leaves)

    def _load(
        self, cell: Cell, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: Leaves
    ) -> LoadedCall:
        loadable = self.prepare(cell, args, kwargs, leaves)
        backend = self.backend_for(loadable.program.mesh, cell)
        return LoadedCall(loadable, backend, gradient_factor=self.gradient_factor)

    def _special(
        self,
        loaded: LoadedCall,
        cell: Cell,
        given: tuple[Sequence[Any], Mapping[str, Any]],
        leaves: Leaves,
    ) -> LoadedCall | None:
        """The call for the gradients that came in last time, when these were not all."""
        present = loaded.present
        if present is None or all(present) or not any(present):
            return None
        if loaded.special is None or loaded.special.wanted != present:
            loadable = self.prepare(cell, *given, leaves, present=present)
            backend = self.backend_for(loadable.program.mesh, cell)
            loaded.special = LoadedCall(
                loadable, backend, loaded, gradient_factor=self.gradient_factor
            )
            loaded.special.wanted = present
        return loaded.special

    def prepare(
        self,
        cell: Cell,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        leaves: Leaves,
        *,
        present: tuple[bool, ...] | None = None,
    ) -> Loadable:
        """Plans a call that is new. On real ranks one of them plans, after all have agreed.

        Args:
            cell: The outermost Cell.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            leaves: The tensors among them by path.
            present: Which outputs gradients come in for; None: all.
        """

        def make() -> Loadable:
            whole = self.global_arguments(args, kwargs, leaves)
            captured = self.capture(cell, *whole, present=present)
            self.planned = self.plan(cell, captured)
            return Loadable(
                self.planned.program,
                captured.constants,
                captured.output_spec,
                captured.differentiable,
            )

        check_unwrapped(cell)
        loadable = self.together(cell, leaves, make)
        self.shard_parameters(cell, loadable.program)
        return loadable

    def global_arguments(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: Leaves
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments at global shapes: under `data: local` each rank was given its part."""
        if self.strategy.data == "full" or self.options.mode != "ranks":
            return tuple(args), dict(kwargs)
        spec, _ = flatten((tuple(args), dict(kwargs)))
        whole = [global_stand_in(p, t, self.strategy, self.mesh) for p, t in leaves.items()]
        found: tuple[tuple[Any, ...], dict[str, Any]] = rebuild(spec, whole)
        return found

    def together(self, cell: Cell, leaves: Leaves, make: Callable[[], Loadable]) -> Loadable:
        """What `make` gives; on real ranks one of them makes it, after all have agreed."""
        with collector_paused():
            if self.options.mode != "ranks":
                return make()
            collectives = collectives_for(self.mesh)
            check_agreement(collectives, self._facts(cell, leaves))
            loadable = plan_on_one_rank(collectives, make)
            check_agreement(collectives, {"program": loadable.program.digest[:16]})
        return loadable

    def _facts(self, cell: Cell, leaves: Leaves) -> dict[str, str]:
        shapes = {path: (tuple(t.shape), str(t.dtype)) for path, t in leaves.items()}
        facts = {
            # a file may lie elsewhere on each host
            "strategy": f"{Path(self.strategy.source).name} {self.strategy.digest}",
            "seed": str(torch.initial_seed()),
            "call": f"{shapes} training={cell.training} grad={torch.is_grad_enabled()}",
        }
        if self.strategy.data == "full":
            facts["inputs"] = fingerprint(leaves)
        if not any(map(is_lazy, cell.parameters())):
            # later only what was put in since, such as another head
            fresh = {path: p for path, p in cell.named_parameters() if not is_placed(p)}
            facts["parameters"] = fingerprint(fresh) if self.layouts else _fingerprint_of(cell)
        return facts

    def capture(
        self,
        cell: Cell,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        present: tuple[bool, ...] | None = None,
    ) -> Captured:
        """The call as a graph at global shapes."""
        states = [*cell.named_parameters(), *cell.named_buffers()]
        shapes = {path: tuple(global_shape(tensor)) for path, tensor in states}
        with inside_engine(), without_saved_tensor_hooks() as hooked:
            if hooked:
                warnings.warn(
                    "hooks on saved tensors (a checkpoint around the network, `save_on_cpu`) see "
                    "nothing of a parallel network, which keeps itself what its backward needs",
                    stacklevel=2,
                )
            return capture_call(
                cell,
                args,
                kwargs,
                shapes=shapes,
                grad=torch.is_grad_enabled(),
                gradients_present=present,
                own_hooks=False,  # they run around the engine, at every call
            )

    def plan(self, cell: Cell, captured: Captured | CapturedStep) -> Planned:
        """The plan of a captured call; parameters that are split already keep their layouts."""
        self._forget_replaced(cell)
        # another Cell over the same parameters may have cut them already
        if self.options.mode == "ranks":
            self.layouts |= {p: layout(t) for p, t in cell.named_parameters() if is_placed(t)}
        groups: dict[str, list[str]] = {}
        for other, first in captured.tied.items():
            groups.setdefault(first, [first]).append(other)
        planned = plan_graph(
            captured.graph,
            cell,
            self.strategy,
            self.mesh,
            tied=groups.values(),
            fixed=self.layouts,
        )
        trains = isinstance(captured, CapturedStep) or bool(captured.with_gradients)
        observer().planned(PlanEvent(cell, planned, self.strategy, trains))
        return planned

    def _forget_replaced(self, cell: Cell) -> None:
        """Leaves parameters free that were put in the place of others of another shape."""
        shapes = {path: tuple(global_shape(p)) for path, p in cell.named_parameters()}
        self.layouts = {p: it for p, it in self.layouts.items() if shapes.get(p) == it.shape}

    def backend_for(self, mesh: Mesh, cell: Cell) -> Backend:
        """Where programs run: real ranks, or all in this process."""
        if self.backend is None:
            device = next((p.device for p in cell.parameters()), torch.device("cpu"))
            if self.options.mode == "ranks":
                is_local = self.strategy.data == "local"
                self.backend = RankBackend(mesh, device, local_data=is_local)
            else:
                self.backend = SimulatedBackend(mesh, device)
            self.mesh = mesh
        return self.backend

    def shard_parameters(self, cell: Cell, program: Program) -> None:
        """Gives each parameter its layout; on real ranks it keeps its piece only."""
        install_state_dict_hooks(cell)  # a cell may have come after the first call
        backend = self.backend_for(program.mesh, cell)
        on_ranks = isinstance(backend, RankBackend)
        parameters = dict(cell.named_parameters())
        items = [item for item in program.graph.inputs if item.kind == "param"]
        places = {item.path: program.layouts[item.value] for item in items}
        # simulated parameters stay whole; `check` refuses of them what real ranks refuse
        guarded = on_ranks or self.options.mode == "check"
        if guarded:
            fresh = {path: parameters[path] for path in places if not is_placed(parameters[path])}
            refuse_training_state({p: fresh[p] for p in fresh if places[p].split_axes})
        for path, place in places.items():
            parameter = parameters[path]
            # a parameter is cut once; one that came after the first call is cut like that before it
            if on_ranks and is_placed(parameter):
                continue
            materialize(parameter)
            self.layouts[path] = place
            set_layout(parameter, place)
            if isinstance(backend, RankBackend) and place.axes:
                piece = cut(place, plain(parameter), backend.mesh, backend.collectives.rank)
                parameter.data = piece.clone() if _shares(piece, parameter) else piece
                note_cut(parameter, backend)
            if guarded and place.split_axes:
                guard_piece(parameter)


def _fingerprint_of(cell: Cell) -> str:
    """Of what is alike on all ranks: values of what each holds whole, layouts of what is cut.

    A copy of a network that was called, and one that shares cells with it, have pieces.
    """
    states = {**dict(cell.named_parameters()), **dict(cell.named_buffers())}
    pieces = {path: tensor for path, tensor in states.items() if layout(tensor).axes}
    whole = fingerprint({path: t for path, t in states.items() if path not in pieces})
    places = repr([(path, str(layout(tensor))) for path, tensor in pieces.items()])
    return f"{whole} {zlib.crc32(places.encode()):08x}" if pieces else whole


def refuse_training_state(parameters: Mapping[str, Tensor]) -> None:
    """Sharding comes before training.

    Args:
        parameters: By path, those that are about to be cut.

    Raises:
        OptimizerStateError: When one has a gradient, which is of the global shape.
    """
    found = [path for path, parameter in parameters.items() if parameter.grad is not None]
    if found:
        raise OptimizerStateError(
            f"parameter `{found[0]}` has a gradient of its global shape",
            where=[f"so have {len(found) - 1} more"] if len(found) > 1 else [],
            hint="make the first call of the network before training, or set `.grad` to None",
        )


def global_stand_in(path: str, part: Tensor, strategy: Strategy, mesh: Mesh) -> Tensor:
    """A tensor without memory of its own that has the global shape of a rank's part.

    Raises:
        StrategyError: When the strategy gives the input a number of slices, not axes.
    """
    spec = strategy.input_spec(path) or strategy.input_spec(path.split(".", maxsplit=1)[0])
    shape = list(part.shape)
    for dim, one in enumerate(spec.dims if spec else ()):
        if one.slices is not None:
            raise StrategyError(
                f"`data: local` needs the axes that split `{path}`, not a number of slices",
                where=[spec.source if spec else ""],
                hint="name the axes, like [dp]",
            )
        shape[dim] *= mesh.extent(one.axes)
    whole = part.detach().new_zeros(()).expand(shape)
    return whole.requires_grad_(part.requires_grad) if part.requires_grad else whole


def strategy_for(cell: Cell, options: LaunchOptions) -> Strategy:
    """The strategy of the job: the context's, else the launcher's, else `data`."""
    context = auto_parallel_context()
    if context.pipeline_stages > 1:
        raise StrategyError(
            f"`pipeline_stages={context.pipeline_stages}`: a pipeline is not built",
            hint="leave it out: all ranks run the whole network, split by the strategy",
        )
    name = context.strategy or options.strategy or "data"
    if context.parallel_mode == "data_parallel":
        name = "data"
    strategy = with_rules(load_strategy(name), declared_rules(cell))
    if not context.full_batch:
        strategy = replace(strategy, data="local")
    if strategy.random == "torch":
        raise StrategyError(
            "`random: torch` is not built: torch's own stream depends on the order of draws",
            where=[strategy.source],
            hint="leave it out; `random: counter` is the same on any number of ranks",
        )
    return strategy


def _shares(piece: Tensor, parameter: Tensor) -> bool:
    return piece.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
