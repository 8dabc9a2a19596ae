"""The cells in a Cell: traversal, insertion, paths and scopes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch

from distcell.cell_base import CellBase
from distcell.errors import UserNameError, UserTypeError, UserValueError, did_you_mean

CELL_TYPES = ("quant", "second-order")
"""What a cell can be for `update_cell_type`."""


class CellChildren(CellBase):
    """Children of a Cell may be any modules, and count as cells."""

    _scope: str = ""
    _cell_type: str | None = None

    def cells(self) -> Iterator[torch.nn.Module]:
        """Yields the immediate children; the same child once.

        >>> net = CellChildren()
        >>> net.relu = torch.nn.ReLU()
        >>> list(net.cells())
        [ReLU()]
        """
        yield from torch.nn.Module.children(self)

    def name_cells(self) -> OrderedDict[str, torch.nn.Module]:
        """Returns the immediate children by name; the same child once.

        >>> net = CellChildren()
        >>> net.relu = torch.nn.ReLU()
        >>> dict(net.name_cells())
        {'relu': ReLU()}
        """
        return OrderedDict(torch.nn.Module.named_children(self))

    def cells_and_names(
        self, cells: set[torch.nn.Module] | None = None, name_prefix: str = ""
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yields path and cell: this one (its path is the prefix) and all below it, each once.

        Args:
            cells: cells that are left out; those that are found are added.
            name_prefix: put before each path.

        >>> [name for name, _ in CellChildren().cells_and_names(name_prefix="net")]
        ['net']
        """
        if cells is not None and not isinstance(cells, set):
            kind = type(cells).__name__
            raise UserTypeError(f"`cells` is a {kind}, not a set", hint="leave it out")
        yield from torch.nn.Module.named_modules(self, cells, name_prefix)

    def named_modules(
        self,
        memo: set[torch.nn.Module] | str | None = None,
        prefix: str | None = "",
        remove_duplicate: bool = True,
        *,
        with_parent: bool = False,
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yields path and module: this one and all below it.

        Args:
            memo: torch's: modules that are left out. A str is MegEngine's first argument, `prefix`.
            prefix: put before each path.
            remove_duplicate: whether a module that stands twice comes once.
            with_parent: MegEngine's: whether each is followed by the module that holds it.

        >>> net = CellChildren()
        >>> net.relu = torch.nn.ReLU()
        >>> [name for name, _ in net.named_modules("net")]
        ['net', 'net.relu']
        """
        if isinstance(memo, str):
            memo, prefix = None, memo
        prefix = prefix or ""
        found = super().named_modules(memo, prefix, remove_duplicate)
        if not with_parent:
            yield from found
            return
        parents: dict[str, torch.nn.Module] = {}
        for path, module in found:
            parents[path] = module
            parent = None if path == prefix else parents.get(path.rpartition(".")[0])
            yield path, module, parent  # type: ignore[misc]

    def named_children(self, *, with_parent: bool = False) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yields name and module of the immediate children; the same child once.

        Args:
            with_parent: MegEngine's: whether each is followed by this cell.

        >>> net = CellChildren()
        >>> net.relu = torch.nn.ReLU()
        >>> list(net.named_children())
        [('relu', ReLU())]
        """
        for name, module in super().named_children():
            yield (name, module, self) if with_parent else (name, module)  # type: ignore[misc]

    def insert_child_to_cell(self, child_name: str, child_cell: torch.nn.Module) -> None:
        """Adds a child.

        Args:
            child_name: the attribute.
            child_cell: a Cell or any module.

        Raises:
            UserTypeError: the name is no str, or the child no module.
            UserNameError: the name is empty, has a dot, or is that of another attribute.

        >>> net = CellChildren()
        >>> net.insert_child_to_cell("relu", torch.nn.ReLU())
        >>> net.relu
        ReLU()
        """
        check_new_name(self, "child", child_name)
        if not isinstance(child_cell, torch.nn.Module):
            kind = type(child_cell).__name__
            raise UserTypeError(f"child `{child_name}` is a {kind}", hint="pass a Cell or a module")
        self.add_module(child_name, child_cell)

    @property
    def cell_path(self) -> str:
        """The path in the outermost Cell that holds this one; empty for the outermost."""
        return self._cell_path

    @property
    def param_prefix(self) -> str:
        """What stands before the names of this cell's own parameters, without the dot."""
        return self._cell_path

    def update_cell_prefix(self) -> None:
        """Makes `param_prefix` of all cells below the path from this one.

        >>> net = CellChildren()
        >>> net.inner = CellChildren()
        >>> net.update_cell_prefix()
        >>> net.inner.param_prefix
        'inner'
        """
        for path, module in torch.nn.Module.named_modules(self):
            if isinstance(module, CellBase):
                module._cell_path = path

    def generate_scope(self) -> None:
        """Gives all cells below their scope: `Default/net-Net/conv-Conv2d` from this one.

        >>> net = CellChildren()
        >>> net.inner = CellChildren()
        >>> net.generate_scope()
        >>> net.inner.get_scope()
        'Default/inner-CellChildren'
        """
        scopes = {"": self._scope or "Default"}
        for path, module in torch.nn.Module.named_modules(self):
            if path:
                parent, _, name = path.rpartition(".")
                scopes[path] = f"{scopes[parent]}/{name}-{type(module).__name__}"
            if isinstance(module, CellChildren):
                module._scope = scopes[path]

    def get_scope(self) -> str:
        """Returns the scope that `generate_scope` gave this cell; empty before.

        >>> CellChildren().get_scope()
        ''
        """
        return self._scope

    @property
    def cell_type(self) -> str | None:
        """What `update_cell_type` was told; None when it was not called."""
        return self._cell_type

    def update_cell_type(self, cell_type: str) -> Self:
        """Returns this cell, marked as one of quantisation or of a second-order method.

        Nothing here treats such cells differently; the mark is for who reads `cell_type`.

        Args:
            cell_type: `quant` or `second-order`.

        Raises:
            UserValueError: it is something else.

        >>> CellChildren().update_cell_type("quant").cell_type
        'quant'
        """
        if cell_type not in CELL_TYPES:
            hint = did_you_mean(str(cell_type), CELL_TYPES)
            raise UserValueError(f"no cell type {cell_type!r}", hint=hint)
        self._cell_type = cell_type
        return self


def check_new_name(module: torch.nn.Module, what: str, name: object, *, dots: bool = False) -> None:
    """Returns when a module can be given an attribute of a name.

    Args:
        module: its owner.
        what: what is to have the name.
        name: the name.
        dots: whether it may have dots.

    Raises:
        UserTypeError: the name is no str.
        UserNameError: it is empty, has a dot, or is that of another attribute.
        AttributeError: the module's own `__init__` has not run.

    >>> check_new_name(torch.nn.Module(), "child", "relu")
    """
    if "_modules" not in module.__dict__:
        raise AttributeError(f"`super().__init__()` comes before the first {what}")
    if not isinstance(name, str):
        kind = type(name).__name__
        raise UserTypeError(f"the name of a {what} is a {kind}, not a str")
    if not name:
        raise UserNameError(f"the name of a {what} is empty")
    if "." in name and not dots:
        raise UserNameError(f"the name of a {what} has a dot: `{name}`", hint="use an underscore")
    if _taken(module, name):
        kind = type(module).__name__
        hint = "take another name"
        raise UserNameError(f"this {kind} has an attribute `{name}` already", hint=hint)


def _taken(module: torch.nn.Module, name: str) -> bool:
    places: tuple[Mapping[str, Any], ...] = (
        module._modules,
        module._parameters,
        module._buffers,
    )
    return any(name in place for place in places) or hasattr(module, name)
