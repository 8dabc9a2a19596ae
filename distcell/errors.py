"""The one family of errors that distcell raises.

Every message says who (cell path, parameter, file:line:column, rank), what (sizes with axis names)
and what to do. An error renders as::

    error: dim 0 of `blocks.3.mlp.up.weight` cannot be split over axis tp
      |  f32[6@tp, 4]        6 is not a multiple of 4
      |  mesh  dp=2 tp=4     strategy  strategies/tensor.yaml:12:20
      = hint: dp=2 divides 6; or remove `uneven: false` (tensor.yaml:4)

Each class is also one of Python's own, so that `except ValueError` works for who does not know us.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self, TypeVar

_MAX_LISTED = 12

__all__ = [
    "BackendError",
    "BackwardError",
    "CaptureError",
    "CheckpointError",
    "DataError",
    "DistcellError",
    "InternalError",
    "LaunchError",
    "LayoutError",
    "MeshError",
    "NotFoundError",
    "OptimizerStateError",
    "PlanError",
    "RankMismatchError",
    "RuleError",
    "SettingError",
    "StallError",
    "StrategyError",
    "UserNameError",
    "UserTypeError",
    "UserValueError",
    "close_matches",
    "combine",
    "did_you_mean",
]


class DistcellError(Exception):
    """The base of all errors of distcell.

    Args:
        message: what is wrong, one line, lower case, names in backticks.
        where: lines of facts: sizes with axis names, file:line:column, an excerpt.
        hint: what to do, as an action.

    >>> print(DistcellError("no axis `tq`", where=["mesh  dp=2 tp=4"], hint="did you mean `tp`?"))
    no axis `tq`
      |  mesh  dp=2 tp=4
      = hint: did you mean `tp`?
    """

    exit_code: ClassVar[int] = 2
    """What a command exits with: 2 for the user's mistake, 1 for ours."""

    def __init__(self, message: str, *, where: Iterable[str] = (), hint: str | None = None) -> None:
        # A bare string is iterable too; taken apart into letters it would print as nonsense.
        lines = where.splitlines() if isinstance(where, str) else tuple(where)
        super().__init__(message)
        self.message = message
        self.where: tuple[str, ...] = tuple(lines)
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.message]
        lines += [f"  |  {line}".rstrip() for line in self.where]
        if self.hint:
            first, *rest = self.hint.splitlines()
            lines.append(f"  = hint: {first}")
            lines += [f"          {line}".rstrip() for line in rest]
        return "\n".join(lines)

    def render(self) -> str:
        """Returns the text that a command prints for this error.

        >>> DistcellError("no mesh").render()
        'error: no mesh'
        """
        return f"error: {self}"

    def with_context(self, *where: str, hint: str | None = None) -> Self:
        """Returns the same error with further lines of facts: for the public border to add once.

        Args:
            where: the lines to add after those that are there.
            hint: used when the error has no hint yet.

        >>> print(DistcellError("no mesh").with_context("train.py:3"))
        no mesh
          |  train.py:3
        """
        return type(self)(self.message, where=(*self.where, *where), hint=self.hint or hint)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # Exception's own pickling loses keyword-only arguments; errors travel between processes.
        return _rebuild, (type(self), self.message, self.where, self.hint)


def _rebuild(
    cls: type[DistcellError], message: str, where: tuple[str, ...], hint: str | None
) -> DistcellError:
    return cls(message, where=where, hint=hint)


class StrategyError(DistcellError, ValueError):
    """A strategy (file or tuples) is malformed, matches nothing, or does not fit the model."""


class LayoutError(DistcellError, ValueError):
    """A layout is malformed or does not fit the tensor or the mesh."""


class MeshError(DistcellError, ValueError):
    """A mesh is malformed, or its product is not the number of ranks."""


class CaptureError(DistcellError, RuntimeError):
    """The step cannot be captured: a branch on a tensor's value, an attribute that changes, ..."""


class RuleError(DistcellError, ValueError):
    """A sharding rule is malformed or does not hold for its op."""


class PlanError(DistcellError, ValueError):
    """A plan cannot be made: conflicting layouts, an op without a rule under `strict: true`, ..."""


class OptimizerStateError(DistcellError, RuntimeError):
    """An optimizer holds state, or a parameter holds a gradient, of the shape before sharding."""


class BackwardError(DistcellError, RuntimeError):
    """Backward through a parallel network cannot be done as asked."""


class DataError(DistcellError, ValueError):
    """The inputs are not what the strategy says: other data on each rank, another shape, ..."""


class RankMismatchError(DistcellError, RuntimeError):
    """Ranks do not agree on script, strategy, seed, program or initial weights."""


class StallError(DistcellError, RuntimeError):
    """A collective did not finish in time; the message names the ranks that are missing."""


class LaunchError(DistcellError, RuntimeError):
    """The ranks could not be started, or one of them failed."""


class BackendError(DistcellError, RuntimeError):
    """No backend for the collectives: no MPI library, no CUDA device, an unsupported dtype, ..."""


class CheckpointError(DistcellError, ValueError):
    """A checkpoint cannot be written, read, or fitted to this model."""


class UserTypeError(DistcellError, TypeError):
    """An argument has a type that is not accepted there."""


class UserValueError(DistcellError, ValueError):
    """An argument has a value that is not accepted there."""


class UserNameError(DistcellError, KeyError):
    """A name that is to be given is empty, has a dot in it, or is taken."""


class SettingError(DistcellError, RuntimeError):
    """A setting is made in a mode, an order or a number of times in which it has no meaning."""


class NotFoundError(DistcellError, KeyError):
    """A name (of a parameter, a cell, an op) is not known."""


class InternalError(DistcellError, RuntimeError):
    """A mistake of distcell's own: a verifier found a graph, plan or program to be wrong."""

    exit_code: ClassVar[int] = 1


def did_you_mean(word: str, choices: Iterable[str]) -> str | None:
    """Returns a hint for an unknown name: the closest choice, or else what there is to choose from.

    Args:
        word: what was written.
        choices: the names that would have been right.

    >>> did_you_mean("wieght", ["weight", "bias"])
    'did you mean `weight`?'
    >>> did_you_mean("x", ["weight", "bias"])
    'known: `weight`, `bias`'
    """
    names = list(dict.fromkeys(choices))
    if not names:
        return None
    close = close_matches(word, names)
    if close:
        return f"did you mean {' or '.join(f'`{name}`' for name in close)}?"
    listed = ", ".join(f"`{name}`" for name in names[:_MAX_LISTED])
    more = len(names) - _MAX_LISTED
    return f"known: {listed}" + (f" and {more} more" if more > 0 else "")


def close_matches(word: str, choices: Iterable[str], *, limit: int = 1) -> list[str]:
    """Returns at most `limit` choices that look like the word, the closest first.

    >>> close_matches("Tensr", ["data", "tensor"])
    ['tensor']
    """
    by_lower: dict[str, str] = {}
    for choice in choices:
        by_lower.setdefault(choice.lower(), choice)
    lower, names = word.lower(), list(by_lower)
    found = difflib.get_close_matches(lower, names, n=limit, cutoff=0.6)
    if not found and len(lower) <= 3:
        # One wrong letter of two is far away by ratio; it still counts when one name alone fits.
        near = difflib.get_close_matches(lower, names, n=2, cutoff=0.5)
        found = near if len(near) == 1 else []
    return [by_lower[name] for name in found]


_E = TypeVar("_E", bound=DistcellError)


def combine(errors: Sequence[_E], message: str) -> _E:
    """Returns one error that lists all the given ones: checks collect, the border raises once.

    Args:
        errors: at least one. A single error comes back as it is.
        message: the first line when there are several.

    >>> one, two = DistcellError("no key `a`", hint="add it"), DistcellError("no key `b`")
    >>> print(combine([one, two], "2 errors in s.yaml"))
    2 errors in s.yaml
      |  no key `a`
      |    = hint: add it
      |
      |  no key `b`
    """
    if len(errors) == 1:
        return errors[0]
    lines: list[str] = []
    for number, error in enumerate(errors):
        if number:
            lines.append("")
        lines.append(error.message)
        lines += [f"  {line}" for line in error.where]
        if error.hint:
            lines += [f"  = hint: {error.hint.splitlines()[0]}"]
            lines += [f"          {line}" for line in error.hint.splitlines()[1:]]
    return type(errors[0])(message, where=lines)
