"""The Cell: a torch module that can say how it is split, and that hands its call to the engine."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch

from distcell.annotation import Sharding, TensorStrategy, param_specs, tensor_specs
from distcell.cell_base import check_bool, inside_engine, is_inside_engine, refresh_names
from distcell.cell_bprop import call_with_bprop
from distcell.cell_children import CellChildren
from distcell.cell_graph import CellGraph
from distcell.cell_hooks import CellHooks
from distcell.cell_inputs import CellInputs, check_inputs
from distcell.cell_modes import CellModes
from distcell.cell_parameters import CellParameters
from distcell.cell_precision import CellPrecision
from distcell.cell_settings import CellSettings
from distcell.cell_tensors import CellTensors
from distcell.compat import call_of, can_register, has_hooks, init_module
from distcell.errors import UserNameError, UserTypeError, UserValueError
from distcell.parameter import Parameter, global_shape, take_name
from distcell.strategy.strategy import CellRule

__all__ = [
    "RESERVED",
    "Cell",
    "call_signature",
    "declared_rules",
    "inside_engine",
    "is_inside_engine",
    "refresh_names",
]

# Looked up once: construction and calls of plain Cells are to cost what torch's do.
_Module = torch.nn.Module
_init = torch.nn.Module.__init__
_set_attribute = torch.nn.Module.__setattr__
_set_plain = object.__setattr__
_PLAIN = frozenset({int, float, bool, str, tuple, list, dict, type(None), torch.dtype})
_PARAMETERS = frozenset({torch.nn.Parameter, Parameter})

DEVICES = ("CPU", "GPU", "Ascend")
LEVELS = (0, 1, 2)


# - Calls


def _call(cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call of a cell to which something was said that acts at calls."""
    if cell._expected_inputs is not None:
        check_inputs(cell._expected_inputs, args, kwargs)
    if cell._requires_grad is False and torch.is_grad_enabled():
        with torch.no_grad():
            return _call_inside(cell, args, kwargs)
    return _call_inside(cell, args, kwargs)


def _call_inside(cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not cell._auto_parallel or is_inside_engine():
        return torch.nn.Module.__call__(cell, *args, **kwargs)
    if has_hooks(cell):
        return _call_between_hooks(cell, args, kwargs)
    return _enter_engine(cell, args, kwargs)


def _enter_engine(cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from distcell import engine  # looked up late: the one way from a Cell to the engine

    return engine.call(cell, args, kwargs)


def _call_between_hooks(cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


# - The class


class Cell(
    CellHooks,
    CellModes,
    CellPrecision,
    CellInputs,
    CellSettings,
    CellGraph,
    CellParameters,
    CellTensors,
    CellChildren,
):
    """A `torch.nn.Module` with the interface of MindSpore's Cell, and of MegEngine's Module.

    A subclass defines `construct` (or `forward`, as in torch). Any torch module may be a child of
    a Cell, and the reverse. Parameters are `distcell.Parameter`s with their path as name.

    Args:
        auto_prefix: whether parameters of children get this cell's attribute names before theirs.
            Wrappers pass False, so that names do not change. A str is MegEngine's first argument,
            `name`.
        flags: as for `add_flags`.
        name: MegEngine's: kept as `name`.

    >>> class Double(Cell):
    ...     def construct(self, x):
    ...         return 2 * x
    >>> Double()(torch.ones(2))
    tensor([2., 2.])
    """

    def __init__(
        self,
        auto_prefix: bool | str = True,
        flags: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
    ) -> None:
        if self._is_next_torch and _Module.__init__ is _init:
            init_module(self)
        else:
            super().__init__()
        if auto_prefix is not True:
            if isinstance(auto_prefix, str):
                name = auto_prefix
            else:
                self._auto_prefix = check_bool("auto_prefix", auto_prefix)
        if name is not None:
            self.name = name
        if flags:
            self.add_flags(**flags)

    # Of the class, noted once: whether the short ways of `__init__` and `__setattr__` are right.
    _is_next_torch: bool = False
    _registers_as_cell: bool = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._is_next_torch = _is_next_torch(cls)
        cls._registers_as_cell = cls.register_parameter is Cell.register_parameter
        if "construct" in vars(cls) and "forward" not in vars(cls):
            # a subclass of a layer, whose torch class has a forward: this construct is what counts
            cls.forward = Cell.forward  # type: ignore[method-assign]
        if "extend_repr" in vars(cls) and "extra_repr" not in vars(cls):
            cls.extra_repr = Cell.extra_repr  # type: ignore[method-assign]
        if "bprop" in vars(cls):
            cls.forward = _forward_of_bprop  # type: ignore[method-assign]

    def construct(self, *inputs: Any, **kwargs: Any) -> Any:
        """Returns what the cell computes; a subclass defines it.

        Raises:
            UserTypeError: the class defines neither `construct` nor `forward`.

        >>> class Double(Cell):
        ...     def construct(self, x):
        ...         return 2 * x
        >>> Double().construct(3)
        6
        """
        for kind in type(self).__mro__:
            forward = vars(kind).get("forward", Cell.forward)
            if forward is not Cell.forward and kind is not torch.nn.Module:
                return forward(self, *inputs, **kwargs)
        raise UserTypeError(
            f"class `{type(self).__name__}` defines neither `construct` nor `forward`",
            hint="define `construct(self, x)`",
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Returns `construct` of the same arguments: torch's name for it.

        A class that defines `bprop(self, *inputs, out, dout)` has it as its backward: it returns a
        gradient for each input. Such a cell takes positional arguments alone.

        >>> class Double(Cell):
        ...     def construct(self, x):
        ...         return 2 * x
        >>> Double().forward(3)
        6
        """
        return self.construct(*inputs, **kwargs)

    __call__ = call_of(_call, forward)

    def run_construct(self, cast_inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns `construct` of inputs that are cast already; no hook runs, and no engine.

        Args:
            cast_inputs: the positional arguments.
            kwargs: the keyword arguments.

        >>> class Double(Cell):
        ...     def construct(self, x):
        ...         return 2 * x
        >>> Double().run_construct((torch.ones(2),), {})
        tensor([2., 2.])
        """
        with inside_engine():
            return self.forward(*cast_inputs, **kwargs)

    def shard(
        self,
        in_strategy: tuple[TensorStrategy | None, ...],
        out_strategy: tuple[TensorStrategy | None, ...] | None = None,
        parameter_plan: Mapping[str, TensorStrategy] | str | None = None,
        device: str | int = "Ascend",
        level: int = 0,
    ) -> Self:
        """Returns this cell, with a note of how its tensors are split. The last call wins.

        Args:
            in_strategy: for each tensor that enters, one entry per dim: a number of slices, an axis
                of the mesh, a tuple of axes (major to minor), or None. None for a whole tensor
                leaves it to propagation.
            out_strategy: the same for what leaves.
            parameter_plan: the same for parameters, by their name relative to this cell.
            device: checked and not used, as in MindSpore: the device is where the tensors are. It
                may stand in the place of `parameter_plan`, and `level` after it, as in 1.8.
            level: checked and not used, as in MindSpore.

        Raises:
            UserTypeError: an argument or an entry has another type.
            UserValueError: the device or the level is none that MindSpore has.
            StrategyError: an entry is no dim, an axis is used twice, or a parameter has another
                number of dims.
            NotFoundError: the cell has no parameter of that name.

        >>> cell = Cell().shard(((2, 1),), out_strategy=(("dp", None),))
        >>> str(cell.sharding.inputs[0]), str(cell.sharding.outputs[0])
        ('[2, _]', '[dp, _]')
        """
        if isinstance(parameter_plan, str):  # the order of arguments of MindSpore 1.8
            level = device if isinstance(device, int) else level
            device, parameter_plan = parameter_plan, None
        _check_device(device, level)
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
        self._auto_parallel = check_bool("mode", mode)
        self._refresh_call()
        return self

    def extend_repr(self) -> str:
        """Returns what stands between the brackets when the cell is printed; a subclass may say it.

        >>> Cell().extend_repr()
        ''
        """
        own = type(self).extra_repr
        return "" if own is Cell.extra_repr else str(own(self))

    def extra_repr(self) -> str:
        """Returns `extend_repr()`: torch's name for it.

        >>> class Scale(Cell):
        ...     def extend_repr(self):
        ...         return "by=2"
        >>> Scale().extra_repr(), Scale()
        ('by=2', Scale(by=2))
        """
        return self.extend_repr()

    def __setattr__(self, name: str, value: Any) -> None:
        # Each attribute of each layer comes by here. torch looks at each as if it were anything:
        # what surely is no parameter, buffer or module, and a new parameter, take a short way.
        kind, fields = type(value), self.__dict__
        if kind in _PLAIN:
            if "_modules" in fields and not _is_held(fields, name):
                _set_plain(self, name, value)
                return
        elif name in RESERVED and isinstance(value, torch.nn.Module | torch.nn.Parameter):
            raise UserNameError(
                f"`{name}` is a name of Cell itself, which `{type(self).__name__}` gives a child",
                hint=f"take another name, like `{name}_`",
            )
        elif kind in _PARAMETERS and self._registers_as_cell and can_register(self, name, value):
            fields["_parameters"][name] = value
            take_name(value, name)
            return
        _set_attribute(self, name, value)
        if isinstance(value, _Module) and self._auto_prefix:
            refresh_names(value, name)

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        """Adds a child; its parameters' names get `name` before them.

        Args:
            name: the attribute.
            module: the child.

        >>> net = Cell()
        >>> net.add_module("up", torch.nn.Linear(1, 1))
        >>> net.up.bias.name
        'up.bias'
        """
        super().add_module(name, module)
        if module is not None and self._auto_prefix:
            refresh_names(module, name)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Adds a parameter, which becomes a `distcell.Parameter` in place.

        Args:
            name: the attribute; also the parameter's name when it has none.
            param: the parameter.

        >>> net = Cell()
        >>> net.register_parameter("scale", torch.nn.Parameter(torch.zeros(1)))
        >>> net.scale.name
        'scale'
        """
        super().register_parameter(name, param)
        if param is not None:
            take_name(param, name)


RESERVED = frozenset(
    name for name in dir(Cell) if not name.startswith("_") and not hasattr(torch.nn.Module, name)
) - {"name"}
"""The names that Cell adds to those of torch's Module."""


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


def _is_held(fields: Mapping[str, Any], name: str) -> bool:
    """Whether a module holds a parameter, child or buffer of a name."""
    return name in fields["_parameters"] or name in fields["_modules"] or name in fields["_buffers"]


def _is_next_torch(kind: type) -> bool:
    """Whether the `__init__` that follows Cell's is torch's: no class stands between."""
    order = kind.__mro__
    between = order[order.index(Cell) + 1 : order.index(_Module)]
    return not any("__init__" in vars(each) for each in between)


def _forward_of_bprop(self: Cell, *inputs: Any, **kwargs: Any) -> Any:
    positional = inspect.signature(self.construct).bind(*inputs, **kwargs)
    return call_with_bprop(self, positional.args)


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


def _check_device(device: object, level: object) -> None:
    if not isinstance(device, str):
        raise UserTypeError(f"`device` is {device!r}, not a str")
    if device not in DEVICES:
        raise UserValueError(f"no device `{device}`", hint=", ".join(DEVICES))
    if isinstance(level, bool) or not isinstance(level, int):
        raise UserTypeError(f"`level` is {level!r}, not an int")
    if level not in LEVELS:
        raise UserValueError(f"no level {level}", hint="0, 1 or 2")
