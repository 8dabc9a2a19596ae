"""How one tensor is split: a spec for each dim, as written in a strategy file or given in code.

The grammar of a dim::

    _ or null    not split, and closed: propagation leaves it alone
    tp           split over axis tp, closed
    tp?          split over axis tp, open: propagation may split it further
    ?            not decided: open
    [dp, tp]     split over several axes, the major one first; `[dp, tp?]` is open
    4            this many slices; the planner finds the axes
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from distcell.errors import StrategyError

AXIS_NAME = re.compile(r"[a-z][a-z0-9_]*")
"""What an axis may be called."""

RESERVED_NAMES = frozenset({"yes", "no", "on", "off", "true", "false", "null"})
"""Words that a YAML reader takes for something else; no axis is called so, quoted or not."""

DimValue = str | int | Sequence[str] | None
"""A dim as Python code gives it: `"tp"`, `("dp", "tp")`, a number of slices, or None."""


@dataclass(frozen=True)
class DimSpec:
    """How one dim is split.

    Args:
        axes: the axes that split it, the major one first.
        slices: a number of slices whose axes are not named; None when axes say it all.
        open: whether propagation may split the dim further.

    >>> str(DimSpec(("dp", "tp"), open=True))
    '[dp, tp?]'
    """

    axes: tuple[str, ...] = ()
    slices: int | None = None
    open: bool = False

    def __str__(self) -> str:
        if self.slices is not None:
            return str(self.slices)
        if not self.axes:
            return "?" if self.open else "_"
        names = [*self.axes[:-1], self.axes[-1] + ("?" if self.open else "")]
        return names[0] if len(names) == 1 else f"[{', '.join(names)}]"


UNSPLIT = DimSpec()
"""A dim that is not split, and closed."""


@dataclass(frozen=True)
class TensorSpec:
    """How one tensor is split.

    Args:
        dims: one spec per dim; those left out at the end are not split.
        source: where it was written, `strategies/tensor.yaml:12:20`. Not part of equality.

    >>> str(TensorSpec.of((("dp", "tp"), None)))
    '[[dp, tp], _]'
    """

    dims: tuple[DimSpec, ...] = ()
    source: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.dims))}]"

    @classmethod
    def of(cls, dims: Sequence[DimValue], *, source: str = "") -> TensorSpec:
        """Returns the spec for what a user gives to `Cell.shard`: numbers of slices or axis names.

        Args:
            dims: one value per dim.
            source: where the user wrote it.

        Raises:
            StrategyError: a value is no dim, or an axis is used twice.

        >>> TensorSpec.of((2, 1)).dims[0].slices
        2
        """
        spec = cls(tuple(parse_dim(value) for value in dims), source)
        twice = spec.axis_used_twice()
        if twice is not None:
            raise StrategyError(
                f"axis `{twice}` is used twice on one tensor",
                where=[f"{spec}", *([source] if source else [])],
                hint="an axis splits at most one dim of a tensor",
            )
        return spec

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the tensor is split over, in the order of its dims."""
        return tuple(axis for dim in self.dims for axis in dim.axes)

    def axis_used_twice(self) -> str | None:
        """Returns the first axis that stands more than once, or None.

        >>> TensorSpec((DimSpec(("tp",)), DimSpec(("tp",)))).axis_used_twice()
        'tp'
        """
        axes = self.axes
        return next((axis for place, axis in enumerate(axes) if axis in axes[:place]), None)

    def padded(self, num_dims: int, *, what: str = "the tensor") -> TensorSpec:
        """Returns the spec with one entry for each dim: those left out are not split.

        Args:
            num_dims: how many dims the tensor has.
            what: what the tensor is called in the error.

        Raises:
            StrategyError: the spec has more dims than the tensor.

        >>> str(TensorSpec.of(("dp",)).padded(3))
        '[dp, _, _]'
        """
        if len(self.dims) > num_dims:
            raise StrategyError(
                f"{what} has {num_dims} dims, its strategy names {len(self.dims)}",
                where=[f"strategy  {self}", *([self.source] if self.source else [])],
                hint=f"give {num_dims} or fewer; dims left out at the end are not split",
            )
        missing = num_dims - len(self.dims)
        return TensorSpec(self.dims + (UNSPLIT,) * missing, self.source)


def parse_dim(value: DimValue) -> DimSpec:
    """Returns the spec of one dim.

    Args:
        value: an axis name (with `?` when open), several, a number of slices, `"_"` or None.

    Raises:
        StrategyError: the value is none of these.

    >>> parse_dim("tp?")
    DimSpec(axes=('tp',), slices=None, open=True)
    """
    if value is None:
        return UNSPLIT
    if isinstance(value, bool):
        raise StrategyError(f"`{value}` is no dim", hint=_GRAMMAR)
    if isinstance(value, int):
        return _of_slices(value)
    if isinstance(value, str):
        return _of_name(value)
    if isinstance(value, Sequence):
        return _of_names(value)
    raise StrategyError(f"`{value!r}` is no dim", hint=_GRAMMAR)


_GRAMMAR = "a dim is `_`, an axis `tp`, `tp?`, `?`, several axes `[dp, tp]`, or a number of slices"


def _of_slices(number: int) -> DimSpec:
    if number < 1:
        raise StrategyError(f"a dim cannot have {number} slices", hint="1 means not split")
    return UNSPLIT if number == 1 else DimSpec(slices=number)


def _of_name(word: str) -> DimSpec:
    if word == "_":
        return UNSPLIT
    name = word.removesuffix("?")
    if not name:
        if not word:
            _refuse(word)
        return DimSpec(open=True)
    check_axis_name(name)
    return DimSpec((name,), open=word.endswith("?"))


def _of_names(words: Sequence[str]) -> DimSpec:
    if not words:
        raise StrategyError(
            "a dim split over no axes", hint="write `_` for a dim that is not split"
        )
    if not all(isinstance(word, str) for word in words):
        raise StrategyError(f"`{list(words)}` is not a list of axes", hint=_GRAMMAR)
    parts = [_of_name(word) for word in words]
    for word, part in zip(words[:-1], parts, strict=False):
        if part.open:
            raise StrategyError(
                f"`{word}` stands before other axes", hint="only the last may be open"
            )
    if not all(part.axes for part in parts[:-1]) or not (parts[-1].axes or parts[-1].open):
        raise StrategyError("`_` stands among the axes of one dim", hint=_GRAMMAR)
    return DimSpec(tuple(axis for part in parts for axis in part.axes), open=parts[-1].open)


def check_axis_name(name: str) -> None:
    """Returns nothing when the word can name an axis.

    Raises:
        StrategyError: it cannot.
    """
    if name in RESERVED_NAMES:
        raise StrategyError(
            f"`{name}` cannot name an axis",
            hint="YAML reads it as something else; take another name, like `dp`",
        )
    if not AXIS_NAME.fullmatch(name):
        _refuse(name)


def _refuse(name: str) -> NoReturn:
    lower = re.sub(r"[^a-z0-9_]", "_", name.lower())
    hint = f"write `{lower}`" if AXIS_NAME.fullmatch(lower) and lower != name else _GRAMMAR
    raise StrategyError(f"`{name}` is not the name of an axis", hint=hint)
