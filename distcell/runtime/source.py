"""Python source that is written line by line and compiled once."""

from __future__ import annotations

import itertools
import keyword
import linecache
import math
import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

_numbers = itertools.count()


class Source:
    """The text of one function, with the objects that it names.

    Names of variables and of constants never collide: constants begin with an underscore, which
    variables do not.

    Example:
        >>> source = Source()
        >>> source.add(f"return {source.constant(math.sqrt, 'sqrt')}(x)")
        >>> source.compile("root", "x", "<example>")(9)
        3.0
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self._constants: dict[Any, str] = {}
        self._taken: set[str] = set()

    def add(self, line: str, comment: str = "") -> None:
        """Appends a line to the body of the function."""
        note = " ".join(comment.split())
        self.lines.append(f"    {line}  # {note}" if note else f"    {line}")

    def variable(self, name: str) -> str:
        """A new variable, named after a value as far as Python allows."""
        base = re.sub(r"\W", "_", name).lstrip("_") or "v"
        if base[0].isdigit() or keyword.iskeyword(base):
            base = f"v_{base}"
        chosen, count = base, 0
        while chosen in self._taken:
            count += 1
            chosen = f"{base}_{count}"
        self._taken.add(chosen)
        return chosen

    def constant(self, value: Any, hint: str) -> str:
        """The name under which the function finds an object; equal objects share it."""
        key = (type(value), value if not isinstance(value, float) else repr(value))
        if key not in self._constants:
            base = "_" + re.sub(r"\W", "_", hint)
            name, count = base, 0
            while name in self.names:
                count += 1
                name = f"{base}_{count}"
            self.names[name] = value
            self._constants[key] = name
        return self._constants[key]

    def literal(self, value: Any) -> str:
        """The text of an argument that is the same on every call."""
        if isinstance(value, tuple):
            return f"({', '.join(map(self.literal, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, torch.dtype):
            return self.constant(value, str(value).removeprefix("torch."))
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        if isinstance(value, float):
            return repr(value) if math.isfinite(value) else self.constant(value, "float")
        return self.constant(value, type(value).__name__)

    def text(self, name: str, parameter: str) -> str:
        """The whole function."""
        return "\n".join([f"def {name}({parameter}):", *(self.lines or ["    pass"]), ""])

    def compile(self, name: str, parameter: str, title: str) -> Callable[..., Any]:
        """The function; tracebacks show its lines.

        Args:
            name: The name of the function.
            parameter: Its parameters, as they are written.
            title: What tracebacks show in place of a file.
        """
        text = self.text(name, parameter)
        file = f"<{title} #{next(_numbers)}>"
        scope: dict[str, Any] = dict(self.names)
        exec(compile(text, file, "exec"), scope)
        function: Callable[..., Any] = scope[name]
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        weakref.finalize(function, linecache.cache.pop, file, None)
        return function


def call(function: str, args: tuple[str, ...], kwargs: Mapping[str, str]) -> str:
    """The text of a call."""
    return f"{function}({', '.join([*args, *(f'{key}={arg}' for key, arg in kwargs.items())])})"
