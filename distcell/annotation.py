"""What a user says in code of how a cell is split: `Cell.shard`, checked and kept as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distcell.errors import NotFoundError, StrategyError, UserTypeError, did_you_mean
from distcell.strategy.spec import DimValue, TensorSpec
from distcell.strategy.strategy import CellRule

TensorStrategy = tuple[DimValue, ...]
"""How one tensor is split: a number of slices, an axis, axes or None for each dim."""

_DIM = "a dim is a number of slices, an axis 'tp', axes ('dp', 'tp'), or None"
_PLAN = "like parameter_plan={'weight': (2, 1)}"


@dataclass(frozen=True)
class Sharding:
    """What `Cell.shard` was told.

    Args:
        inputs: one spec per tensor that enters; None leaves that one to propagation.
        outputs: the same for what leaves; None: nothing was said.
        params: by name of a parameter, relative to the cell.
        source: file and line of the call. Not part of equality.

    >>> str(Sharding((TensorSpec.of((2, 1)),)).inputs[0])
    '[2, _]'
    """

    inputs: tuple[TensorSpec | None, ...]
    outputs: tuple[TensorSpec | None, ...] | None = None
    params: Mapping[str, TensorSpec] = field(default_factory=dict, hash=False)
    source: str = field(default="", compare=False)

    def rule(self, path: str) -> CellRule:
        """Returns the same as a rule of a strategy.

        Args:
            path: the cell's path.

        >>> Sharding((None,)).rule("mlp.up").pattern
        'mlp.up'
        """
        return CellRule(path, self.params, self.inputs, self.outputs, source=self.source)


def tensor_specs(value: object, what: str, source: str) -> tuple[TensorSpec | None, ...]:
    """Returns the specs of several tensors, checked.

    Args:
        value: what the user gave: a tuple with a tuple or None for each tensor.
        what: the argument's name.
        source: where the user gave it.

    Raises:
        UserTypeError: something in it has another type.
        StrategyError: an entry is no dim, or an axis is used twice.

    >>> [str(spec) for spec in tensor_specs(((2, 1), None), "in_strategy", "")]
    ['[2, _]', 'None']
    """
    example = f"like {what}=((2, 1),) or {what}=(('dp', None),): one tuple per tensor"
    if not isinstance(value, tuple):
        raise UserTypeError(
            f"`{what}` is a {type(value).__name__}; it takes a tuple of tuples",
            where=[f"{what} = {value!r}", source],
            hint=example,
        )
    return tuple(
        None if entry is None else _tensor_spec(entry, f"{what}[{place}]", source, hint=example)
        for place, entry in enumerate(value)
    )


def param_specs(
    plan: object, shapes: Mapping[str, Sequence[int]], source: str
) -> dict[str, TensorSpec]:
    """Returns the specs of a cell's parameters, checked.

    Args:
        plan: what the user gave: a dict from names (`self.` may stand before) to tuples.
        shapes: the global shapes of the cell's parameters.
        source: where the user gave it.

    Raises:
        UserTypeError: something in it has another type.
        StrategyError: an entry is no dim, an axis is used twice, or the number of dims is another.
        NotFoundError: a name is not that of a parameter.

    >>> str(param_specs({"self.weight": (2, 1)}, {"weight": (4, 4)}, "")["weight"])
    '[2, _]'
    """
    if not isinstance(plan, Mapping):
        message = f"`parameter_plan` is a {type(plan).__name__}; it takes a dict"
        raise UserTypeError(message, where=[source], hint=_PLAN)
    specs = {}
    for key, entry in plan.items():
        if not isinstance(key, str):
            message = f"`parameter_plan` has the key {key!r}, which is no name"
            raise UserTypeError(message, where=[source], hint=_PLAN)
        name = key.removeprefix("self.")
        if name not in shapes:
            hint = did_you_mean(name, shapes) or "the cell has no parameters"
            message = f"`parameter_plan` names `{name}`, which is no parameter of the cell"
            raise NotFoundError(message, where=[source], hint=hint)
        what = f"parameter_plan['{key}']"
        specs[name] = _tensor_spec(entry, what, source, hint=_PLAN)
        _check_num_dims(specs[name], shapes[name], what)
    return specs


def _tensor_spec(entry: object, what: str, source: str, *, hint: str) -> TensorSpec:
    where = [f"{what} = {entry!r}", source]
    if not isinstance(entry, tuple):
        message = f"`{what}` is a {type(entry).__name__}, not a tuple"
        raise UserTypeError(message, where=where, hint=hint)
    for dim, value in enumerate(entry):
        if not _is_dim_value(value):
            raise UserTypeError(f"dim {dim} of `{what}` is {value!r}", where=where, hint=_DIM)
    try:
        return TensorSpec.of(entry, source=source)
    except StrategyError as error:
        raise error.with_context(*(line for line in where if line not in error.where)) from None


def _is_dim_value(value: object) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(name, str) for name in value)
    return value is None or (isinstance(value, int | str) and not isinstance(value, bool))


def _check_num_dims(spec: TensorSpec, shape: Sequence[int], what: str) -> None:
    if len(spec.dims) != len(shape):
        raise StrategyError(
            f"`{what}` names {len(spec.dims)} dims, the parameter has {len(shape)}",
            where=[f"shape  {list(shape)}     strategy  {spec}", spec.source],
            hint=f"give {len(shape)} entries, None or 1 for a dim that is not split",
        )
