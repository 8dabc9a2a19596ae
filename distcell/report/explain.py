"""Why a value has its layout: each axis with the way back to the annotation that it comes from."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from distcell.engine.planning import Planned
from distcell.errors import NotFoundError, did_you_mean
from distcell.sharding.plan import Plan, Reason


def explain(planned: Planned, path: str, *, tied: dict[str, str] | None = None) -> str:
    """The layout of a parameter, a buffer, an input, a value or what crosses a cell's border.

    Args:
        planned: The plan and its program.
        path: The path of a parameter, buffer, input or cell, or the name of a value.
        tied: For each further path of a parameter the one that it goes by.

    Raises:
        NotFoundError: There is nothing of that name.
    """
    plan = planned.plan
    tied = tied or {}
    found = list(_values(plan, tied.get(path, path)))
    if not found:
        known = [i.path for i in plan.graph.inputs] + [b.cell for b in plan.graph.borders]
        raise NotFoundError(
            f"there is no parameter, input or cell `{path}` in the plan",
            hint=did_you_mean(path, [name for name in (*known, *tied) if name]),
        )
    text = [f"mesh {plan.mesh}"]
    if path in tied:
        text.append(f"`{path}` is the same tensor as `{tied[path]}`")
    for what, name in dict.fromkeys(found):
        text += ["", f"{what}  {plan.describe(name)}", *_axes(plan, name), *_changes(planned, name)]
    return "\n".join(text)


def _values(plan: Plan, path: str) -> Iterator[tuple[str, str]]:
    """What the path may mean, as text, and the names of the values."""
    for item in plan.graph.inputs:
        if item.path == path and item.kind in ("param", "buffer", "input"):
            yield f"{item.kind} `{path}`", item.value
    if path in plan.graph.values and path not in {i.path for i in plan.graph.inputs}:
        yield f"value %{path}", path
    for border in plan.graph.borders:
        if border.cell == path:
            for word, names in (("input", border.inputs), ("output", border.outputs)):
                for index, name in enumerate(names):
                    if name not in plan.graph.values:
                        continue  # nothing uses it
                    yield f"{word} {index} of `{path}`", name
    if any(border.cell == path for border in plan.graph.borders):
        for item in plan.graph.inputs:
            if item.kind == "param" and item.path.rpartition(".")[0] == path:
                yield f"param `{item.path}`", item.value


def _axes(plan: Plan, name: str) -> Iterator[str]:
    if name not in plan.layouts:
        return
    layout = plan.layouts[name]
    for dim, parts in enumerate(layout.dims):
        for axis in (axis for part in parts for axis in part.axes):
            yield f"  dim {dim} is split over {axis}:"
            steps = list(plan.chain(name, axis))
            yield from (f"    {_step(plan, *step)}" for step in steps)
            if not steps:
                yield "    no reason is noted"
    whole = [axis for axis, size in plan.mesh.axes if axis not in layout.axes and size > 1]
    if whole:
        yield f"  every rank along {', '.join(whole)} holds the same: nothing splits it over them"


def _step(plan: Plan, name: str, reason: Reason) -> str:
    if reason.kind == "annotation":
        if reason.source == "fixed":
            return f"%{name}: as it was split for an earlier call of the network"
        return f"%{name}: annotated at {reason.source or 'a call of Cell.shard'}"
    value = f"%{reason.via}: {plan.describe(reason.via)}"
    if reason.source == "lives like":
        return f"%{name}: it {reason.source} {value}"
    return f"%{name}: along {reason.source}{_line(plan, name, reason)}, from {value}"


def _line(plan: Plan, name: str, reason: Reason) -> str:
    """The user's line of the op that a reason names."""
    graph = plan.graph
    for op in (graph.producers.get(name), graph.producers.get(reason.via)):
        joins = op is not None and {name, reason.via} <= {*op.inputs, *op.outputs}
        if op is not None and joins and op.source:
            return f" ({op.source})"
    for op in graph.users.get(name, ()):
        if reason.via in (*op.inputs, *op.outputs) and op.source:
            return f" ({op.source})"
    return ""


def _changes(planned: Planned, name: str) -> Iterator[str]:
    found = [one for one in planned.reshards if one.value.split("~")[0] == name]
    for one in found:
        kinds = ", ".join(one.kinds)
        yield f"  becomes {one.target} by {kinds} for {one.consumer} (it was {one.source})"


def tied_paths(net: torch.nn.Module) -> dict[str, str]:
    """For each further path of a network's parameter or buffer the path that it goes by."""
    first: dict[int, str] = {}
    tied = {}
    for found in (net.named_parameters, net.named_buffers):
        for path, tensor in found(remove_duplicate=False):
            if first.setdefault(id(tensor), path) != path:
                tied[path] = first[id(tensor)]
    return tied
