"""Inputs that a Cell is told to expect, sizes that calls may choose among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from distcell.cell_base import CellBase
from distcell.errors import DataError, UserTypeError
from distcell.tensor import DynamicTensor

Expected = torch.Tensor | DynamicTensor


class CellInputs(CellBase):
    """`set_inputs` and what it checks."""

    def set_inputs(self, *inputs: Expected) -> None:
        """Notes what calls will pass; each call is then compared with it.

        Every shape is a graph of its own here, captured when it first comes: a size that is None
        is one that calls may choose.

        Args:
            inputs: for each tensor one of its shape and dtype, or `Tensor(shape=[3, None], dtype=)`
                with None where the size may be any. None at all takes the expectation back.

        Raises:
            UserTypeError: one is neither.

        >>> cell = CellInputs()
        >>> cell.set_inputs(DynamicTensor((3, None), torch.float32))
        >>> cell.get_inputs()
        (DynamicTensor(shape=(3, None), dtype=torch.float32),)
        """
        for place, item in enumerate(inputs):
            if not isinstance(item, torch.Tensor | DynamicTensor):
                raise UserTypeError(
                    f"input {place} is a {type(item).__name__}",
                    hint="pass a tensor, or Tensor(shape=[3, None], dtype=...)",
                )
        self._expected_inputs = inputs or None
        self._refresh_call()

    def get_inputs(self) -> tuple[Expected, ...] | None:
        """Returns what `set_inputs` was told; None when it was not called.

        >>> print(CellInputs().get_inputs())
        None
        """
        return self._expected_inputs


def check_inputs(
    expected: Sequence[Expected], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Returns when what a call passes is what was expected.

    Args:
        expected: one for each argument.
        args: the positional arguments.
        kwargs: the keyword arguments, in the order of the call.

    Raises:
        UserTypeError: an argument is no tensor.
        DataError: the number of arguments, of dims, a size or a dtype is another.

    >>> check_inputs([DynamicTensor((3, None), torch.float32)], [torch.ones(3, 5)], {})
    """
    named = {**{str(place): arg for place, arg in enumerate(args)}, **kwargs}
    if len(named) != len(expected):
        raise DataError(
            f"{len(named)} inputs come in, `set_inputs` was told of {len(expected)}",
            hint="call `set_inputs` with as many",
        )
    for (name, given), wanted in zip(named.items(), expected, strict=True):
        if not isinstance(given, torch.Tensor):
            raise UserTypeError(f"input `{name}` is a {type(given).__name__}, not a tensor")
        sizes = zip(given.shape, wanted.shape, strict=False)
        fits = all(want is None or want == size for size, want in sizes)
        if given.dim() != len(wanted.shape) or not fits or given.dtype != wanted.dtype:
            shape = [*wanted.shape]
            raise DataError(
                f"input `{name}` is {list(given.shape)} of {given.dtype}",
                where=[f"`set_inputs` was told of {shape} of {wanted.dtype}"],
                hint="None in place of a size lets calls choose it",
            )
