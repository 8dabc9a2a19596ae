"""First values of weights by MindSpore's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import init

from distcell.errors import UserTypeError, UserValueError, did_you_mean

Init = str | float | Tensor | None
"""A name, a number for all elements, the values, or None: as torch's layer does it."""

_NAMED: Mapping[str, Callable[[Tensor], Any]] = {
    "zeros": init.zeros_,
    "ones": init.ones_,
    "normal": lambda tensor: init.normal_(tensor, std=0.01),
    "uniform": lambda tensor: init.uniform_(tensor, -0.07, 0.07),
    "truncatednormal": lambda tensor: init.trunc_normal_(tensor, std=0.01, a=-0.02, b=0.02),
    "xavieruniform": init.xavier_uniform_,
    "heuniform": init.kaiming_uniform_,
    "henormal": init.kaiming_normal_,
}


def initialize(tensor: Tensor | None, how: Init, what: str) -> None:
    """Gives a parameter its first values.

    Args:
        tensor: the parameter; None when the layer has none.
        how: `zeros`, `ones`, `normal` (deviation 0.01), `uniform` (±0.07), `TruncatedNormal`,
            `XavierUniform`, `HeUniform`, `HeNormal` (any case, `_` or not), a number, or the
            values. None leaves what torch gave it.
        what: the argument's name.

    Raises:
        UserValueError: the name is not known, or the values have another shape.
        UserTypeError: it is something else.

    >>> weight = torch.empty(2)
    >>> initialize(weight, "ones", "weight_init")
    >>> weight
    tensor([1., 1.])
    """
    if tensor is None or how is None:
        return
    with torch.no_grad():
        if isinstance(how, str):
            name = how.lower().replace("_", "")
            if name not in _NAMED:
                raise UserValueError(f"no `{what}` {how!r}", hint=did_you_mean(name, _NAMED))
            _NAMED[name](tensor)
        elif isinstance(how, Tensor):
            if how.shape != tensor.shape:
                shapes = f"{list(how.shape)}, the parameter {list(tensor.shape)}"
                raise UserValueError(f"`{what}` is {shapes}")
            tensor.copy_(how)
        elif isinstance(how, Real) and not isinstance(how, bool):
            tensor.fill_(float(how))
        else:
            kind = type(how).__name__
            raise UserTypeError(f"`{what}` is a {kind}", hint="a name, a number or a tensor")
