"""What every part of the Cell stands on: its fields, the names of what is below it, checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from distcell.annotation import Sharding
from distcell.errors import UserTypeError
from distcell.parameter import adopt, set_place
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
    # False once a call needs more than torch's: one test, so that a plain Cell costs what it did.
    _plain_call: bool = True
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
        self._plain_call = not needs


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
    seen: set[int] = set()
    below = torch.nn.Module.named_modules(root, prefix=prefix)
    for path, module in below if root._modules else ((prefix, root),):
        if isinstance(module, CellBase):
            module._cell_path = path
        if not module._parameters:
            continue
        start = name_start(module, path)
        for attribute, param in module._parameters.items():
            if param is not None and id(param) not in seen:
                seen.add(id(param))
                adopt(param)
                set_place(param, start, attribute)


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
