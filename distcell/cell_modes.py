"""Flags and modes of a Cell: training, gradients, phase."""

from __future__ import annotations

from typing import Any, Self

import torch

from distcell.cell_base import CellBase, check_bool
from distcell.cell_precision import PRECISIONS, set_precision
from distcell.errors import UserNameError, UserTypeError, UserValueError, did_you_mean

BOOST_TYPES = ("less_bn",)
"""What `set_boost` knows."""


class CellModes(CellBase):
    """What a Cell is told to be."""

    _phase: str | None = None
    _bprop_debug: bool = False

    def add_flags(self, **flags: Any) -> Self:
        """Returns this cell with further flags: values by name, which are attributes too.

        Args:
            flags: `fp16`, `fp32` and `bf16` are those of `to_float`, for this cell alone. What has
                the name of an attribute of another kind is refused: MindSpore writes over it.

        Raises:
            UserNameError: a flag has the name of an attribute.
            UserTypeError: one of `to_float`'s flags is no bool.

        >>> CellModes().add_flags(kind="head").kind
        'head'
        """
        old = self._cell_flags
        taken = [name for name in flags if name not in old and _is_attribute(self, name)]
        if taken:
            raise UserNameError(
                f"a flag cannot be named `{taken[0]}`: the cell has such an attribute",
                hint="set the attribute, or take another name",
            )
        for name in set(flags) & set(PRECISIONS):
            check_bool(name, flags[name])
        self._cell_flags = {**old, **flags}
        for name, value in flags.items():
            if name in PRECISIONS:
                chosen = next((n for n in PRECISIONS if self._cell_flags.get(n)), None)
                set_precision(self, None if chosen is None else PRECISIONS[chosen])
            elif name not in _KEPT_ELSEWHERE:
                self.__dict__[name] = value
        return self

    def add_flags_recursive(self, **flags: Any) -> Self:
        """Returns this cell; it and all Cells below it have further flags.

        Args:
            flags: as for `add_flags`.

        Raises:
            UserNameError: a flag has the name of an attribute of one of the cells.
            UserTypeError: one of `to_float`'s flags is no bool.

        >>> CellModes().add_flags_recursive(kind="head").get_flags()
        {'kind': 'head'}
        """
        for module in torch.nn.Module.modules(self):
            if isinstance(module, CellModes):
                CellModes.add_flags(module, **flags)
        return self

    def get_flags(self) -> dict[str, Any]:
        """Returns the flags that were added.

        >>> CellModes().get_flags()
        {}
        """
        return dict(self._cell_flags)

    def set_train(self, mode: bool = True) -> Self:
        """Returns this cell, it and all its children in training (or evaluation) mode.

        Args:
            mode: False for evaluation.

        Raises:
            UserTypeError: the mode is no bool.

        >>> cell = CellModes().set_train(False)
        >>> cell.training, cell.phase
        (False, 'predict')
        """
        self.train(check_bool("mode", mode))
        self._phase = None
        return self

    @property
    def phase(self) -> str:
        """`train` or `predict`, as the mode is, or what was assigned.

        Raises:
            UserTypeError: what is assigned is no str.
        """
        return self._phase or ("train" if self.training else "predict")

    @phase.setter
    def phase(self, phase: str) -> None:
        if not isinstance(phase, str):
            raise UserTypeError(f"`phase` is {phase!r}, not a str")
        self._phase = phase

    def set_grad(self, requires_grad: bool = True) -> Self:
        """Returns this cell, whose calls note what backward needs, or do not.

        Args:
            requires_grad: False: calls run under `torch.no_grad`. True: as torch's grad mode says,
                which is so without a call of this method too.

        Raises:
            UserTypeError: it is no bool.

        >>> CellModes().set_grad().requires_grad
        True
        """
        self._requires_grad = check_bool("requires_grad", requires_grad)
        self._refresh_call()
        return self

    @property
    def requires_grad(self) -> bool:
        """What `set_grad` was told; False when it was not called."""
        return bool(self._requires_grad)

    def set_broadcast_flag(self, mode: bool = True) -> Self:
        """Returns this cell; it and all Cells below it have the flag `broadcast_flag`.

        Nothing reads the flag here: ranks start with equal parameters, which is checked before
        the first step, and what was loaded is cut from global values.

        Args:
            mode: the flag.

        >>> CellModes().set_broadcast_flag().broadcast_flag
        True
        """
        CellModes.add_flags_recursive(self, broadcast_flag=check_bool("mode", mode))
        return self

    def set_boost(self, boost_type: str) -> Self:
        """Returns this cell; it and all Cells below it have the flag of an algorithm.

        Args:
            boost_type: `less_bn`: sets the flag `less_bn`, for who normalises less.

        Raises:
            UserValueError: the algorithm is not known; it lists those that are.

        >>> CellModes().set_boost("less_bn").get_flags()
        {'less_bn': True}
        """
        if boost_type not in BOOST_TYPES:
            hint = did_you_mean(str(boost_type), BOOST_TYPES)
            raise UserValueError(f"no algorithm {boost_type!r}", hint=hint)
        return CellModes.add_flags_recursive(self, less_bn=True)

    @property
    def bprop_debug(self) -> bool:
        """Whether what the cell's own `bprop` returns is compared with its inputs.

        Raises:
            UserTypeError: what is assigned is no bool.
        """
        return self._bprop_debug

    @bprop_debug.setter
    def bprop_debug(self, value: bool) -> None:
        self._bprop_debug = check_bool("bprop_debug", value)


_KEPT_ELSEWHERE = frozenset(PRECISIONS)


def _is_attribute(cell: torch.nn.Module, name: str) -> bool:
    return name not in _KEPT_ELSEWHERE and hasattr(cell, name)
