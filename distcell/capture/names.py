"""What a network's code reads by name: globals, closure variables, what modules and classes hold.

The code of the user's own classes is read, and of the functions that it names; that of torch and
of other installed packages is not: see `names_read` for what is out of sight.
"""

from __future__ import annotations

import builtins
import dis
import site
import sys
import sysconfig
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from distcell.capture.facts import FUNCTIONS, SCALARS, Facts, is_plain

MAX_FUNCTIONS = 256
"""How many functions are read at most."""

MAX_ITEMS = 1000
"""Of how many items a container may be, and of how many kilobytes an array, to be read."""

ABSENT = type("Absent", (), {"__repr__": lambda self: "nothing"})()
"""The value of a name that has none yet."""

_CACHED = type(lru_cache(lambda: None))
_ENTRANCES = ("forward", "construct", "__call__")


@dataclass(frozen=True, slots=True)
class Named:
    """A value that code reads by name.

    Args:
        label: The name as code has it, such as `config.beta`.
        place: What holds it: the names of a module or an object, a class, the cell of a closure.
        name: Its name there.
        value: What it is now.
    """

    label: str
    place: Any
    name: str
    value: Any

    def put_back(self) -> None:
        """Gives the name its value again."""
        if isinstance(self.place, CellType):
            self.place.cell_contents = self.value
        elif isinstance(self.place, type):
            setattr(self.place, self.name, self.value)
        elif isinstance(self.place, dict) and self.value is not ABSENT:
            self.place[self.name] = self.value
        elif isinstance(self.place, dict):
            self.place.pop(self.name, None)


def names_key(parts: Sequence[nn.Module], functions: Iterable[Any], facts: Facts) -> Hashable:
    """The key of all that is read by name: equal keys mean that code would read the same."""
    return tuple([(each.label, facts.of(each.value)) for each in names_read(parts, functions)])


def names_read(parts: Sequence[nn.Module], functions: Iterable[Any] = ()) -> list[Named]:
    """What the code of modules, and of further functions, reads by name.

    Functions of the user's that are named in it are followed, and methods of the same class. Not
    seen is what is reached in another way: `globals()`, `getattr` with a computed name, methods of
    objects in attributes, the environment, files.

    Args:
        parts: A network and all modules below it.
        functions: Functions that run in the call too: a loss, hooks.

    Example:
        >>> [each.label for each in names_read([nn.ReLU()])]
        []
    """
    walk = _Walk(parts)
    for kind in dict.fromkeys(map(type, parts)):
        walk.class_of_module(kind)
    for function in functions:
        walk.value("", None, "", function)
    return walk.found


@dataclass(frozen=True, slots=True)
class _Reads:
    """The names that a code object reads or writes, each with the attributes read of it."""

    globals: tuple[tuple[str, tuple[str, ...]], ...]
    free: tuple[tuple[str, tuple[str, ...]], ...]
    attributes: frozenset[str]


# what is written is read too: a call must not change it
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")
_FREE = ("STORE_DEREF", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_read: dict[int, tuple[CodeType, _Reads]] = {}  # by id: to hash code takes long


def _reads_of(code: CodeType) -> _Reads:
    known = _read.get(id(code))
    if known is None:
        if len(_read) > 4096:
            _read.clear()
        known = _read[id(code)] = (code, _scan(code))
    return known[1]


def _scan(code: CodeType) -> _Reads:
    chains: dict[tuple[bool, str, tuple[str, ...]], None] = {}
    attributes: set[str] = set()
    for part in _nested(code):
        head, chain = None, list[str]()
        for step in dis.get_instructions(part):
            if head is not None and step.opname not in _ATTRIBUTES:
                chains[(*head, tuple(chain))] = None
                head = None
            if step.opname in _GLOBALS:
                head, chain = (True, str(step.argval)), []
            elif step.opname in _FREE and step.argval in code.co_freevars:
                head, chain = (False, str(step.argval)), []
            elif step.opname in _ATTRIBUTES:
                chain.append(str(step.argval))
                attributes.add(str(step.argval))
    found = [
        tuple((name, chain) for is_global, name, chain in chains if is_global is wanted)
        for wanted in (True, False)
    ]
    return _Reads(found[0], found[1], frozenset(attributes))


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


class _Walk:
    """Goes from function to function."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.own = {id(part) for part in parts}
        self.found: list[Named] = []
        self._seen: set[Any] = set()
        self._functions = 0

    def class_of_module(self, kind: type) -> None:
        """Reads what runs when a module of this class is called."""
        if own_classes(kind):
            for name in _ENTRANCES:
                self._members(kind, name)

    def _members(self, kind: type, name: str) -> None:
        """Reads what a class of the user's has by a name, and what it overrides there."""
        for base in own_classes(kind):
            member = vars(base).get(name)
            if member is None:  # of most names, and this runs at every call
                continue
            if isinstance(member, property):
                member = member.fget
            if isinstance(member, (staticmethod, classmethod)):
                member = member.__func__
            if isinstance(member, FunctionType):
                self.function(member, kind)

    def function(self, item: Any, kind: type | None = None) -> None:
        """Reads a function; `kind` is the class of its first argument, where it is a method."""
        if isinstance(item, partial):
            self.value("", None, "", item.func)
            return
        if isinstance(item, MethodType):
            item, kind = item.__func__, kind or type(item.__self__)
        if not isinstance(item, FunctionType):
            return
        if (id(item), kind) in self._seen or self._functions >= MAX_FUNCTIONS:
            return
        self._seen.add((id(item), kind))
        self._functions += 1
        if not is_own_file(item.__code__.co_filename):
            self._wrapped(item, kind)
            return
        self.found.append(Named(item.__qualname__, None, "", item.__code__))
        if item.__defaults__ or item.__kwdefaults__:
            defaults = (item.__defaults__, item.__kwdefaults__)
            self.found.append(Named(f"{item.__qualname__}()", None, "", defaults))
        reads = _reads_of(item.__code__)
        for name, chain in reads.globals:
            if name in item.__globals__:
                self._chain(name, item.__globals__, name, item.__globals__[name], chain)
            elif not hasattr(builtins, name):
                self._add(name, item.__globals__, name, ABSENT)
        cells = dict(zip(item.__code__.co_freevars, item.__closure__ or (), strict=True))
        for name, chain in reads.free:
            if name in cells and (value := _content(cells[name])) is not ABSENT:
                self._chain(name, cells[name], name, value, chain)
        if kind is not None and own_classes(kind):
            for name in reads.attributes:
                self._members(kind, name)

    def _wrapped(self, item: FunctionType, kind: type | None) -> None:
        """Reads what a function of another package closes over: what a decorator was put on."""
        for cell in item.__closure__ or ():
            value = _content(cell)
            if isinstance(value, FUNCTIONS):
                self.function(value, kind)
            elif isinstance(value, nn.Module):
                self.value("", None, "", value)

    def _chain(self, label: str, place: Any, name: str, value: Any, chain: tuple[str, ...]) -> None:
        """Follows `name.attribute.attribute` as far as values are held there."""
        for number, attribute in enumerate(chain):
            held = _holder(value, attribute)
            if held is None:
                self.value(label, place, name, value, chain[number:])
                return
            place, name, label = held, attribute, f"{label}.{attribute}"
            value = held[attribute] if isinstance(held, dict) else vars(held)[attribute]
        self.value(label, place, name, value)

    def value(
        self, label: str, place: Any, name: str, value: Any, chain: tuple[str, ...] = ()
    ) -> None:
        """Notes a value, and reads the code that it brings."""
        if isinstance(value, FUNCTIONS):
            self.function(value)
        elif isinstance(value, _CACHED):
            self.function(value.__wrapped__)
        elif isinstance(value, (staticmethod, classmethod)):
            self.function(value.__func__)
        elif isinstance(value, ModuleType):
            self._module(label, value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, nn.Module):
            if id(value) not in self.own:
                self._add(label, place, name, value)
                for kind in dict.fromkeys(map(type, value.modules())):
                    self.class_of_module(kind)
        else:
            self._object(label, place, name, value, chain)

    def _object(
        self, label: str, place: Any, name: str, value: Any, chain: tuple[str, ...]
    ) -> None:
        kind: Any = type(value)
        is_machinery = (
            not own_classes(kind)
            and not isinstance(value, (*SCALARS, dict, list))
            and chain
            and isinstance(getattr(kind, chain[0], None), FunctionType)
        )
        if is_machinery:  # such as a logger: what counts is what it is, not what it holds
            return
        self._add(label, place, name, value)
        if own_classes(kind):
            for member in chain[:1] or ("__call__", "__getitem__"):
                self._members(kind, member)

    def _module(self, label: str, module: ModuleType) -> None:
        """Notes the plain values of a module that is read in an unknown way."""
        if is_own_module(module):
            for name, value in vars(module).items():
                if isinstance(value, SCALARS) and not name.startswith("__"):
                    self._add(f"{label}.{name}", vars(module), name, value)

    def _class(self, kind: type) -> None:
        """Reads all that a class of the user's does: it may be made and called."""
        if kind in self._seen:
            return
        self._seen.add(kind)
        for base in own_classes(kind):
            for name in vars(base):
                self._members(kind, name)

    def _add(self, label: str, place: Any, name: str, value: Any) -> None:
        if (id(place), name) not in self._seen:
            self._seen.add((id(place), name))
            self.found.append(Named(label, place, name, value))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the name has no value yet
        return ABSENT


def _holder(value: Any, attribute: str) -> Any:
    """What holds an attribute as a plain value: the names of a module or object, or a class."""
    if isinstance(value, ModuleType):
        return vars(value) if is_own_module(value) and attribute in vars(value) else None
    if isinstance(value, nn.Module):
        return None
    kind: Any = value if isinstance(value, type) else type(value)
    if not isinstance(value, type):
        names, plain = getattr(value, "__dict__", None), is_plain(kind)
        if isinstance(names, dict) and attribute in names and plain:
            return names
    for base in own_classes(kind):
        if attribute in vars(base):
            item = vars(base)[attribute]
            return None if hasattr(item, "__get__") else base
    return None


@lru_cache(maxsize=1024)
def own_classes(kind: Any) -> tuple[type, ...]:
    """The classes among the bases of one that are the user's, not an installed package's."""
    return tuple(base for base in kind.__mro__ if _is_own_name(base.__module__))


def _is_own_name(name: str) -> bool:
    if name.partition(".")[0] in ("builtins", "torch", "distcell", "numpy"):
        return False
    module = sys.modules.get(name)
    return module is None or is_own_module(module)


def is_own_module(module: ModuleType) -> bool:
    """Whether a module is the user's, not one of an installed package or of Python."""
    file = getattr(module, "__file__", None)
    if file is None:
        return module.__name__ == "__main__"
    return is_own_file(file)


@lru_cache(maxsize=4096)
def is_own_file(file: str) -> bool:
    """Whether code in a file is the user's."""
    return not file.startswith(("<frozen", *_libraries()))


@lru_cache(maxsize=1)
def _libraries() -> tuple[str, ...]:
    """Where installed packages and Python's own lie."""
    paths = sysconfig.get_paths()
    found = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {*site.getsitepackages(), site.getusersitepackages()}
    found |= {str(Path(torch.__file__).parent), str(Path(__file__).parents[1])}
    return tuple(f"{path}/" for path in found if path)
