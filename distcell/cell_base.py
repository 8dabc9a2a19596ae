"""What every part of the Cell stands on: its fields, the names of what is below it, checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from distcell.annotation import Sharding
from distcell.errors import UserTypeError
from distcell.parameter import set_places
from distcell.tensor import DynamicTensor

NAME_PREFIX = "_distcell_name_prefix"
"""Attribute of a module: what `update_parameters_name` put before the names of its parameters."""

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


class CellBase(torch.nn.Module):
    """The fields of a Cell.

    They are class attributes, because `parallelize` makes Cells of modules whose `__init__` has
    run. An instance has those that were changed.
    """

    name: str | None = None
    """What MegEngine's `Module(name=...)` was given."""

    _auto_parallel: bool = False
    _auto_prefix: bool = True
    _cell_path: str = ""
    _sharding: Sharding | None = None
    _torch_compiled: bool = False
    _cell_flags: Mapping[str, Any] = {}
    _requires_grad: bool | None = None
    _expected_inputs: tuple[torch.Tensor | DynamicTensor, ...] | None = None

    @property
    def is_auto_parallel(self) -> bool:
        """Whether the outermost call goes through the engine."""
        return self._auto_parallel

    def _refresh_call(self) -> None:
        """Notes whether calls need more than torch's: for settings that act at calls."""
        is_checked = self._expected_inputs is not None
        without_grad = self._requires_grad is False
        needs = self._auto_parallel or is_checked or without_grad or self._torch_compiled
        # a field that is there or not: one test, so that a plain Cell costs what torch's modules do
        self.__dict__.pop("_special_call", None)
        if needs:
            self.__dict__["_special_call"] = True


def refresh_names(root: torch.nn.Module, prefix: str = "") -> None:
    """Gives every parameter and Cell below a module its path from there.

    Names are set when children are assigned; what happens out of sight (a `ModuleList` that grows
    after its assignment, tied weights) is put right whenever the outermost cell is asked for them.

    Args:
        root: the module. A wrapper with `auto_prefix=False` leaves all names as they are.
        prefix: the path of the module itself.

    >>> net = CellBase()
    >>> net.up = torch.nn.Linear(2, 2)
    >>> refresh_names(net)
    >>> net.up.weight.name
    'up.weight'
    """
    if isinstance(root, CellBase) and not root._auto_prefix:
        return
    _name_below(root, prefix, set(), set())


def _name_below(module: torch.nn.Module, path: str, modules: set[int], params: set[int]) -> None:
    """Names what `named_modules` gives, in its order; each module of each layer comes by here."""
    if id(module) in modules:
        return
    modules.add(id(module))
    fields = module.__dict__
    if isinstance(module, CellBase):
        fields["_cell_path"] = path  # torch's `__setattr__` would look what it is
    start = f"{path}." if path else ""
    if module._parameters:
        own = f"{fields[NAME_PREFIX]}{start}" if NAME_PREFIX in fields else start
        set_places(module._parameters, own, params)
    for name, child in module._modules.items():
        if child is not None:
            _name_below(child, start + name, modules, params)


def name_start(module: torch.nn.Module, path: str) -> str:
    """Returns what comes before the attribute in the name of a module's parameter.

    Args:
        module: its owner.
        path: the owner's path.

    >>> name_start(torch.nn.Linear(1, 1), "mlp.up")
    'mlp.up.'
    """
    start = f"{path}." if path else ""
    return str(module.__dict__.get(NAME_PREFIX, "")) + start


def check_bool(what: str, value: object) -> bool:
    """Returns the value, which must be a bool.

    Args:
        what: the argument's name.
        value: what was given.

    Raises:
        UserTypeError: it is something else.

    >>> check_bool("recurse", True)
    True
    """
    if not isinstance(value, bool):
        raise UserTypeError(f"`{what}` is {value!r}, a {type(value).__name__}, not a bool")
    return value


def check_function(what: str, value: object) -> Callable[..., Any]:
    """Returns the value, which must be callable.

    Args:
        what: the argument's name.
        value: what was given.

    Raises:
        UserTypeError: it is something else.

    >>> check_function("hook_fn", print) is print
    True
    """
    if not callable(value):
        kind = type(value).__name__
        raise UserTypeError(f"`{what}` is a {kind}, not a function", hint="pass a function")
    return value
