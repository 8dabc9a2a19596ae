"""The keys of a strategy file, version 1: located nodes in, a `Strategy` out.

A later version adds a key by adding a reader to `_TOP_KEYS` or `_CELL_KEYS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import yaml

from distcell.errors import StrategyError, close_matches, did_you_mean
from distcell.strategy.glob import compile_glob
from distcell.strategy.nodes import Document, describe, is_null, is_number_like
from distcell.strategy.spec import (
    AXIS_NAME,
    RESERVED_NAMES,
    DimSpec,
    DimValue,
    TensorSpec,
    check_axis_name,
    parse_dim,
)
from distcell.strategy.strategy import CellRule, Strategy

VERSION = 1


def parse(text: str, *, source: str) -> Strategy:
    r"""Returns the strategy that YAML text describes.

    Args:
        text: the content of a strategy file.
        source: what the file is called in errors.

    Raises:
        StrategyError: anything in it is not understood; all mistakes are listed.

    >>> parse("distcell: 1\nstrict: true", source="s.yaml").strict
    True
    """
    document = Document(source, text)
    root = document.compose()
    reader = _Reader(document)
    fields = reader.fields(root, "the file", _TOP_KEYS)
    if isinstance(root, yaml.MappingNode) and not reader.saw_version:
        document.report(root, "the key `distcell` is missing", hint="add a line `distcell: 1`")
    reader.check_axes(fields.get("mesh"))
    document.raise_errors()
    return Strategy(**fields, source=source)


class _Reader:
    """Reads nodes into fields and notes what is wrong, all of it, in the document.

    Args:
        document: the file being read.
    """

    def __init__(self, document: Document) -> None:
        self.document = document
        self.saw_version = False
        # Axes can be checked only when the mesh is known, which may stand below.
        self.mesh_node: yaml.Node | None = None
        self.axes_used: list[tuple[str, yaml.Node]] = []

    def fields(
        self, node: yaml.Node, what: str, readers: dict[str, tuple[str, _FieldReader]]
    ) -> dict[str, Any]:
        """Returns the values of a mapping by field name; a value that is wrong is left out."""
        found: dict[str, Any] = {}
        for key, key_node, value_node in self.document.entries(node, what):
            if key not in readers:
                self.document.report(
                    key_node, f"unknown key `{key}` in {what}", hint=did_you_mean(key, readers)
                )
                continue
            name, read = readers[key]
            value = read(self, value_node, f"`{key}`")
            if name and value is not None:
                found[name] = value
        return found

    def version(self, node: yaml.Node, what: str) -> None:
        self.saw_version = True
        number = self.document.integer(node, what)
        if number is not None and number != VERSION:
            self.document.report(
                node,
                f"this is a strategy file of version {number}",
                hint=f"this distcell reads version {VERSION}; write `distcell: {VERSION}`",
            )

    def boolean(self, node: yaml.Node, what: str) -> bool | None:
        return self.document.boolean(node, what)

    def choice(self, node: yaml.Node, what: str, choices: tuple[str, ...]) -> str | None:
        word = self.document.string(node, what)
        if word is None or word in choices:
            return word
        options = " or ".join(f"`{choice}`" for choice in choices)
        close = close_matches(word, choices)
        hint = f"did you mean `{close[0]}`?" if close else f"write {options}"
        self.document.report(node, f"{what} is `{word}`, not {options}", hint=hint)
        return None

    def mesh(self, node: yaml.Node, what: str) -> tuple[tuple[str, int], ...] | None:
        self.mesh_node = node
        axes: list[tuple[str, int]] = []
        free: list[str] = []
        for name, name_node, size_node in self.document.entries(node, what):
            self.note(name_node, partial(check_axis_name, name))
            size = self.document.integer(size_node, f"the size of axis `{name}`")
            if size is not None and size < 1 and size != -1:
                self.document.report(
                    size_node,
                    f"axis `{name}` has size {size}",
                    hint="a size is at least 1, or -1 for the rest of the ranks",
                )
            if size == -1:
                free.append(name)
            if len(free) > 1 and size == -1:
                self.document.report(
                    size_node,
                    f"axes `{free[0]}` and `{name}` both take the rest of the ranks",
                    hint="one axis at most may be -1",
                )
            axes.append((name, 1 if size is None else size))
        if isinstance(node, yaml.MappingNode) and not node.value:
            self.document.report(node, "the mesh has no axes", hint="write `mesh: {dp: -1}`")
        return tuple(axes) if isinstance(node, yaml.MappingNode) else None

    def inputs(self, node: yaml.Node, what: str) -> tuple[tuple[str, TensorSpec], ...]:
        return tuple(self.named_specs(node, what))

    def params(self, node: yaml.Node, what: str) -> dict[str, TensorSpec]:
        return dict(self.named_specs(node, what))

    def named_specs(self, node: yaml.Node, what: str) -> Iterator[tuple[str, TensorSpec]]:
        for pattern, pattern_node, value in self.document.entries(node, what):
            self.note(pattern_node, partial(compile_glob, pattern))
            spec = self.tensor(value, f"{what} `{pattern}`")
            if spec is not None:
                yield pattern, spec

    def cells(self, node: yaml.Node, what: str) -> tuple[CellRule, ...]:
        rules = []
        for pattern, pattern_node, value in self.document.entries(node, what):
            self.note(pattern_node, partial(compile_glob, pattern))
            fields = self.fields(value, f"cell `{pattern}`", _CELL_KEYS)
            if isinstance(value, yaml.MappingNode) and not _asks(value):
                self.document.report(
                    pattern_node,
                    f"cell `{pattern}` asks for nothing",
                    hint="give `params`, `in` or `out`",
                )
            source = self.document.place(pattern_node)
            rules.append(CellRule(pattern, **fields, source=source))
        return tuple(rules)

    def tensors(self, node: yaml.Node, what: str) -> tuple[TensorSpec | None, ...] | None:
        hint = f"write one list of dims for each tensor: {what}: [[dp, _, _]]".replace("`", "")
        nodes = self.document.items(node, what, hint=hint)
        if nodes is None:
            return None
        specs: list[TensorSpec | None] = []
        for place, item in enumerate(nodes):
            if isinstance(item, yaml.ScalarNode) and not is_null(item):
                message = f"{what} has {describe(item)} where a list of dims stands"
                self.document.report(item, message, hint=hint + "; or null to leave it open")
                return None
            specs.append(None if is_null(item) else self.tensor(item, f"{what}[{place}]"))
        return tuple(specs)

    def tensor(self, node: yaml.Node, what: str) -> TensorSpec | None:
        nodes = self.document.items(node, what, hint="a list with one entry per dim: [dp, _]")
        if nodes is None:
            return None
        dims = tuple(self.dim(item, f"dim {place} of {what}") for place, item in enumerate(nodes))
        spec = TensorSpec(dims, self.document.place(node))
        twice = spec.axis_used_twice()
        if twice is not None:
            self.document.report(
                node,
                f"axis `{twice}` is used twice on one tensor",
                hint="an axis splits at most one dim of a tensor",
            )
        return spec

    def dim(self, node: yaml.Node, what: str) -> DimSpec:
        value: DimValue | list[str] = None
        if isinstance(node, yaml.SequenceNode):
            words = [self.axis_word(item, f"an axis of {what}") for item in node.value]
            if None in words:
                return DimSpec()
            value = [word for word in words if word is not None]
        elif is_number_like(node):
            value = self.document.integer(node, what)
        elif not is_null(node):
            value = self.axis_word(node, what)
            if value is None:
                return DimSpec()
        parsed = self.note(node, partial(parse_dim, value))
        return DimSpec() if parsed is None else parsed

    def axis_word(self, node: yaml.Node, what: str) -> str | None:
        word = self.document.string(node, what)
        axis = (word or "").removesuffix("?")
        if AXIS_NAME.fullmatch(axis) and axis not in RESERVED_NAMES:
            self.axes_used.append((axis, node))
        return word

    def note(self, node: yaml.Node, check: Callable[[], Any]) -> Any:
        """Returns what the check returns; when it raises, notes that at the node."""
        try:
            return check()
        except StrategyError as error:
            self.document.report(node, error.message, hint=error.hint, also=error.where)
            return None

    def check_axes(self, mesh: tuple[tuple[str, int], ...] | None) -> None:
        """Notes every axis that the mesh does not have."""
        names = [name for name, _ in mesh or ()]
        for axis, node in self.axes_used:
            if axis in names or (mesh is None and self.mesh_node is not None):
                continue
            if mesh is None:
                hint = f"add a line `mesh: {{{axis}: -1}}`"
                self.document.report(node, f"axis `{axis}`, but no `mesh` names it", hint=hint)
            else:
                axes = "mesh  " + " ".join(f"{name}={size}" for name, size in mesh)
                close = did_you_mean(axis, names)
                self.document.report(
                    node, f"the mesh has no axis `{axis}`", also=[axes], hint=close
                )


def _asks(node: yaml.MappingNode) -> bool:
    return any(getattr(key, "value", None) != "optional" for key, _ in node.value)


_FieldReader = Callable[[_Reader, yaml.Node, str], Any]

# key in the file: (field of the dataclass, how it is read)
_TOP_KEYS: dict[str, tuple[str, _FieldReader]] = {
    "distcell": ("", _Reader.version),
    "mesh": ("mesh", _Reader.mesh),
    "data": ("data", lambda r, node, what: r.choice(node, what, ("full", "local"))),
    "uneven": ("uneven", _Reader.boolean),
    "strict": ("strict", _Reader.boolean),
    "random": ("random", lambda r, node, what: r.choice(node, what, ("counter", "torch"))),
    "inputs": ("inputs", _Reader.inputs),
    "cells": ("cells", _Reader.cells),
}
_CELL_KEYS: dict[str, tuple[str, _FieldReader]] = {
    "params": ("params", _Reader.params),
    "in": ("inputs", _Reader.tensors),
    "out": ("outputs", _Reader.tensors),
    "optional": ("optional", _Reader.boolean),
}
