"""What a call must not do while it is captured, because the captured step would not do it again."""

from __future__ import annotations

import random
from collections import UserDict, deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from distcell import compat
from distcell.capture.facts import SCALARS, Facts, attributes_of, is_plain, own_numbers, value_key
from distcell.capture.guard import OWN_FIELDS, functions_of, hooks_of
from distcell.capture.names import Named, names_read
from distcell.errors import CaptureError, InternalError, combine
from distcell.scope import current_cell


def scalar(item: Any) -> Any:
    """The item when it is a scalar or a tuple or list of scalars (a copy), else None.

    Example:
        >>> scalar(3), scalar([1, "a"]), scalar(object())
        (3, [1, 'a'], None)
    """
    if isinstance(item, SCALARS):
        return item
    if type(item) in (tuple, list) and all(isinstance(part, SCALARS) for part in item):
        return type(item)(item)
    return None


_MISSING = object()


@dataclass(frozen=True)
class _Said:
    """What an attribute said: its key, itself if it is scalar, and if it holds a fake tensor."""

    key: Hashable
    scalar: Any
    fake: bool


class _Reader:
    """Reads attributes, and keeps shallow copies of what can change in place."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.own = own_numbers(modules)
        self._kept: dict[int, tuple[Any, Any]] = {}

    def read(self, item: Any) -> _Said:
        """What an attribute says now."""
        facts = Facts(self.own)
        key = facts.of(item)
        return _Said(key, scalar(item), any(map(compat.is_fake, facts.tensors)))

    def keep(self, item: Any) -> _Said:
        """The same, with a copy of all that is read."""
        facts = Facts(self.own)
        key = facts.of(item)
        for number, (_, part) in facts.met.items():
            if number not in self._kept and (content := _content(part)) is not None:
                self._kept[number] = (part, content)
        return _Said(key, scalar(item), False)

    def restore(self) -> None:
        """Puts back what is another one now."""
        for item, content in self._kept.values():
            if not _alike(_content(item), content):
                _put_back(item, content)


def _content(item: Any) -> Any:
    """A shallow copy of what can change in place, None where nothing can."""
    if isinstance(item, (list, set, bytearray, deque, np.ndarray)):
        return item.copy()
    if isinstance(item, (dict, UserDict)):
        return dict(item)
    if _is_plain_object(item):
        return dict(attributes_of(item))
    return None


def _alike(now: Any, before: Any) -> bool:
    if isinstance(before, np.ndarray):
        return value_key(now) == value_key(before) is not None
    if isinstance(before, dict):
        same = list(now) == list(before)
        return same and all(now[name] is item for name, item in before.items())
    if isinstance(before, (list, deque)):
        return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
    return bool(now == before)


def _put_back(item: Any, content: Any) -> None:
    if isinstance(item, np.ndarray):
        item[...] = content
    elif isinstance(item, (list, bytearray)):
        item[:] = content
    elif isinstance(item, deque):
        item.clear()
        item.extend(content)
    elif isinstance(item, (set, dict, UserDict)):
        item.clear()
        item.update(content)
    else:
        for name in {name for name, _ in attributes_of(item)} - set(content):
            object.__delattr__(item, name)
        for name, part in content.items():
            object.__setattr__(item, name, part)


@dataclass(frozen=True)
class _Snapshot:
    """The attributes of a module, and what they said."""

    path: str
    module: nn.Module
    attributes: dict[str, Any]
    buffers: dict[str, Any]
    parameters: dict[str, Any]
    children: dict[str, Any]
    hooks: dict[tuple[str, int], Any]
    said: dict[Any, _Said]
    reader: _Reader

    @classmethod
    def of(cls, path: str, module: nn.Module, reader: _Reader) -> _Snapshot:
        attributes, hooks = dict(module.__dict__), dict(hooks_of(module))
        named = {n: item for n, item in attributes.items() if n not in OWN_FIELDS} | hooks
        said = {name: reader.keep(item) for name, item in named.items()}
        parts = dict(module._buffers), dict(module._parameters), dict(module._modules)
        return cls(path, module, attributes, *parts, hooks, said, reader)

    def restore(self) -> None:
        for name in set(self.module.__dict__) - set(self.attributes):
            del self.module.__dict__[name]
        self.module.__dict__.update(self.attributes)
        for now, before in self._places():
            if not _alike(now, before):
                _put_back(now, before)

    def errors(self) -> Iterator[CaptureError]:
        """What the call changed that it may not change."""
        for key, hook in self.hooks.items():
            if (now := self.reader.read(hook)).key != self.said[key].key:
                yield self._hook(key[0], now)
        for name in [*self.attributes, *(n for n in self.module.__dict__ if n not in self.said)]:
            if name not in OWN_FIELDS:
                yield from self._attribute(name)
        for name, item in self.module._buffers.items():
            if item is not self.buffers.get(name) and compat.is_fake(item):
                yield self._left(name)
        _, parameters, children = self._places()
        for kind, (held, first) in (("parameter", parameters), ("cell", children)):
            for name in dict.fromkeys([*first, *held]):
                if held.get(name) is not first.get(name):
                    yield self._made(kind, name)

    def _places(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """What torch keeps of the module's tensors and children: now, and as it was."""
        yield self.module._buffers, self.buffers
        yield self.module._parameters, self.parameters
        yield self.module._modules, self.children

    def check_whole(self) -> None:
        """Raises when a tensor without values is left in the place of one that has them."""
        for now, _ in self._places():
            for name, item in now.items():
                if compat.is_fake(item):
                    raise InternalError(
                        f"`{_join(self.path, name)}` has no values after the network was captured"
                    )

    def _attribute(self, name: str) -> Iterator[CaptureError]:
        item = self.module.__dict__.get(name, _MISSING)
        now, before = self.reader.read(item), self.said.get(name)
        if before is None and item is None:
            return  # the same as if it were made anew each time
        if before is not None and now.key == before.key:
            return
        if now.fake:
            yield self._left(name)
            return
        same_object = item is self.attributes.get(name, _MISSING)
        may_settle = same_object and _is_plain_object(item)
        yield self._changed(name, before, now, _SettlingError if may_settle else CaptureError)

    def _left(self, name: str) -> CaptureError:
        hint = "return the tensor from the call, or register it as a buffer before the call"
        makers = {type(hook).__module__ for hook in self.module._forward_pre_hooks.values()}
        return CaptureError(
            f"the call keeps a tensor in the attribute `{_join(self.path, name)}`",
            where=["a captured step runs without the module, so the attribute would not be set"],
            hint=next((_INSTEAD[maker] for maker in makers if maker in _INSTEAD), hint),
        )

    def _made(self, kind: str, name: str) -> CaptureError:
        return CaptureError(
            f"the call makes, replaces or removes the {kind} `{_join(self.path, name)}`",
            where=["a captured step runs without the module, and would not do that again"],
            hint="do it in the constructor, or else before the first call",
        )

    def _changed(
        self, name: str, before: _Said | None, now: _Said, error: type[CaptureError]
    ) -> CaptureError:
        first = before.scalar if before is not None else None
        change = "what it holds is another one after the call"
        if first is not None or now.scalar is not None:
            change = f"from {first!r} to {now.scalar!r}"
        return error(
            f"the call changes the attribute `{_join(self.path, name)}`",
            where=[f"{change}; a captured step would not do that again"],
            hint="change it outside of the call, or make it a buffer",
        )

    def _hook(self, kind: str, now: _Said) -> CaptureError:
        does = "keeps a tensor" if now.fake else "changes what it holds"
        return CaptureError(
            f"a {kind} hook of {f'cell `{self.path}`' if self.path else 'the network'} {does}",
            where=["hooks of inner cells are captured; a captured step would not do that again"],
            hint="return the tensor from the call, or put the hook on the outermost cell",
        )


_INSTEAD = {
    "torch.nn.utils.weight_norm": "`torch.nn.utils.parametrizations.weight_norm` does the same "
    "without an attribute",
    "torch.nn.utils.spectral_norm": "`torch.nn.utils.parametrizations.spectral_norm` does the same "
    "without an attribute",
    "torch.nn.utils.prune": "make the pruning permanent before the first call: "
    "`torch.nn.utils.prune.remove(module, name)`",
}
"""What to do about hooks of torch that compute a weight before each call, by their module."""


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class _SettlingError(CaptureError):
    """A configuration was changed, which may be for this once: code fills in what was left open."""


def _is_plain_object(item: Any) -> bool:
    kind: Any = type(item)
    return is_plain(kind) and not isinstance(item, (nn.Module, type))


class Watch:
    """What came of watching a call."""

    def __init__(self, module: nn.Module, functions: Sequence[Any] = ()) -> None:
        self.parts = list(module.modules())
        self.functions = functions
        self.reader = _Reader(self.parts)
        named = module.named_modules()
        self.snapshots = [_Snapshot.of(path, part, self.reader) for path, part in named]
        self.python, self.numpy = random.getstate(), np.random.get_state()
        self.settling: CaptureError | None = None
        self.names = self._names()
        self.named = {at: self.reader.keep(each.value) for at, each in self.names.items()}

    def check_random(self) -> None:
        """Raises when random numbers of Python or numpy were drawn.

        It is called when a cell ends, so that the error can name it.
        """
        for library, same in (
            ("random", random.getstate() == self.python),
            ("numpy.random", _comparable(np.random.get_state()) == _comparable(self.numpy)),
        ):
            if not same:
                raise _random_error(library)

    def check_attributes(self) -> None:
        """Raises when attributes were changed, unless that may have been for this once."""
        errors = [error for snapshot in self.snapshots for error in snapshot.errors()]
        errors += self._name_errors()
        if not errors:
            return
        error = combine(errors, f"the call changes {len(errors)} attributes of its modules")
        if not all(isinstance(error, _SettlingError) for error in errors):
            raise CaptureError(error.message, where=error.where, hint=error.hint)
        self.settling = CaptureError(error.message, where=error.where, hint=error.hint)

    def _names(self) -> dict[Any, Named]:
        functions = [*self.functions, *functions_of(self.parts)]
        found = names_read(self.parts, functions)
        return {(id(each.place), each.name): each for each in found if each.place is not None}

    def _name_errors(self) -> Iterator[CaptureError]:
        """What the call changed that code reads by name."""
        for at, each in self._names().items():
            before = self.named.get(at)
            now = self.reader.read(each.value)
            if before is None or now.key == before.key:
                continue
            if now.fake:
                yield CaptureError(
                    f"the call keeps a tensor in the variable `{each.label}`",
                    where=["a captured step runs without this code, so it would not be set again"],
                    hint="return the tensor from the call",
                )
                continue
            change = f"from {before.scalar!r} to {now.scalar!r}; "
            known = before.scalar is not None or now.scalar is not None
            yield _SettlingError(
                f"the call changes the variable `{each.label}`",
                where=[f"{change if known else ''}a captured step would not do that again"],
                hint="change it outside of the call",
            )

    def check_whole(self) -> None:
        """Raises when the network holds a tensor without values."""
        for snapshot in self.snapshots:
            snapshot.check_whole()

    def restore(self) -> None:
        """Puts everything back."""
        for snapshot in self.snapshots:
            snapshot.restore()
        for at, each in self._names().items():
            if at in self.names and each.value is not self.names[at].value:
                self.names[at].put_back()
        self.reader.restore()
        random.setstate(self.python)
        np.random.set_state(self.numpy)


@contextmanager
def unchanged(module: nn.Module, functions: Sequence[Any] = ()) -> Iterator[Watch]:
    """A context in which a module and functions are called; all is as before when that fails.

    Where only configurations were changed (plain objects in attributes), that stays, and the watch
    holds the error in `settling`: it is one when a second call does that again.

    Raises:
        CaptureError: When the call changed an attribute or a variable, left a tensor without values
            in one, or drew random numbers that are not torch's.
    """
    watch = Watch(module, functions)
    try:
        yield watch
        watch.check_random()
        watch.check_attributes()
        watch.check_whole()
    except BaseException:
        watch.restore()
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
