"""A strategy's patterns applied to the cells and parameters of one model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from distcell.errors import StrategyError, close_matches, combine
from distcell.strategy.glob import matches
from distcell.strategy.propose import propose, starred
from distcell.strategy.spec import TensorSpec
from distcell.strategy.strategy import CellRule, Strategy

if TYPE_CHECKING:  # at run time it would load torch, which a strategy file needs none of
    from distcell.graph import Graph

_MAX_SHOWN = 6


@dataclass(frozen=True)
class CellSpec:
    """What the strategy says of one cell's border.

    Args:
        inputs: one spec per input, None where it is left to propagation; None: nothing is said.
        outputs: the same for the outputs.
        inputs_source: where `inputs` was written.
        outputs_source: where `outputs` was written.

    >>> CellSpec().inputs is None
    True
    """

    inputs: tuple[TensorSpec | None, ...] | None = None
    outputs: tuple[TensorSpec | None, ...] | None = None
    inputs_source: str = ""
    outputs_source: str = ""


@dataclass(frozen=True)
class Resolution:
    """What a strategy says of one model.

    Args:
        params: by path of a parameter; those that no rule names are absent.
        cells: by path of a cell; those whose border no rule names are absent.
        unmatched: optional patterns that matched nothing.

    >>> Resolution().params
    {}
    """

    params: Mapping[str, TensorSpec] = field(default_factory=dict)
    cells: Mapping[str, CellSpec] = field(default_factory=dict)
    unmatched: tuple[str, ...] = ()


def resolve_cells(
    strategy: Strategy,
    cell_paths: Iterable[str],
    param_paths: Iterable[str],
    *,
    graph: Graph | None = None,
    tied: Iterable[Sequence[str]] = (),
) -> Resolution:
    r"""Returns what a strategy says of each parameter and cell: the last match wins field by field.

    Args:
        strategy: what the user asks for.
        cell_paths: the paths of all cells; the outermost one's is empty.
        param_paths: the paths of all parameters, every name of a tied one.
        graph: what the model does; with it, a strategy that knows no cell is told lines that fit.
        tied: groups of paths that are one parameter: what is said of one holds for all.

    Raises:
        StrategyError: a pattern or a parameter's name matches nothing, or tied parameters are
            given two layouts; all such mistakes are listed.

    >>> s = Strategy.from_text('distcell: 1\nmesh: {tp: 2}\ncells: {"**.up": {out: [[_, tp]]}}')
    >>> str(resolve_cells(s, ["", "mlp", "mlp.up"], ["mlp.up.weight"]).cells["mlp.up"].outputs[0])
    '[_, tp]'
    """
    model = _Model(tuple(dict.fromkeys(cell_paths)), tuple(dict.fromkeys(param_paths)), graph)
    params: dict[str, TensorSpec] = {}
    cells: dict[str, CellSpec] = {}
    errors: list[StrategyError] = []
    unmatched: list[str] = []
    for rule in strategy.cells:
        found = [path for path in model.cells if matches(rule.pattern, path)]
        if not found:
            unmatched.append(rule.pattern)
            if not rule.optional:
                errors.append(_matches_nothing(rule, model))
            continue
        for path in found:
            _apply_border(rule, path, cells)
        errors += _apply_params(rule, found, model, params)
    errors += _share_tied(params, tied)
    if strategy.cells and len(unmatched) == len(strategy.cells) and not errors:
        errors.append(_nothing_matched(strategy, model))
    if errors:
        raise combine(errors, f"{strategy.source or 'the strategy'} does not fit this model")
    return Resolution(params, cells, tuple(unmatched))


def resolve_inputs(strategy: Strategy, names: Iterable[str]) -> dict[str, TensorSpec]:
    r"""Returns how each named input is split; those that no pattern names are absent.

    Args:
        strategy: what the user asks for.
        names: the names of construct's arguments that are tensors.

    Raises:
        StrategyError: a pattern matches no input. (`*` may: it cannot be a typing error.)

    >>> s = Strategy.from_text('distcell: 1\nmesh: {dp: 2}\ninputs: {"*": [dp]}')
    >>> {name: str(spec) for name, spec in resolve_inputs(s, ["tokens"]).items()}
    {'tokens': '[dp]'}
    """
    known = list(names)
    errors = []
    for pattern, spec in strategy.inputs:
        if pattern not in ("*", "**") and not any(matches(pattern, name) for name in known):
            message = f"input pattern `{pattern}` matches no input of the outermost cell"
            where = [spec.source, f"inputs  {', '.join(known) or 'none'}"]
            errors.append(StrategyError(message, where=where, hint=_closest(pattern, known)))
    if errors:
        raise combine(errors, f"{strategy.source or 'the strategy'} does not fit this model")
    specs = ((name, strategy.input_spec(name)) for name in known)
    return {name: spec for name, spec in specs if spec is not None}


@dataclass(frozen=True)
class _Model:
    cells: tuple[str, ...]
    params: tuple[str, ...]
    graph: Graph | None

    def params_of(self, cell: str) -> dict[str, str]:
        """Returns by name relative to the cell the path of each parameter in it."""
        prefix = f"{cell}." if cell else ""
        return {path[len(prefix) :]: path for path in self.params if path.startswith(prefix)}


def _apply_border(rule: CellRule, path: str, cells: dict[str, CellSpec]) -> None:
    spec = cells.get(path, CellSpec())
    if rule.inputs is not None:
        spec = replace(spec, inputs=rule.inputs, inputs_source=rule.source)
    if rule.outputs is not None:
        spec = replace(spec, outputs=rule.outputs, outputs_source=rule.source)
    if spec != CellSpec():
        cells[path] = spec


def _apply_params(
    rule: CellRule, cells: Sequence[str], model: _Model, params: dict[str, TensorSpec]
) -> list[StrategyError]:
    inside = {cell: model.params_of(cell) for cell in cells}
    errors = []
    for name, spec in rule.params.items():
        found = [
            path for names in inside.values() for own, path in names.items() if matches(name, own)
        ]
        params.update(dict.fromkeys(found, spec))
        if not found:
            error = _no_such_param(rule, name, spec, inside)
            errors += [error] if error is not None else []
    return errors


def _no_such_param(
    rule: CellRule, name: str, spec: TensorSpec, inside: Mapping[str, Mapping[str, str]]
) -> StrategyError | None:
    cell, names = next(iter(inside.items()))
    others = [
        own for own in names if not any(matches(n, own) for n in rule.params) and "." not in own
    ]
    close = close_matches(name, others)
    if rule.optional and not close:
        return None  # a family's pattern names `bias`, this model has none
    message = f"{f'cell `{cell}`' if cell else 'the network'} has no parameter `{name}`"
    where = [spec.source, f"pattern     {rule.pattern}", f"parameters  {_some(names)}"]
    hint = f"did you mean `{close[0]}`?" if close else "remove the line, or add `optional: true`"
    return StrategyError(message, where=where, hint=hint)


def _share_tied(
    params: dict[str, TensorSpec], tied: Iterable[Sequence[str]]
) -> list[StrategyError]:
    errors = []
    for group in tied:
        given = [path for path in group if path in params]
        different = [path for path in given if params[path] != params[given[0]]]
        if different:
            one, two = given[0], different[0]
            where = [f"{path}  {params[path]}  {params[path].source}" for path in (one, two)]
            message = f"`{one}` and `{two}` are one parameter, the strategy gives it two layouts"
            errors.append(StrategyError(message, where=where, hint="give both the same"))
        elif given:
            params.update(dict.fromkeys(group, params[given[0]]))
    return errors


def _matches_nothing(rule: CellRule, model: _Model) -> StrategyError:
    where = [rule.source] if rule.source else []
    return StrategyError(
        f"pattern `{rule.pattern}` matches no cell",
        where=[*where, f"cells  {_some(_folded(model.cells))}"],
        hint=_closest(rule.pattern, model.cells) or "mark it `optional: true` if that is meant",
    )


def _closest(pattern: str, names: Sequence[str]) -> str | None:
    """Returns a hint with the names that look like the pattern, or like its last component."""
    close = close_matches(pattern.replace("*", ""), names, limit=3)
    if not close:
        tail = pattern.rpartition(".")[2]
        by_tail: dict[str, str] = {}
        for name in names:
            by_tail.setdefault(name.rpartition(".")[2], name)
        close = [by_tail[found] for found in close_matches(tail, by_tail, limit=3) if found]
    return f"did you mean {' or '.join(f'`{name}`' for name in close)}?" if close else None


def _nothing_matched(strategy: Strategy, model: _Model) -> StrategyError:
    """The error for a file of optional patterns of which none fits: it proposes lines that do."""
    name = strategy.source or "the strategy"
    message = f"no pattern of {name} matches a cell of this model"
    lines = []
    if model.graph is not None:
        lines = propose(model.graph, _free_axis(strategy), model.cells, model.params)
    if not lines:
        return StrategyError(
            message,
            where=[f"cells  {_some(_folded(model.cells))}"],
            hint="the model has no weight that could be split; take the strategy `data`",
        )
    return StrategyError(
        message,
        where=[
            "these cells have weights that could be split:",
            *(f"  {x.pattern or 'the network itself'}" for x in lines),
        ],
        hint="\n".join(
            [f"copy {name} and add, for instance:", "cells:", *(f"  {x}" for x in lines)]
        ),
    )


def _free_axis(strategy: Strategy) -> str:
    names = [name for name, _ in strategy.mesh or (("tp", -1),)]
    taken = {axis for _, spec in strategy.inputs for axis in spec.axes}
    return next((name for name in reversed(names) if name not in taken), names[-1])


def _folded(paths: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(starred(path) for path in paths if path))


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f", and {len(listed) - _MAX_SHOWN} more" if len(listed) > _MAX_SHOWN else ""
    return (", ".join(listed[:_MAX_SHOWN]) or "none") + more
