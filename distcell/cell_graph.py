"""A Cell as a graph: compiled, read back, and what the plan says of its parameters."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from distcell.cell_base import CellBase, check_bool, inside_engine
from distcell.context import launch, rank_of_process
from distcell.errors import NotFoundError, SettingError, UserTypeError
from distcell.graph import Graph, from_json, to_json
from distcell.layout import Layout
from distcell.mesh import Mesh
from distcell.parameter import global_shape
from distcell.program import Program
from distcell.sharding.plan import Plan


class ParameterLayout(NamedTuple):
    """The layout of a parameter as MindSpore writes it.

    Args:
        device_matrix: the sizes of the mesh's axes.
        tensor_map: for each dim the axis that splits it, counted from the right from 0; -1 for
            none, a tuple for several (major to minor).
        slice_shape: the shape of this rank's piece.
        field_size: always 0: no parameter is split by fields.
        uniform_split: whether all ranks hold pieces of one shape.
        opt_shard_group: always empty: what an optimizer holds is split as its parameter is.
        full_shape: the global shape.

    >>> ParameterLayout([2, 4], [0, -1], [16, 32], 0, True, "", [64, 32]).tensor_map
    [0, -1]
    """

    device_matrix: list[int]
    tensor_map: list[int | tuple[int, ...]]
    slice_shape: list[int]
    field_size: int
    uniform_split: bool
    opt_shard_group: str
    full_shape: list[int]


@dataclass(frozen=True)
class CompiledGraph:
    """What `compile` made of one call.

    Args:
        key: what the call depends on.
        plan: the captured graph with its layouts.
        program: what each rank runs.
    """

    key: Hashable
    plan: Plan
    program: Program


class _Graphs:
    """The compiled graphs of a Cell. No container: what it holds is no part of a call's key."""

    def __init__(self) -> None:
        self.by_phase: dict[str, CompiledGraph] = {}
        self.has_run = False
        self.inputs: tuple[Any, ...] | None = None
        self.layouts: dict[str, ParameterLayout] = {}
        self.parameters: list[str] | None = None

    def __reduce__(self) -> tuple[type[_Graphs], tuple[()]]:
        return _Graphs, ()  # a copy is compiled anew


class CellGraph(CellBase):
    """`compile` and what it tells."""

    phase: str

    def compile(self, *inputs: Any, **options: Any) -> None:
        """Captures and plans the call of these inputs, for the current phase; nothing is run.

        With inputs it is MindSpore's. Without, it is torch's `Module.compile`: the cell's calls
        then go through `torch.compile`, with the options that takes.

        Args:
            inputs: what `construct` takes.
            options: torch's.

        Raises:
            UserTypeError: both inputs and options are given.
            UserValueError: two parameters have the same name.
            CaptureError: the call cannot be captured.
            StrategyError: the strategy does not fit the cell.

        >>> from distcell import nn
        >>> net = nn.Dense(2, 3)
        >>> net.compile(torch.ones(4, 2))
        >>> net.parameter_layout_dict["weight"].full_shape
        [3, 2]
        """
        if not inputs:
            super().compile(**options)
            self._torch_compiled = True
            self._refresh_call()
            return
        if options:
            raise UserTypeError(
                f"`compile` takes inputs, or torch's options: `{next(iter(options))}` is one",
                hint="call `compile(*inputs)`, or `compile(backend=...)` without inputs",
            )
        from distcell.capture.guard import call_key

        _check_names(self)
        key = call_key(self, inputs, {}, (launch(), self.is_auto_parallel))
        graphs = _graphs_of(self)
        found = graphs.by_phase.get(self.phase)
        if found is None or found.key != key:
            found = graphs.by_phase[self.phase] = _compiled(self, inputs, key)
        graph = found.plan.graph
        needed = {name for name, ops in graph.users.items() if ops}
        needed |= {item.value for item in graph.outputs}
        params = [item for item in graph.inputs if item.kind == "param"]
        used = [item for item in params if item.value in needed]
        graphs.parameters = [item.path for item in used]
        graphs.layouts = {
            item.path: parameter_layout(found.plan.layouts[item.value], found.plan.mesh)
            for item in used
        }

    def compile_and_run(self, *inputs: Any) -> Any:
        """Returns what the cell returns for the inputs, compiled for them before.

        Args:
            inputs: what `construct` takes.

        Raises:
            UserTypeError: there are none.

        >>> from distcell import nn
        >>> nn.ReLU().compile_and_run(torch.ones(2))
        tensor([1., 1.])
        """
        if not inputs:
            raise UserTypeError("`compile_and_run` takes the inputs of `construct`")
        CellGraph.compile(self, *inputs)
        _graphs_of(self).has_run = True
        return self(*inputs)

    def auto_parallel_compile_and_run(self) -> bool:
        """Returns whether `compile_and_run` was called while the cell is parallel.

        >>> CellGraph.auto_parallel_compile_and_run(CellGraph())
        False
        """
        return _graphs_of(self).has_run and self.is_auto_parallel

    def get_func_graph_proto(self) -> bytes | None:
        """Returns the graph of the current phase, with the layout of every value; None before.

        The bytes are JSON, the same for the same graph, mesh and layouts; `read_graph` reads them.

        >>> from distcell import nn
        >>> net = nn.ReLU()
        >>> net.compile(torch.ones(2))
        >>> graph, mesh, layouts = read_graph(net.get_func_graph_proto())
        >>> [op.target for op in graph.ops]
        ['aten.relu.default']
        """
        found = _graphs_of(self).by_phase.get(self.phase)
        if found is None:
            return None
        plan = found.plan
        content = {
            "distcell": 1,
            "phase": self.phase,
            "mesh": to_json(plan.mesh),
            "graph": to_json(plan.graph),
            "layouts": to_json(plan.layouts),
        }
        return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()

    @property
    def parameter_layout_dict(self) -> dict[str, ParameterLayout]:
        """By path the layouts of the parameters that the compiled graph uses; or what was assigned.

        Raises:
            UserTypeError: what is assigned is no dict.
        """
        return _graphs_of(self).layouts

    @parameter_layout_dict.setter
    def parameter_layout_dict(self, value: dict[str, ParameterLayout]) -> None:
        if not isinstance(value, dict):
            raise UserTypeError(f"`parameter_layout_dict` is a {type(value).__name__}, not a dict")
        _graphs_of(self).layouts = value

    @property
    def parallel_parameter_name_list(self) -> list[str]:
        """The paths of the parameters that the compiled graph uses; empty before `compile`."""
        return list(_graphs_of(self).parameters or ())

    def load_parameter_slice(self, params: Mapping[str, torch.Tensor] | None = None) -> None:
        """Splits the parameters as the compiled graph says; a rank then holds its pieces.

        The first call of a parallel cell does the same. What is split already stays. On one device
        and in a simulation the parameters stay whole.

        Args:
            params: by path, values to load before: global ones, or this rank's pieces. None, and
                parameters of the cell itself, load nothing.

        Raises:
            UserTypeError: it is no mapping.
            NotFoundError: a path is that of no parameter.
            SettingError: the cell was not compiled.

        >>> from distcell import nn
        >>> net = nn.Dense(2, 3, has_bias=False)
        >>> net.compile(torch.ones(4, 2))
        >>> net.load_parameter_slice({"weight": torch.ones(3, 2)})
        >>> net.weight.sum().item()
        6.0
        """
        own = dict(torch.nn.Module.named_parameters(self, remove_duplicate=False))
        if params is not None and not isinstance(params, Mapping):
            raise UserTypeError(f"`params` is a {type(params).__name__}, not a dict")
        new = {path: value for path, value in (params or {}).items() if own.get(path) is not value}
        for path in new:
            if path not in own:
                raise NotFoundError(f"the cell has no parameter `{path}`")
        compiled = _compiled_now(self)
        if self.is_auto_parallel and launch().mode not in ("eager", "plan"):
            from distcell.engine.state import state_of

            state_of(self, launch()).shard_parameters(self, compiled.program)  # type: ignore[arg-type]
        if new:
            self.load_state_dict(new, strict=False)

    def set_parallel_input_with_inputs(self, *inputs: Any, **named: Any) -> None:
        """Notes the pieces of the inputs that this rank computes with: `parallel_inputs_run`.

        Args:
            inputs: what `construct` takes, at global shapes.
            named: the same by name.

        Raises:
            SettingError: the cell was not compiled.
            NotFoundError: an input is none of the compiled graph's.

        >>> from distcell import nn
        >>> net = nn.ReLU()
        >>> net.compile(torch.ones(2))
        >>> net.set_parallel_input_with_inputs(torch.ones(2))
        >>> net.parallel_inputs_run
        (tensor([1., 1.]),)
        """
        from distcell.capture import flatten
        from distcell.capture.arguments import argument_names

        plan = _compiled_now(self).plan
        names = argument_names(self, len(inputs))
        given = {**dict(zip(names, inputs, strict=True)), **named}
        rank = rank_of_process()[0]
        layouts = {i.path: plan.layouts[i.value] for i in plan.graph.inputs if i.kind == "input"}
        pieces = []
        for path, tensor in flatten(given)[1].items():
            if path not in layouts:
                raise NotFoundError(
                    f"the compiled graph has no input `{path}`",
                    where=[f"its inputs are {', '.join(layouts)}"],
                )
            layout = layouts[path]
            pieces.append(layout.shard(tensor, plan.mesh, rank) if layout.axes else tensor)
        _graphs_of(self).inputs = tuple(pieces)

    @property
    def parallel_inputs_run(self) -> tuple[Any, ...] | None:
        """What `set_parallel_input_with_inputs` noted; None when it was not called."""
        return _graphs_of(self).inputs

    def exec_checkpoint_graph(self) -> OrderedDict[str, Any]:
        """Returns the global values of parameters and buffers: what a checkpoint holds.

        On ranks they are gathered: all ranks must call it.

        >>> from distcell import nn
        >>> list(nn.Dense(2, 3).exec_checkpoint_graph())
        ['weight', 'bias']
        """
        return OrderedDict(self.state_dict())

    def remove_redundant_parameters(self, recurse: bool = True) -> None:
        """Takes away the parameters that the compiled graph does not use.

        Args:
            recurse: whether those of children too.

        Raises:
            SettingError: the cell was not compiled.

        >>> from distcell import nn
        >>> net = nn.Dense(2, 3)
        >>> net.compile(torch.ones(4, 2))
        >>> net.remove_redundant_parameters()
        >>> len(list(net.parameters()))
        2
        """
        _compiled_now(self)
        check_bool("recurse", recurse)
        used = {id(self.get_parameter(path)) for path in self.parallel_parameter_name_list}
        for module in torch.nn.Module.modules(self) if recurse else [self]:
            for attribute, param in list(module._parameters.items()):
                if param is not None and id(param) not in used:
                    module._parameters[attribute] = None


def read_graph(proto: bytes) -> tuple[Graph, Mesh, dict[str, Layout]]:
    """Returns the graph, the mesh and the layouts that `get_func_graph_proto` wrote.

    Args:
        proto: its bytes.

    Raises:
        UserTypeError: it is no bytes.

    >>> from distcell import nn
    >>> net = nn.ReLU()
    >>> net.compile(torch.ones(2))
    >>> print(read_graph(net.get_func_graph_proto())[1])
    one rank
    """
    if not isinstance(proto, bytes):
        raise UserTypeError(f"a {type(proto).__name__} is no graph", hint="compile the cell first")
    content = json.loads(proto)
    layouts: dict[str, Layout] = from_json(content["layouts"])
    graph: Graph = from_json(content["graph"])
    mesh: Mesh = from_json(content["mesh"])
    return graph, mesh, layouts


def parameter_layout(layout: Layout, mesh: Mesh) -> ParameterLayout:
    """Returns a layout as MindSpore writes it.

    Args:
        layout: where a parameter lives.
        mesh: the ranks.

    >>> mesh = Mesh.parse("dp=2 tp=4")
    >>> parameter_layout(Layout.parse("[64@tp, 32]"), mesh)[:6]
    ([2, 4], [0, -1], [16, 32], 0, True, '')
    """
    places = {name: len(mesh.names) - 1 - place for place, name in enumerate(mesh.names)}
    tensor_map: list[int | tuple[int, ...]] = []
    for dim in layout.dims:
        axes = [places[name] for part in dim for axis in part.axes for name in mesh.resolve(axis)]
        tensor_map.append(-1 if not axes else axes[0] if len(axes) == 1 else tuple(axes))
    piece = layout.local_shape(mesh, rank_of_process()[0] % mesh.size)
    even = layout.is_even(mesh)
    return ParameterLayout([*mesh.shape], tensor_map, [*piece], 0, even, "", [*layout.shape])


def _graphs_of(cell: torch.nn.Module) -> _Graphs:
    found: _Graphs = cell.__dict__.setdefault("_compiled_graphs", _Graphs())
    return found


def _compiled_now(cell: CellGraph) -> CompiledGraph:
    found = _graphs_of(cell).by_phase.get(cell.phase)
    if found is None:
        raise SettingError(
            f"the cell was not compiled in phase `{cell.phase}`",
            hint="call `compile(*inputs)` first",
        )
    return found


def _check_names(cell: Any) -> None:
    cell.check_names()


def _compiled(cell: CellGraph, inputs: Sequence[Any], key: Hashable) -> CompiledGraph:
    from distcell.capture import capture_call
    from distcell.partition.partition import partition
    from distcell.sharding.planner import Annotations, make_plan

    states = (*cell.named_parameters(), *cell.named_buffers())
    shapes = {path: tuple(global_shape(tensor)) for path, tensor in states}
    with inside_engine():
        captured = capture_call(cell, inputs, {}, shapes=shapes, grad=torch.is_grad_enabled())
    options = launch()
    if options.mode == "eager" or not cell.is_auto_parallel:
        plan = make_plan(captured.graph, Mesh(), Annotations())
        return CompiledGraph(key, plan, partition(plan).program)
    from distcell.engine.planning import plan_graph
    from distcell.engine.state import state_of

    state: Any = state_of(cell, options)  # type: ignore[arg-type]
    tied: dict[str, list[str]] = {}
    for other, first in captured.tied.items():
        tied.setdefault(first, [first]).append(other)
    planned = plan_graph(
        captured.graph, cell, state.strategy, state.mesh, tied=tied.values(), fixed=state.layouts
    )
    return CompiledGraph(key, planned.plan, planned.program)
