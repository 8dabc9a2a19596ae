"""The arguments of a call that are no tensors: their names, their key, and which are refused."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from distcell.capture.facts import FUNCTIONS, Facts, value_key
from distcell.capture.tree import Node, Slot, Spec, flatten
from distcell.errors import CaptureError


def argument_names(function: Any, count: int) -> list[str]:
    """The names of the first positional arguments of a module's or function's call."""
    parameters = inspect.signature(getattr(function, "forward", function)).parameters
    if hasattr(function, "construct") and not any(
        p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters.values()
    ):
        # a forward that only passes its arguments on to construct has no names of its own
        parameters = inspect.signature(function.construct).parameters
    names, rest = [], "args"
    for parameter in parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            rest = parameter.name
    return names[:count] + [f"{rest}.{index}" for index in range(count - len(names))]


def named(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name.

    Raises:
        CaptureError: When a positional and a keyword argument have one name.
    """
    if twice := sorted(set(names) & set(kwargs)):
        raise CaptureError(
            f"two arguments have the name `{twice[0]}`: one by position, one by keyword",
            hint="give one of them another name",
        )
    return {**dict(zip(names, args, strict=True)), **kwargs}


class _OpaqueError(Exception):
    """A value of which nobody can tell when it is another one."""

    def __init__(self, item: Any) -> None:
        super().__init__()
        self.item, self.path = item, list[str]()


def call_spec_key(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], spec: Spec
) -> Hashable:
    """The key of the structure of `(args, kwargs)`.

    Raises:
        CaptureError: An argument is an object that is no tensor, value or container of these.
    """
    try:
        return _spec_key(spec)
    except _OpaqueError as error:
        side, name, *rest = error.path
        if side == "0":
            name = argument_names(function, len(args))[int(name)]
        raise _refused(f"the argument `{'.'.join([name, *rest])}`", error.item) from None


def check_arguments(given: Mapping[str, Any]) -> None:
    """Checks that all arguments, by name, are such that a captured call can be used again.

    Raises:
        CaptureError: See `call_spec_key`.
    """
    try:
        _spec_key(flatten(given)[0])
    except _OpaqueError as error:
        raise _refused(f"the argument `{'.'.join(error.path)}`", error.item) from None


def check_result(spec: Spec) -> None:
    """Checks that what a call returns consists of tensors, values and containers of these.

    Raises:
        CaptureError: It returns something else, or there is a tensor in what is no container.
    """
    try:
        _spec_key(spec, returned=True)
    except _OpaqueError as error:
        place = f"`{'.'.join(error.path)}` of its result" if error.path else "its result"
        raise CaptureError(
            f"the call returns {place} as an object of class {_class(error.item)}",
            where=["a captured call returns tensors, in containers that it can build again"],
            hint="return a tuple, dict or dataclass",
        ) from None


def _refused(what: str, item: Any) -> CaptureError:
    return CaptureError(
        f"{what} is an object of class {_class(item)}",
        where=["a captured call is used again where the arguments say the same, and what such an",
               "object says is not known; tensors in it would keep the values of the first call"],
        hint="pass its tensors as arguments, or take the object apart: "
        "tuples, lists, dicts and dataclasses of tensors and numbers are fine",
    )  # fmt: skip


def _class(item: Any) -> str:
    kind = type(item)
    return kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else (
        f"{kind.__module__}.{kind.__qualname__}"
    )  # fmt: skip


def _spec_key(spec: Spec, *, returned: bool = False) -> Hashable:
    """The structure, with literals by type and value."""
    if isinstance(spec, Slot):
        return spec
    if not isinstance(spec, Node):
        return _literal_key(spec, returned=returned)
    items = []
    for key, item in zip(spec.keys, spec.items, strict=True):
        try:
            name = key if type(key) is str else _literal_key(key, returned=returned)
            items.append((name, _spec_key(item, returned=returned)))
        except _OpaqueError as error:
            error.path.insert(0, str(key))
            raise
    return (spec.kind, tuple(items))


def _literal_key(item: Any, *, returned: bool) -> Hashable:
    found = value_key(item)
    if found is not None:
        return found
    if isinstance(item, slice):
        ends = (item.start, item.stop, item.step)
        return (slice, tuple([_literal_key(end, returned=returned) for end in ends]))
    if isinstance(item, tuple):  # the key of a dict, or in a set
        return (type(item), tuple([_literal_key(part, returned=returned) for part in item]))
    if isinstance(item, (set, frozenset)):
        return (type(item), frozenset([_literal_key(part, returned=returned) for part in item]))
    if isinstance(item, FUNCTIONS):
        facts = Facts()
        key = facts.of(item)
        if returned and facts.tensors:
            raise _OpaqueError(item)
        return key
    raise _OpaqueError(item)
