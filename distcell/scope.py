"""Where in the network the program is: the path of the cell whose call is running."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from distcell.compat import remove_global_hook

Enter = Callable[[str, tuple[Any, ...]], None]
"""Told the path and the positional arguments of a call that begins."""

Leave = Callable[[str, Mapping[str, Any], Any], None]
"""Told the path, the keyword arguments and the result of a call that ends without an error."""


class Tracker:
    """The calls of a network's modules that are running.

    Args:
        root: The network, whose own path is `""`.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self.root = root
        self.running: list[torch.nn.Module] = []

    @cached_property
    def paths(self) -> Mapping[torch.nn.Module, str]:
        """The path of every module; one that has several is known by the first."""
        return {module: path for path, module in self.root.named_modules()}

    @property
    def cell(self) -> str:
        """The path of the innermost module of the network that is running."""
        for module in reversed(self.running):
            if module in self.paths:
                return self.paths[module]
        return ""


_tracker: ContextVar[Tracker | None] = ContextVar("tracker", default=None)


def current_cell() -> str:
    """The path of the module of the tracked network that is running; `""` at the root and outside.

    Example:
        >>> class Probe(torch.nn.Module):
        ...     def forward(self):
        ...         return current_cell()
        >>> net = torch.nn.ModuleDict({"a": torch.nn.Identity(), "b": Probe()})
        >>> with track(net):
        ...     net["b"]()
        'b'
    """
    tracker = _tracker.get()
    return tracker.cell if tracker is not None else ""


@contextmanager
def track(
    root: torch.nn.Module, *, enter: Enter | None = None, leave: Leave | None = None
) -> Iterator[Tracker]:
    """A context in which `current_cell` tells the path below `root`.

    Contexts nest; the inner one counts. Only calls made by the same thread are seen.

    Args:
        root: The network.
        enter: Called before each module of the network that is called.
        leave: Called after it.
    """
    tracker = Tracker(root)

    def before(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if _tracker.get() is not tracker:
            return
        tracker.running.append(module)
        if enter is not None and module in tracker.paths:
            enter(tracker.paths[module], args)

    # torch leaves out the keyword arguments when it calls the hook because of an exception.
    def after(module: torch.nn.Module, _args: tuple[Any, ...], *rest: Any) -> None:
        if _tracker.get() is not tracker:
            return
        if leave is not None and len(rest) == 2 and module in tracker.paths:
            leave(tracker.paths[module], *rest)
        tracker.running.pop()

    handles = (
        register_module_forward_pre_hook(before),
        register_module_forward_hook(after, with_kwargs=leave is not None, always_call=True),
    )
    token = _tracker.set(tracker)
    try:
        yield tracker
    finally:
        _tracker.reset(token)
        for handle in handles:
            remove_global_hook(handle)


def save_place() -> Callable[[], AbstractContextManager[Any]]:
    """Makes a context in which the program is, once more, where it is now.

    What is run again in backward then knows its cell paths.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Identity())
        >>> with track(net) as tracker:
        ...     tracker.running.append(net[0])
        ...     place = save_place()
        >>> with place():
        ...     current_cell()
        '0'
    """
    tracker = _tracker.get()
    if tracker is None:
        return nullcontext
    running = tuple(tracker.running)

    @contextmanager
    def resume() -> Iterator[None]:
        with track(tracker.root) as again:
            again.running.extend(running)
            yield

    return resume
