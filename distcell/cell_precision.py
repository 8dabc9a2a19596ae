"""Casts of a Cell: what enters it and its parameters, to another floating-point type."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Self, TypeVar

import torch

from distcell.cell_base import CellBase
from distcell.compat import with_tensors
from distcell.errors import UserTypeError, UserValueError

PRECISIONS: Mapping[str, torch.dtype] = {
    "fp16": torch.float16,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
}
"""The flags of `to_float`."""

_T = TypeVar("_T")


class CellPrecision(CellBase):
    """Mixed precision by subtree."""

    def to_float(self, dst_type: torch.dtype) -> Self:
        """Returns this cell; it and all below it run with a floating-point type.

        Floating-point tensors that enter a cell, and its own parameters, are cast when it is
        called. The parameters keep their type, so that gradients and optimizer have it. A later
        call for this cell or for one above it wins. A parameter that another cell than its owner
        uses is not cast there.

        Args:
            dst_type: `float16`, `float32` or `bfloat16`.

        Raises:
            UserValueError: it is something else.

        >>> cell = CellPrecision()
        >>> cell.lin = torch.nn.Linear(2, 2)
        >>> cell.to_float(torch.bfloat16).lin(torch.ones(1, 2)).dtype, cell.lin.weight.dtype
        (torch.bfloat16, torch.float32)
        """
        if not any(dst_type is known for known in PRECISIONS.values()):
            raise UserValueError(
                f"a cell cannot run in {dst_type!r}", hint="float16, float32 or bfloat16"
            )
        for module in torch.nn.Module.modules(self):
            set_precision(module, dst_type)
            if isinstance(module, CellBase):
                flags = {name: dtype is dst_type for name, dtype in PRECISIONS.items()}
                module._cell_flags = {**module._cell_flags, **flags}
        return self

    def cast_inputs(self, inputs: tuple[Any, ...], dst_type: torch.dtype) -> tuple[Any, ...]:
        """Returns inputs with their floating-point tensors cast.

        Args:
            inputs: tensors of any shape and other things; tuples, lists and dicts are looked into.
            dst_type: the type.

        Raises:
            UserTypeError: the inputs are no tuple, or the type is none of torch's.

        >>> CellPrecision().cast_inputs((torch.ones(1), 3), torch.float16)
        (tensor([1.], dtype=torch.float16), 3)
        """
        if not isinstance(inputs, tuple):
            raise UserTypeError(f"`inputs` is a {type(inputs).__name__}, not a tuple")
        if not isinstance(dst_type, torch.dtype):
            raise UserTypeError(f"`dst_type` is {dst_type!r}, not a dtype")
        return cast(inputs, dst_type)

    def auto_cast_inputs(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns inputs as the call of this cell casts them: see `to_float`.

        Args:
            inputs: as for `cast_inputs`.

        >>> CellPrecision().to_float(torch.float16).auto_cast_inputs((torch.ones(1),))
        (tensor([1.], dtype=torch.float16),)
        """
        dtype = precision_of(self)
        return inputs if dtype is None else CellPrecision.cast_inputs(self, inputs, dtype)

    def cast_param(self, param: torch.Tensor) -> torch.Tensor:
        """Returns a parameter as the call of this cell casts it: see `to_float`.

        Args:
            param: one that is not of floating point stays as it is.

        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> CellPrecision().to_float(torch.float16).cast_param(weight).dtype
        torch.float16
        """
        dtype = precision_of(self)
        return param if dtype is None else cast(param, dtype)


class CastForward:
    """The forward of a module with inputs and own parameters cast; stands on the instance.

    There it is found by whoever runs the module, hooks and captures included, and is copied and
    pickled with it.

    Args:
        module: whose forward it is.
        dtype: the type.
    """

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        self.module, self.dtype = module, dtype

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self.module).forward.__get__(self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, dtype = self.module, self.dtype
        own: dict[str, torch.Tensor] = {}
        own |= {n: cast(p, dtype) for n, p in module._parameters.items() if p is not None}
        args, kwargs = cast((args, kwargs), dtype)
        with with_tensors(module, own) if own else nullcontext():
            return type(module).forward(module, *args, **kwargs)


def set_precision(module: torch.nn.Module, dtype: torch.dtype | None) -> None:
    """Lets the calls of one module run in a type; None: as its parameters and inputs are.

    Args:
        module: any module.
        dtype: the type.

    Raises:
        UserTypeError: a forward of another kind stands on the instance.

    >>> lin = torch.nn.Linear(1, 1)
    >>> set_precision(lin, torch.bfloat16)
    >>> lin(torch.ones(1, 1)).dtype
    torch.bfloat16
    """
    own = module.__dict__.get("forward")
    if own is not None and not isinstance(own, CastForward):
        kind = type(module).__name__
        raise UserTypeError(
            f"this {kind} has a `forward` of its own, which cannot be cast", hint="cast within it"
        )
    if dtype is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = CastForward(module, dtype)


def precision_of(module: torch.nn.Module) -> torch.dtype | None:
    """Returns the type that the calls of a module run in; None: nothing is cast.

    >>> print(precision_of(torch.nn.Linear(1, 1)))
    None
    """
    own = module.__dict__.get("forward")
    return own.dtype if isinstance(own, CastForward) else None


def cast(item: _T, dtype: torch.dtype) -> _T:
    """Returns something with its floating-point tensors cast.

    Args:
        item: a tensor, or tuples, lists and dicts of tensors and other things.
        dtype: the type.

    >>> cast({"x": torch.ones(1)}, torch.float16)
    {'x': tensor([1.], dtype=torch.float16)}
    """
    found: Any = item
    made: Any = item
    if isinstance(item, torch.Tensor):
        made = item.to(dtype) if item.is_floating_point() else item
    elif isinstance(item, tuple) and hasattr(item, "_fields"):
        made = type(item)(*(cast(each, dtype) for each in item))
    elif type(item) in (tuple, list):
        made = type(found)(cast(each, dtype) for each in found)
    elif type(item) is dict:
        made = {key: cast(each, dtype) for key, each in found.items()}
    result: _T = made
    return result
