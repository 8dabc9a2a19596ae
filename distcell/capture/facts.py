"""What values say that are no tensors of a call, as keys: equal keys mean equal behaviour.

A trace is right for as long as all that Python code could read is as it was: numbers, containers,
configurations, functions with what they close over.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import hashlib
import random
import sys
import types
from argparse import Namespace
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from enum import Enum
from functools import lru_cache, partial
from pathlib import PurePath
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

SCALARS = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)
"""Types whose values decide what code does, compared by value."""

FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, partial)

_SCALARS = frozenset(SCALARS)
_VALUES = (
    type,
    range,
    type(Ellipsis),
    torch.layout,
    torch.memory_format,
    np.dtype,
    fractions.Fraction,
    decimal.Decimal,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    PurePath,
)
"""Further types that are compared by value and never change."""

_DEPTH = 3
"""How deep objects within objects are read: a configuration, its parts and their parts."""


class Same:
    """Equal only for one and the same object, which it does not keep alive.

    Example:
        >>> a, b = {1}, {1}
        >>> Same(a) == Same(a), Same(a) == Same(b)
        (True, False)
    """

    __slots__ = ("_hash", "_look")

    def __init__(self, item: Any) -> None:
        self._hash = id(item)
        try:
            self._look: Any = ref(item)
        except TypeError:  # of few types only, such as slices and other references
            self._look = lambda: item

    def __eq__(self, other: object) -> bool:
        mine = self._look()
        return isinstance(other, Same) and mine is not None and mine is other._look()

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"<{type(self._look()).__name__} at {self._hash:#x}>"


def value_key(item: Any) -> Hashable:
    """The key of a value that holds nothing else; None for containers, objects and functions.

    Arrays of numpy count by a digest of their bytes.

    Example:
        >>> value_key(1) == value_key(1.0), value_key(0.0) == value_key(-0.0)
        (False, False)
        >>> value_key(np.ones(2)) == value_key(np.ones(2)), value_key([1])
        (True, None)
    """
    kind = type(item)
    if isinstance(item, Enum):
        return (kind, item.name, repr(item.value))
    if isinstance(item, np.generic):
        return (kind, str(item.dtype), item.tobytes())
    if isinstance(item, (float, complex)):
        return (kind, repr(item))  # 0.0 == -0.0, and nan is not equal to itself
    if isinstance(item, SCALARS):
        # a subclass may compare in its own way
        base: Any = next(base for base in SCALARS if isinstance(item, base))
        return (kind, item if kind is base else base(item))
    if isinstance(item, _VALUES):
        return (kind, item)
    if isinstance(item, np.ma.MaskedArray):
        return (kind, value_key(item.data), value_key(np.ma.getmaskarray(item)))
    if isinstance(item, np.ndarray) and not item.dtype.hasobject:
        digest = hashlib.sha256(np.ascontiguousarray(item).data).digest()
        return (kind, item.shape, item.dtype.str, digest)
    if isinstance(item, (bytearray, memoryview)):
        return (kind, bytes(item))
    return None


def own_numbers(modules: Sequence[nn.Module]) -> dict[int, Hashable]:
    """Numbers, by id, of modules and of their parameters and buffers: which one it is, no more."""
    own: dict[int, Hashable] = {}
    for part in modules:
        own.setdefault(id(part), ("own", len(own)))
        for tensors in (part._parameters, part._buffers):
            for item in tensors.values():
                if item is not None:
                    own.setdefault(id(item), ("own", len(own)))
    return own


class Facts:
    """Reads values. What is met a second time (shared, or in a circle) counts by its number.

    Args:
        own: Keys, by id, of what is read apart: see `own_numbers`.
        most: Containers of more items, and arrays of more kilobytes, count by their identity.

    Example:
        >>> from types import SimpleNamespace
        >>> settings = SimpleNamespace(scale=2, names=["a"])
        >>> before = Facts().of(settings)
        >>> before == Facts().of(settings)
        True
        >>> settings.names.append("b")
        >>> before == Facts().of(settings)
        False
    """

    def __init__(
        self, own: Mapping[int, Hashable] | None = None, *, most: int | None = None
    ) -> None:
        self.own = own or {}
        self.most = most
        self.tensors: list[Tensor] = []
        """The tensors that were met and are not the network's."""
        self.met: dict[int, tuple[int, Any]] = {}  # holds what was met, so that ids stay

    def of(self, item: Any, depth: int = 0) -> Hashable:
        """The key of a value, of whatever type."""
        kind = type(item)
        if kind in _SCALARS:
            return (kind, repr(item) if kind is float else item)
        known = self.own.get(id(item))
        if known is not None:
            return known
        number = self.met.get(id(item))
        if number is not None:
            return ("met", number[0])
        self.met[id(item)] = (len(self.met), item)
        if isinstance(item, Tensor):
            return self._tensor(item)
        if self.most is not None and _size(item) > self.most:
            return (kind, Same(item), _size(item))
        found = value_key(item)
        if found is not None:
            return found
        parts = _parts(item, depth)
        if parts is None:
            return (kind, Same(item))
        if isinstance(item, (set, frozenset)):
            return (kind, frozenset([self.of(part, depth) for _, part in parts]))
        deeper = depth if isinstance(item, _SHALLOW) else depth + 1
        return (kind, tuple([(self._name(name, depth), self.of(part, deeper))
                             for name, part in parts]))  # fmt: skip

    def _name(self, name: Any, depth: int) -> Hashable:
        return name if type(name) is str else self.of(name, depth)

    def _tensor(self, tensor: Tensor) -> Hashable:
        self.tensors.append(tensor)
        version = None if tensor.is_inference() else tensor._version
        return (Same(tensor), version, tensor.shape, tensor.dtype, tensor.requires_grad)


def _size(item: Any) -> int:
    """The number of items of a container, or of kilobytes of an array."""
    if isinstance(item, np.ndarray):
        return int(item.nbytes) >> 10
    return len(item) if isinstance(item, (Mapping, list, tuple, deque, set, frozenset)) else 0


_SHALLOW = (Mapping, list, tuple, deque, slice, nn.Module)
"""What does not count as a level of objects."""


def _parts(item: Any, depth: int) -> list[tuple[Any, Any]] | None:
    """The named parts of a value, None where it counts by its identity."""
    kind: Any = type(item)
    if isinstance(item, Mapping):
        return list(item.items())
    if isinstance(item, slice):
        return [("start", item.start), ("stop", item.stop), ("step", item.step)]
    if isinstance(item, (list, tuple, deque, set, frozenset)):
        return list(enumerate(item))
    if isinstance(item, np.ndarray):
        return [("shape", item.shape), *enumerate(item.ravel().tolist())]
    if isinstance(item, ref):
        return [("to", item())]
    if isinstance(item, partial):
        return [("func", item.func), ("args", item.args), ("keywords", item.keywords)]
    if isinstance(item, types.MethodType):
        return [("func", item.__func__), ("self", item.__self__)]
    if isinstance(item, types.FunctionType):
        return list(_function_parts(item))
    if isinstance(item, random.Random):
        return [("state", item.getstate())]
    if isinstance(item, np.random.Generator):
        return [("state", item.bit_generator.state)]
    if isinstance(item, np.random.RandomState):
        return [("state", item.get_state(legacy=False))]
    if isinstance(item, nn.Module) or (depth < _DEPTH and is_plain(kind)):
        return list(attributes_of(item))
    return None


def _function_parts(item: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function does by itself: its code, not which object it is."""
    yield "code", item.__code__
    yield "globals", id(item.__globals__)
    yield "defaults", item.__defaults__
    yield "keywords", item.__kwdefaults__
    yield "attributes", item.__dict__
    for name, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # the name has no value yet
            continue


@lru_cache(maxsize=1024)
def is_plain(kind: type) -> bool:
    """Whether objects of a class are what their attributes say.

    Those of torch, numpy and the standard library are not: they are machinery, such as optimizers,
    loaders, loggers and locks.
    """
    if issubclass(kind, (types.SimpleNamespace, Namespace)):
        return True
    if _library(kind) in sys.stdlib_module_names:
        return False
    return not any(_library(base) in ("torch", "numpy") for base in kind.__mro__)


def _library(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def attributes_of(item: Any) -> Iterator[tuple[str, Any]]:
    """The attributes that an object has itself, those in slots too."""
    yield from getattr(item, "__dict__", {}).items()
    for base in type(item).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                place = _mangled(name, base)
                if hasattr(item, place):
                    yield place, getattr(item, place)


def _mangled(name: str, kind: type) -> str:
    private = name.startswith("__") and not name.endswith("__")
    return f"_{kind.__name__.lstrip('_')}{name}" if private else name
