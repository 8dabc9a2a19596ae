"""What a call must not do while it is captured, because the captured step would not do it again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from distcell import compat
from distcell.capture.tree import leaf_values
from distcell.errors import CaptureError, combine
from distcell.scope import current_cell

SCALARS = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)
"""Types of attributes that decide what a module does, by their value."""


def scalar(item: Any) -> Any:
    """The item when it is a scalar or a tuple or list of scalars (as a tuple), else None.

    Example:
        >>> scalar(3), scalar([1, "a"]), scalar(object())
        (3, (1, 'a'), None)
    """
    if isinstance(item, SCALARS):
        return item
    if type(item) in (tuple, list) and all(isinstance(part, SCALARS) for part in item):
        return tuple(item)
    return None


@dataclass(frozen=True)
class _Snapshot:
    """The attributes of a module, its scalars apart: a list changes in place."""

    path: str
    module: nn.Module
    attributes: dict[str, Any]
    scalars: dict[str, Any]
    buffers: dict[str, Any]

    @classmethod
    def of(cls, path: str, module: nn.Module) -> _Snapshot:
        attributes = dict(module.__dict__)
        scalars = {name: scalar(item) for name, item in attributes.items()}
        return cls(path, module, attributes, scalars, dict(module._buffers))

    def restore(self) -> None:
        for name in set(self.module.__dict__) - set(self.attributes):
            del self.module.__dict__[name]
        self.module.__dict__.update(self.attributes)
        for name, before in self.scalars.items():
            item = self.attributes[name]
            if isinstance(item, list) and before is not None:
                item[:] = before
        for name in set(self.module._buffers) - set(self.buffers):
            del self.module._buffers[name]

    def errors(self) -> Iterator[CaptureError]:
        """What the call changed that it may not change."""
        for name, item in {**self.module.__dict__, **self.module._buffers}.items():
            if name in self.attributes and item is self.attributes[name]:
                before, after = self.scalars[name], scalar(item)
            else:
                before, after = self.scalars.get(name), scalar(item)
                if _holds_fake(item):
                    yield self._left(name)
                    continue
            if (before,) != (after,) or (name not in self.attributes and after is not None):
                yield self._changed(name, before, item)

    def _left(self, name: str) -> CaptureError:
        return CaptureError(
            f"the call keeps a tensor in the attribute `{_join(self.path, name)}`",
            where=["a captured step runs without the module, so the attribute would not be set"],
            hint="return the tensor from the call, or register it as a buffer before the call",
        )

    def _changed(self, name: str, before: Any, after: Any) -> CaptureError:
        return CaptureError(
            f"the call changes the attribute `{_join(self.path, name)}`",
            where=[f"from {before!r} to {after!r}; a captured step would not do that again"],
            hint="change it outside of the call, or make it a buffer",
        )


def _holds_fake(item: Any) -> bool:
    if isinstance(item, nn.Module) or not isinstance(item, (torch.Tensor, dict, list, tuple)):
        return False
    return any(compat.is_fake(leaf) for leaf in leaf_values(item))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


@contextmanager
def unchanged(module: nn.Module) -> Iterator[Callable[[], None]]:
    """A context in which a module is captured; it is as before when the capture fails.

    Gives a function that raises when random numbers of Python or numpy were drawn: to be called
    when a cell ends, so that the error can name it.

    Raises:
        CaptureError: When the call changed an attribute, left a tensor without values in one, or
            drew random numbers that are not torch's.
    """
    snapshots = [_Snapshot.of(path, part) for path, part in module.named_modules()]
    python, numpy = random.getstate(), np.random.get_state()

    def check_random() -> None:
        for library, same in (
            ("random", random.getstate() == python),
            ("numpy.random", _comparable(np.random.get_state()) == _comparable(numpy)),
        ):
            if not same:
                raise _random_error(library)

    try:
        yield check_random
        check_random()
        errors = [error for snapshot in snapshots for error in snapshot.errors()]
        if errors:
            raise combine(errors, f"the call changes {len(errors)} attributes of its modules")
    except BaseException:
        for snapshot in snapshots:
            snapshot.restore()
        random.setstate(python)
        np.random.set_state(numpy)
        raise


def _comparable(state: Any) -> tuple[Any, ...]:
    return (state[0], state[1].tobytes(), *state[2:])


def _random_error(library: str) -> CaptureError:
    cell = current_cell()
    return CaptureError(
        f"{f'cell `{cell}`' if cell else 'the network'} draws a number with Python's `{library}`",
        where=["the captured step would use the same number each time, and each rank another one"],
        hint="draw it outside of the call and pass it as an argument, or use torch's generators",
    )
