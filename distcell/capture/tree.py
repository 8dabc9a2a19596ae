"""The structure of arguments and results: containers taken apart into leaves and built again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """The place of a tensor: the index of the one that goes there."""

    index: int


@dataclass(frozen=True)
class Node:
    """A container.

    Args:
        kind: Its class.
        keys: The names of its items: keys, fields, or the numbers of a sequence.
        items: A `Slot`, a `Node` or a literal for each.
    """

    kind: type
    keys: tuple[Any, ...]
    items: tuple[Any, ...]


Spec = Any
"""A `Slot`, a `Node` or a literal."""


def flatten(item: Any, path: str = "") -> tuple[Spec, dict[str, Tensor]]:
    """The structure of an item, and its tensors by path, in the order of the slots.

    Lists, tuples, named tuples, mappings and dataclasses are taken apart; anything else that is no
    tensor is a literal. Where two tensors would have one path, as with the keys `1` and `"1"`, the
    later one gets a number: `x.1#2`.

    Example:
        >>> import torch
        >>> spec, leaves = flatten({"a": [torch.ones(2), 3]}, "batch")
        >>> list(leaves)
        ['batch.a.0']
        >>> rebuild(spec, [7])
        {'a': [7, 3]}
    """
    leaves: dict[str, Tensor] = {}

    def visit(part: Any, place: str) -> Spec:
        if isinstance(part, Tensor):
            leaves[_unique(place, leaves)] = part
            return Slot(len(leaves) - 1)
        found = _content(part)
        if found is None:
            return part
        items = tuple(visit(item, f"{place}.{key}" if place else str(key)) for key, item in found)
        return Node(type(part), tuple(key for key, _ in found), items)

    return visit(item, path), leaves


def _unique(place: str, taken: Mapping[str, Tensor]) -> str:
    number, name = 1, place
    while name in taken:
        number += 1
        name = f"{place}#{number}"
    return name


def rebuild(spec: Spec, leaves: Any) -> Any:
    """The item of a structure, with `leaves[i]` in the place of slot `i`.

    Example:
        >>> rebuild(Node(tuple, (0, 1), (Slot(0), "kept")), [7])
        (7, 'kept')
    """
    if isinstance(spec, Slot):
        return leaves[spec.index]
    if not isinstance(spec, Node):
        return spec
    items = [rebuild(item, leaves) for item in spec.items]
    return _maker(spec.kind)(spec.kind, spec.keys, items)


def leaf_values(item: Any) -> Iterator[Any]:
    """All leaves of an item, tensors or not, in order."""
    found = _content(item)
    if found is None:
        yield item
    else:
        for _, part in found:
            yield from leaf_values(part)


def _content(item: Any) -> list[tuple[Any, Any]] | None:
    """The named items of a container, None for a leaf."""
    if isinstance(item, Mapping):
        return list(item.items())
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return list(zip(item._fields, item, strict=True))
    if isinstance(item, (list, tuple)):
        return list(enumerate(item))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [(field.name, getattr(item, field.name)) for field in dataclasses.fields(item)]
    return None


_Maker = Callable[[type, tuple[Any, ...], list[Any]], Any]


def _maker(kind: type) -> _Maker:
    """What builds a container of a class from its keys and items."""
    if dataclasses.is_dataclass(kind):
        return _make_dataclass
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return lambda kind, _keys, items: kind(*items)
    if issubclass(kind, Mapping):
        return lambda kind, keys, items: kind(dict(zip(keys, items, strict=True)))
    return lambda kind, _keys, items: kind(items)


def _make_dataclass(kind: type, keys: tuple[Any, ...], items: list[Any]) -> Any:
    """A dataclass object; fields that its constructor does not take are set afterwards."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    given = dict(zip(keys, items, strict=True))
    taken = {key: value for key, value in given.items() if key in fields and fields[key].init}
    made = kind(**taken)
    for key, value in given.items():
        if key not in taken:
            object.__setattr__(made, key, value)
    return made
