"""Parameters: torch's own, with a name and a layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distcell.compat import allow_foreach
from distcell.dtype import name_of
from distcell.layout import Layout

_LAYOUT = "_distcell_layout"
_NAME = "_distcell_name"


class Parameter(torch.nn.Parameter):
    """A trainable tensor that knows its path in the network.

    Every parameter of a Cell is one: a `torch.nn.Parameter` that is assigned to a Cell becomes
    a `Parameter` in place, so that optimizers which already hold it stay valid.

    Args:
        data: the value.
        requires_grad: whether it is trained.
        name: its path, `blocks.3.mlp.up.weight`. Set when the parameter is assigned to a Cell.

    >>> Parameter(torch.zeros(2), name="scale").name
    'scale'
    """

    def __new__(
        cls, data: torch.Tensor | None = None, requires_grad: bool = True, *, name: str = ""
    ) -> Parameter:
        """Returns the parameter, which shares the memory of `data`."""
        plain = None if data is None else data.detach()
        parameter: Parameter = super().__new__(cls, plain, requires_grad)
        parameter.name = name
        return parameter

    @property
    def name(self) -> str:
        """The path in the outermost Cell that holds it."""
        return str(self.__dict__.get(_NAME, ""))

    @name.setter
    def name(self, name: str) -> None:
        self.__dict__[_NAME] = name

    def __repr__(self) -> str:  # type: ignore[override]
        kind = f"{name_of(self.dtype)}{layout(self)}"
        return f"Parameter({self.name or 'unnamed'}: {kind})\n{self.detach()}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        if id(self) not in memo:
            # torch's own copy would lose the layout: a slice would pass for the whole.
            data = self.detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = _rebuild(data, self.requires_grad, dict(self.__dict__))
        copied: Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _rebuild, (self.detach(), self.requires_grad, dict(self.__dict__))


allow_foreach(Parameter)


def _rebuild(data: torch.Tensor, requires_grad: bool, state: dict[str, Any]) -> Parameter:
    parameter = Parameter(data, requires_grad)
    parameter.__dict__.update(state)
    return parameter


def adopt(parameter: torch.nn.Parameter) -> None:
    """Makes a torch parameter a `Parameter`, in place; other kinds of parameters stay as they are.

    Args:
        parameter: it stays the same object with the same memory.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> adopt(weight)
    >>> type(weight).__name__, weight.name
    ('Parameter', '')
    """
    if type(parameter) is torch.nn.Parameter:
        parameter.__class__ = Parameter


def layout(tensor: torch.Tensor) -> Layout:
    """Returns where a parameter or buffer lives: the layout of which this rank holds its piece.

    Args:
        tensor: a parameter or buffer of a Cell. One that nothing has split is whole on every rank.

    >>> print(layout(torch.zeros(4, 2)))
    [4, 2]
    """
    found: Layout | None = getattr(tensor, _LAYOUT, None)
    return Layout.of(tuple(tensor.shape)) if found is None else found


def global_shape(tensor: torch.Tensor) -> torch.Size:
    """Returns the shape of the whole parameter, of which this rank may hold a piece.

    Args:
        tensor: a parameter or buffer of a Cell.

    >>> global_shape(torch.zeros(4, 2))
    torch.Size([4, 2])
    """
    return torch.Size(layout(tensor).shape)


def set_layout(tensor: torch.Tensor, new: Layout) -> None:
    """Notes the layout whose piece a tensor now holds: for the engine, which also cuts the data.

    Args:
        tensor: a parameter or buffer.
        new: its layout.

    >>> weight = torch.zeros(2, 2)
    >>> set_layout(weight, Layout.parse("[4@tp, 2]"))
    >>> global_shape(weight)
    torch.Size([4, 2])
    """
    setattr(tensor, _LAYOUT, new)
