"""Parameters that are made when they are sharded: a rank never holds the whole network.

Under `lazy_init` a parameter that a module registers straight from `torch.empty` gives its memory
back. What initialises it in place (`normal_`, `uniform_`, `fill_`, ...) is noted, with the state
that torch's generator had, and is carried out on memory that is given back at once, so that the
generator goes on as it would. Done again in any order, the notes give the same values.

What else may happen to a parameter (a view of a row is written, another tensor is copied) is not
noted: that parameter is made whole at once, and a warning at the end says which were.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils import _pytree as pytree

from distcell import compat
from distcell.errors import InternalError, OptimizerStateError

__all__ = ["is_lazy", "lazy_init", "materialize"]

_LEAST = 4096
"""Elements below which a parameter is made at once."""

_SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
_PARTS = {torch.ops.aten.select.int, torch.ops.aten.slice.Tensor}


@dataclass
class _Recipe:
    """How the values of a parameter are made.

    Args:
        parameter: Whose they are.
        name: The class of its module, and its name there.
        stand_in: One number without meaning, which the parameter holds in each element.
        steps: The operations on it, and the generator's state before each that draws.
        views: Parts that were taken, by the identity of the tensor, with how; initialisers ask for
            the shape of a row.
        whole: The values, once they had to be made before their time.
    """

    parameter: Tensor
    name: str
    stand_in: Tensor
    steps: list[tuple[Any, Sequence[Any], dict[str, Any], Tensor | None]] = field(
        default_factory=list
    )
    views: dict[int, tuple[Tensor, Any, Sequence[Any], dict[str, Any]]] = field(
        default_factory=dict
    )
    whole: Tensor | None = None

    def value(self) -> Tensor:
        """The values. torch's generator is left as it is."""
        if self.whole is not None:
            return self.whole
        value = _memory(self.parameter.shape, self.stand_in.dtype)
        before = torch.get_rng_state()
        for func, args, kwargs, state in self.steps:
            if state is not None:
                torch.set_rng_state(state)
            func(value, *args, **kwargs)
        torch.set_rng_state(before)
        return value

    def make_whole(self) -> None:
        """Gives the parameter its values before their time."""
        self.whole = self.parameter.data = self.value()


_recipes: dict[int, _Recipe] = {}
"""By the address of the stand-in, which the recipe keeps alive."""


@contextmanager
def lazy_init() -> Iterator[None]:
    """A context in which modules are built without the memory of their parameters.

    The values are those that they would have had, and are made when the network is sharded. Until
    then a parameter reads as NaN.

    Warns:
        UserWarning: When parameters had to be made at once, because their initialisation does
            more than to fill them.

    Example:
        >>> with lazy_init():
        ...     layer = torch.nn.Linear(64, 64)
        >>> is_lazy(layer.weight), is_lazy(layer.bias)
        (True, False)
        >>> materialize(layer.weight)
        >>> bool(layer.weight.isnan().any())
        False
    """
    recorder = _Recorder()
    handle = register_module_parameter_registration_hook(recorder.register)
    try:
        with recorder:
            yield
    finally:
        handle.remove()
        message = recorder.close()
    if message is not None:
        warnings.warn(message, stacklevel=3)


def is_lazy(tensor: Tensor) -> bool:
    """Whether a parameter's values are yet to be made.

    Example:
        >>> is_lazy(torch.nn.Linear(64, 64).weight)
        False
    """
    return _find(tensor) is not None


def materialize(*parameters: Tensor) -> None:
    """Makes the values of parameters that are lazy, whole and in place; others stay as they are.

    Raises:
        OptimizerStateError: When one was written to since, which could only be lost.

    Example:
        >>> with lazy_init():
        ...     net = torch.nn.Linear(64, 64)
        >>> materialize(*net.parameters())
    """
    for parameter in parameters:
        recipe = _find(parameter)
        if recipe is None:
            continue
        # Fills write to the stand-in; torch itself refuses other writes in place.
        if not recipe.stand_in.isnan():
            raise OptimizerStateError(
                f"parameter `{recipe.name}` was written to before it had values",
                hint="initialise within `dc.lazy_init()`, or load weights after sharding",
            )
        parameter.data = recipe.value()
        del _recipes[recipe.stand_in.data_ptr()]


def _find(tensor: Tensor) -> _Recipe | None:
    if not _recipes or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return None
    return _recipes.get(tensor.untyped_storage().data_ptr())


class _Recorder(compat.TorchDispatchMode):
    """Notes what is done to parameters without memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recipes: list[_Recipe] = []
        self.untouched: dict[int, Tensor] = {}  # results of `torch.empty`, by address
        self.whole: dict[str, int] = {}  # bytes of parameters that never were lazy

    def register(self, module: torch.nn.Module, name: str, parameter: Tensor | None) -> None:
        """Takes the memory of a parameter that holds nothing yet."""
        if parameter is None or not _is_large(parameter) or _find(parameter) is not None:
            return
        where = f"{type(module).__name__}.{name}"
        empty = self.untouched.pop(parameter.data_ptr(), None)
        if empty is None or empty.numel() != parameter.numel():
            self.whole[where] = self.whole.get(where, 0) + parameter.nbytes
            return
        stand_in = torch.full((1,), torch.nan, dtype=parameter.dtype)
        parameter.data = stand_in.expand(parameter.shape)
        recipe = _Recipe(parameter, where, stand_in)
        _recipes[stand_in.data_ptr()] = recipe
        self.recipes.append(recipe)

    def close(self) -> str | None:
        """Forgets parameters that were made; what to tell the user about those, if any."""
        for recipe in self.recipes:
            if recipe.whole is not None:
                del _recipes[recipe.stand_in.data_ptr()]
                recipe.whole = None
                self.whole[recipe.name] = self.whole.get(recipe.name, 0) + recipe.parameter.nbytes
            recipe.views.clear()
        if not self.whole:
            return None
        names = list(self.whole)
        listed = ", ".join(names[:5]) + (", ..." if names[5:] else "")
        return (
            f"lazy_init made {sum(self.whole.values()):,} bytes of parameters at once, as their "
            f"initialisation does more than to fill `torch.empty`: {listed}"
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        recipes = [recipe for recipe in map(_find, tensors) if recipe is not None]
        if not recipes:
            return self._run(func, args, kwargs, tensors)
        if func in _SAME:
            return func(*args, **kwargs)
        recipe = recipes[0]
        if len(tensors) == 1 and recipe.whole is None:
            if _fills(func, kwargs) and _is_all(tensors[0], recipe):
                self._note(recipe, func, args[1:], kwargs)
                return args[0]
            if func in _PARTS and not _is_all(part := func(*args, **kwargs), recipe):
                recipe.views[id(part)] = (part, func, args, kwargs)
                return part
        if compat.may_alias(func) or _in_place(func):
            for recipe in recipes:
                if recipe.whole is None:
                    recipe.make_whole()
        args, kwargs = pytree.tree_map_only(Tensor, _real, (args, kwargs))
        return func(*args, **kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        result = func(*args, **kwargs)
        if func is torch.ops.aten.empty.memory_format and _is_plain(result):
            result = _memory(result.shape, result.dtype)
            self.untouched[result.data_ptr()] = result
        elif func not in _SAME and self.untouched:
            for item in tensors:
                if item.device.type == "cpu" and item.layout == torch.strided:
                    self.untouched.pop(item.untyped_storage().data_ptr(), None)
        return result

    def _note(self, recipe: _Recipe, func: Any, args: Sequence[Any], kwargs: Any) -> None:
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = torch.get_rng_state()
            func(_memory(recipe.parameter.shape, recipe.stand_in.dtype), *args, **kwargs)
        recipe.steps.append((func, args, kwargs, state))


def _memory(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """An empty tensor whose memory goes back to the system when it is freed.

    Of malloc's the process would keep most: what is small and stays lies between what was freed.
    """
    buffer = mmap.mmap(-1, shape.numel() * dtype.itemsize)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def _is_large(tensor: Tensor) -> bool:
    on_host = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return on_host and tensor.is_floating_point() and tensor.numel() >= _LEAST


def _is_plain(tensor: Tensor) -> bool:
    return _is_large(tensor) and tensor.is_contiguous() and not tensor.is_pinned()


def _in_place(func: Any) -> bool:
    return str(func.overloadpacket.__name__).endswith("_")


def _fills(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation changes the values of its first argument and nothing else."""
    tags = func.tags
    keeps_shape = torch.Tag.inplace_view not in tags and "resize" not in str(func)
    return _in_place(func) and keeps_shape and kwargs.get("generator") is None


def _is_all(tensor: Tensor, recipe: _Recipe) -> bool:
    return tensor.numel() == recipe.parameter.numel()


def _real(tensor: Tensor) -> Tensor:
    """The tensor with values that a tensor without stands for."""
    recipe = _find(tensor)
    if recipe is None:
        return tensor
    if _is_all(tensor, recipe):
        return recipe.value()
    if id(tensor) not in recipe.views:
        raise InternalError(f"an unknown part of `{recipe.name}` is used within lazy_init")
    _, func, args, kwargs = recipe.views[id(tensor)]
    real: Tensor = func(_real(args[0]), *args[1:], **kwargs)
    return real
