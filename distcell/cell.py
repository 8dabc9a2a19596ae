"""The Cell: a torch module that can say how it is split, and that hands its call to the engine."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

import torch

from distcell.annotation import Sharding, TensorStrategy, param_specs, tensor_specs
from distcell.compat import has_hooks
from distcell.errors import UserTypeError
from distcell.parameter import Parameter, adopt, global_shape
from distcell.strategy.strategy import CellRule

_inside: ContextVar[bool] = ContextVar("inside_engine", default=False)


@contextmanager
def inside_engine() -> Iterator[None]:
    """Makes calls of Cells plain ones: for the engine, while it captures or runs a module itself.

    The engine calls `cell.forward(...)`, not `cell(...)`: the outermost cell's own hooks run around
    the engine, at every call, with global values.

    >>> with inside_engine():
    ...     is_inside_engine()
    True
    """
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def is_inside_engine() -> bool:
    """Returns whether calls of Cells are plain ones here.

    >>> is_inside_engine()
    False
    """
    return _inside.get()


class Cell(torch.nn.Module):
    """A `torch.nn.Module` with the parallel interface of MindSpore's Cell.

    A subclass defines `construct` (or `forward`, as in torch). Any torch module may be a child of
    a Cell, and the reverse. Parameters are `distcell.Parameter`s with their path as name.

    Args:
        auto_prefix: whether parameters of children get this cell's attribute names before theirs.
            Wrappers pass False, so that names do not change.

    >>> class Double(Cell):
    ...     def construct(self, x):
    ...         return 2 * x
    >>> Double()(torch.ones(2))
    tensor([2., 2.])
    """

    # Class attributes, because `parallelize` makes Cells of modules whose __init__ has run.
    _auto_parallel: bool = False
    _auto_prefix: bool = True
    _cell_path: str = ""
    _sharding: Sharding | None = None

    def __init__(self, auto_prefix: bool = True) -> None:
        super().__init__()
        if not auto_prefix:
            self._auto_prefix = False

    def construct(self, *inputs: Any, **kwargs: Any) -> Any:
        """Returns what the cell computes; a subclass defines it.

        Raises:
            UserTypeError: the class defines neither `construct` nor `forward`.
        """
        if type(self).forward is Cell.forward:
            raise UserTypeError(
                f"class `{type(self).__name__}` defines neither `construct` nor `forward`",
                hint="define `construct(self, x)`",
            )
        return self.forward(*inputs, **kwargs)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Returns `construct` of the same arguments: torch's name for it."""
        return self.construct(*inputs, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._auto_parallel or _inside.get():
            return super().__call__(*args, **kwargs)
        if has_hooks(self):
            return _call_between_hooks(self, args, kwargs)
        return _enter_engine(self, args, kwargs)

    def shard(
        self,
        in_strategy: tuple[TensorStrategy | None, ...],
        out_strategy: tuple[TensorStrategy | None, ...] | None = None,
        parameter_plan: Mapping[str, TensorStrategy] | None = None,
    ) -> Self:
        """Returns this cell, with a note of how its tensors are split. The last call wins.

        Args:
            in_strategy: for each tensor that enters, one entry per dim: a number of slices, an axis
                of the mesh, a tuple of axes (major to minor), or None. None for a whole tensor
                leaves it to propagation.
            out_strategy: the same for what leaves.
            parameter_plan: the same for parameters, by their name relative to this cell.

        Raises:
            UserTypeError: an argument or an entry has another type.
            StrategyError: an entry is no dim, an axis is used twice, or a parameter has another
                number of dims.
            NotFoundError: the cell has no parameter of that name.

        >>> cell = Cell().shard(((2, 1),), out_strategy=(("dp", None),))
        >>> str(cell.sharding.inputs[0]), str(cell.sharding.outputs[0])
        ('[2, _]', '[dp, _]')
        """
        caller = sys._getframe(1)
        source = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        named = self.named_parameters(remove_duplicate=False)
        self._sharding = Sharding(
            tensor_specs(in_strategy, "in_strategy", source),
            None if out_strategy is None else tensor_specs(out_strategy, "out_strategy", source),
            param_specs(parameter_plan or {}, {n: global_shape(p) for n, p in named}, source),
            source,
        )
        return self

    @property
    def sharding(self) -> Sharding | None:
        """What `shard` was told; None when it was not called."""
        return self._sharding

    def set_auto_parallel(self, mode: bool = True) -> Self:
        """Returns this cell, whose outermost calls now go through the engine.

        Args:
            mode: False makes it a plain module again.

        >>> Cell().set_auto_parallel().is_auto_parallel
        True
        """
        refresh_names(self)
        self._auto_parallel = mode
        return self

    @property
    def is_auto_parallel(self) -> bool:
        """Whether the outermost call goes through the engine."""
        return self._auto_parallel

    def set_train(self, mode: bool = True) -> Self:
        """Returns this cell, it and all its children in training (or evaluation) mode.

        Args:
            mode: False for evaluation.

        >>> Cell().set_train(False).training
        False
        """
        return self.train(mode)

    @property
    def cell_path(self) -> str:
        """The path in the outermost Cell that holds this one; empty for the outermost."""
        return self._cell_path

    def cells_and_names(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yields path and module of this cell (path `""`) and of all below it.

        >>> [name for name, _ in Cell().cells_and_names()]
        ['']
        """
        yield from self.named_modules()

    def parameters_and_names(
        self, name_prefix: str = "", expand: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yields path and parameter; tied parameters once.

        Args:
            name_prefix: put before each path.
            expand: whether parameters of children are among them.

        >>> list(Cell().parameters_and_names())
        []
        """
        refresh_names(self)
        yield from self.named_parameters(name_prefix, expand)

    def get_parameters(self, expand: bool = True) -> Iterator[torch.nn.Parameter]:
        """Yields the parameters; tied ones once.

        Args:
            expand: whether parameters of children are among them.

        >>> list(Cell().get_parameters())
        []
        """
        yield from (param for _, param in self.parameters_and_names(expand=expand))

    def trainable_params(self, recurse: bool = True) -> list[torch.nn.Parameter]:
        """Returns the parameters that are trained, in the order of their definition.

        Args:
            recurse: whether parameters of children are among them.

        >>> Cell().trainable_params()
        []
        """
        params = self.parameters_and_names(expand=recurse)
        return [param for _, param in params if param.requires_grad]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, torch.nn.Module) and self._auto_prefix:
            refresh_names(value, name)

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        """Adds a child; its parameters' names get `name` before them.

        Args:
            name: the attribute.
            module: the child.
        """
        super().add_module(name, module)
        if module is not None and self._auto_prefix:
            refresh_names(module, name)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Adds a parameter, which becomes a `distcell.Parameter` in place.

        Args:
            name: the attribute; also the parameter's name when it has none.
            param: the parameter.
        """
        super().register_parameter(name, param)
        if param is not None:
            adopt(param)
        if isinstance(param, Parameter) and not param.name:
            param.name = name


def refresh_names(root: torch.nn.Module, prefix: str = "") -> None:
    """Gives every parameter and Cell below a module its path from there.

    Names are set when children are assigned; what happens out of sight (a `ModuleList` that grows
    after its assignment, tied weights) is put right whenever the outermost cell is asked for them.

    Args:
        root: the module. A wrapper with `auto_prefix=False` leaves all names as they are.
        prefix: the path of the module itself.

    >>> net = Cell()
    >>> net.up = torch.nn.Linear(2, 2)
    >>> net.up.weight.name
    'up.weight'
    """
    if isinstance(root, Cell) and not root._auto_prefix:
        return
    for path, module in root.named_modules(prefix=prefix):
        if isinstance(module, Cell):
            module._cell_path = path
    for path, param in root.named_parameters(prefix):
        adopt(param)
        if isinstance(param, Parameter):
            param.name = path


def declared_rules(root: torch.nn.Module) -> tuple[CellRule, ...]:
    """Returns what the `shard` calls of a module and its children say, as rules of a strategy.

    Args:
        root: the outermost module.

    >>> net = Cell()
    >>> net.up = Cell().shard((("dp", None),))
    >>> [rule.pattern for rule in declared_rules(net)]
    ['up']
    """
    cells = ((path, cell) for path, cell in root.named_modules() if isinstance(cell, Cell))
    return tuple(cell.sharding.rule(path) for path, cell in cells if cell.sharding is not None)


def call_signature(module: torch.nn.Module) -> inspect.Signature:
    """Returns the arguments of a module's call as its author named them.

    Args:
        module: a Cell with `construct` or any module with `forward`.

    >>> call_signature(torch.nn.Linear(1, 1))
    <Signature (input: torch.Tensor) -> torch.Tensor>
    """
    has_construct = isinstance(module, Cell) and type(module).forward is Cell.forward
    called: Callable[..., Any] = module.construct if has_construct else module.forward  # type: ignore[assignment]
    return inspect.signature(called)


# - Calls


def _enter_engine(cell: Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from distcell import engine  # looked up late: the one way from a Cell to the engine

    return engine.call(cell, args, kwargs)


def _call_between_hooks(cell: Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # torch runs the hooks around `forward`. For this one call forward is the engine, and it is
    # put back before the engine looks at the cell.
    own = cell.__dict__.get("forward")

    def put_back() -> None:
        cell.__dict__.pop("forward", None)
        if own is not None:
            cell.__dict__["forward"] = own

    def enter(*args: Any, **kwargs: Any) -> Any:
        put_back()
        return _enter_engine(cell, args, kwargs)

    cell.__dict__["forward"] = enter
    try:
        return torch.nn.Module.__call__(cell, *args, **kwargs)
    finally:
        put_back()
