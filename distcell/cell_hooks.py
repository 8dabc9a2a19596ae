"""Hooks of a Cell: torch's, that MindSpore's names for the same call too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from distcell.cell_base import CellBase, check_function
from distcell.errors import UserTypeError

Hook = Callable[..., Any]
HookHandle = RemovableHandle
"""What registering a hook returns: `handle.remove()` takes the hook away."""


class CellHooks(CellBase):
    """Hooks before and after `construct` and its backward.

    A hook gets the Cell itself where MindSpore passes a string with its name and id; that string
    is `cell.cell_id`.
    """

    @property
    def cell_id(self) -> str:
        """The class and the identity of the cell, `Dense(140...)`: what MindSpore gives hooks."""
        return f"{type(self).__name__}({id(self)})"

    def register_forward_pre_hook(
        self,
        hook: Hook | None = None,
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        hook_fn: Hook | None = None,
    ) -> HookHandle:
        """Returns a handle to a hook that is called before `construct`.

        Args:
            hook: `hook(cell, inputs)`; inputs is the tuple of positional arguments. What it
                returns, unless None, takes their place.
            prepend: whether it comes before the hooks that are there.
            with_kwargs: whether it gets the keyword arguments too, as torch documents it.
            hook_fn: MindSpore's name of `hook`.

        Raises:
            UserTypeError: the hook is no function.

        >>> cell = CellHooks()
        >>> handle = cell.register_forward_pre_hook(lambda cell, inputs: (inputs[0] + 1,))
        >>> handle.remove()
        """
        given = _one_hook(hook, hook_fn)
        return super().register_forward_pre_hook(given, prepend=prepend, with_kwargs=with_kwargs)

    def register_forward_hook(
        self,
        hook: Hook | None = None,
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
        hook_fn: Hook | None = None,
    ) -> HookHandle:
        """Returns a handle to a hook that is called after `construct`.

        Args:
            hook: `hook(cell, inputs, output)`. What it returns, unless None, is the new output.
            prepend: whether it comes before the hooks that are there.
            with_kwargs: whether it gets the keyword arguments too, as torch documents it.
            always_call: whether it is called after an exception too.
            hook_fn: MindSpore's name of `hook`.

        Raises:
            UserTypeError: the hook is no function.

        >>> cell = CellHooks()
        >>> handle = cell.register_forward_hook(lambda cell, inputs, output: 2 * output)
        >>> handle.remove()
        """
        given = _one_hook(hook, hook_fn)
        return super().register_forward_hook(
            given, prepend=prepend, with_kwargs=with_kwargs, always_call=always_call
        )

    def register_backward_hook(
        self, hook: Hook | None = None, *, hook_fn: Hook | None = None
    ) -> HookHandle:
        """Returns a handle to a hook that is called in backward, when both gradients are there.

        torch and MindSpore mean the opposite by the names of the two gradients. Given by position
        or as `hook` it is torch's (of `register_full_backward_hook`, which torch recommends in its
        place), given as `hook_fn` it is MindSpore's.

        Args:
            hook: `hook(cell, grad_input, grad_output)`: the gradients of the inputs, then those of
                the outputs. What it returns, unless None, takes the place of the first.
            hook_fn: `hook_fn(cell, grad_input, grad_output)`: the gradients that come in, those of
                the outputs, then those that go on to what came before, of the inputs. What it
                returns, unless None, takes the place of the second.

        Raises:
            UserTypeError: the hook is no function.

        >>> cell = CellHooks()
        >>> handle = cell.register_backward_hook(lambda cell, of_inputs, of_outputs: None)
        >>> handle.remove()
        """
        given = _one_hook(hook, hook_fn)
        if hook is None:
            given = _Swapped(given)
        return super().register_full_backward_hook(given)


class _Swapped:
    """A hook with MindSpore's order of gradients, called with torch's. A class: it pickles."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __call__(self, cell: torch.nn.Module, of_inputs: Any, of_outputs: Any) -> Any:
        return self.hook(cell, of_outputs, of_inputs)


def _one_hook(hook: Hook | None, hook_fn: Hook | None) -> Hook:
    if hook is not None and hook_fn is not None:
        raise UserTypeError("both `hook` and `hook_fn` are given", hint="pass one of them")
    return check_function("hook_fn", hook_fn if hook is None else hook)
