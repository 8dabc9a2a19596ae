"""Modules of others made parallel in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import torch

from distcell.cell import RESERVED, Cell
from distcell.errors import UserTypeError

_Module = TypeVar("_Module", bound=torch.nn.Module)


def parallelize(module: _Module) -> _Module:
    """Returns the module itself, made parallel in place: its calls now go through the engine.

    Its class becomes a subclass of its own class and of Cell, so that its methods, attributes,
    hooks and state-dict keys stay. For a model of Hugging Face it sets `use_cache=False`, with a
    warning: the cache is a state of generation that training has no use for.

    Args:
        module: any `torch.nn.Module`; a Cell becomes auto-parallel. A second call changes nothing.

    Raises:
        UserTypeError: it is no module, or one that is wrapped or compiled already.

    >>> net = parallelize(torch.nn.Linear(4, 2))
    >>> isinstance(net, torch.nn.Linear), isinstance(net, Cell), net.weight.name
    (True, True, 'weight')
    """
    _check_module(module)
    _turn_cache_off(module)
    if not isinstance(module, Cell):
        own: Any = type(module)
        module.__class__ = _parallel_class(own, _taken(module))
    cast(Cell, module).set_auto_parallel()
    return module


def _check_module(module: object) -> None:
    if not isinstance(module, torch.nn.Module):
        raise UserTypeError(
            f"a {type(module).__name__} cannot be made parallel", hint="pass a module"
        )
    wrapped = {
        torch.nn.parallel.DistributedDataParallel: "pass the module inside, `ddp.module`",
        torch.nn.DataParallel: "pass the module inside, `.module`",
        torch.jit.ScriptModule: "pass the module before `torch.jit`",
    }
    hint = next((hint for kind, hint in wrapped.items() if isinstance(module, kind)), None)
    if hint is None and hasattr(module, "_orig_mod"):
        hint = "pass the module before `torch.compile`"
    if hint is None and not isinstance(module, Cell) and "__call__" in _own_names(type(module)):
        hint = "its class defines `__call__`; define `forward` instead"
    if hint is not None:
        raise UserTypeError(f"a {type(module).__name__} cannot be made parallel", hint=hint)


def _own_names(kind: type) -> set[str]:
    classes = kind.__mro__[: kind.__mro__.index(torch.nn.Module)]
    return {name for each in classes for name in vars(each)}


def _turn_cache_off(module: torch.nn.Module) -> None:
    for name in ("config", "generation_config"):
        config: Any = getattr(module, name, None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False
            kind = type(module).__name__
            warnings.warn(f"distcell sets `{name}.use_cache = False` on this {kind}", stacklevel=3)


def _taken(module: torch.nn.Module) -> frozenset[str]:
    """The names of Cell's own methods under which the module holds something."""
    places: tuple[Any, ...] = (
        module.__dict__,
        module._modules,
        module._parameters,
        module._buffers,
    )
    return RESERVED & {name for place in places for name in place}


class _Own:
    """In place of one of Cell's methods: what the module itself holds under that name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        # no `__set__`: what lies in the module's `__dict__` is found before this
        return self if module is None else torch.nn.Module.__getattr__(module, self.name)


@cache
def _parallel_class(own: Any, taken: frozenset[str]) -> Any:
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    held = {name: _Own(name) for name in taken}
    parts = {**names, **held, "__reduce_ex__": _reduce, "_own": own, "_taken": taken}
    # The own class comes first: what it defines stays. Cell's `__call__` comes before torch's.
    return type(own.__name__, (own, Cell), parts)


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    # pickle finds classes by name, and finds the own class by this name: make that, then change it.
    parallel = type(self)
    make, args, *rest = super(parallel, self).__reduce_ex__(protocol)
    args = tuple(parallel._own if item is parallel else item for item in args)
    return _rebuild, (make, args, parallel._taken), *rest


def _rebuild(
    make: Callable[..., torch.nn.Module], args: tuple[Any, ...], taken: frozenset[str]
) -> torch.nn.Module:
    module = make(*args)
    own: Any = type(module)
    module.__class__ = _parallel_class(own, taken)
    return module
