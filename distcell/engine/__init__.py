"""From a call of a Cell to its program: the one way from what users touch to the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distcell.cell import Cell, inside_engine
from distcell.context import auto_parallel_context, launch
from distcell.engine.observe import observer
from distcell.engine.state import state_of
from distcell.engine.state_dict import local_state_dict as local_state_dict
from distcell.engine.step import compile_step as compile_step
from distcell.engine.whole import clip_grad_norm_ as clip_grad_norm_
from distcell.engine.whole import whole_tensor as whole_tensor
from distcell.engine.wrapped import check_untransformed
from distcell.lazy import materialize
from distcell.random import current_state, random_mode
from distcell.scope import track


def call(cell: Cell, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an outermost Cell returns: on one device, on this rank, or simulated.

    Args:
        cell: The Cell that is called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    options = launch()
    observer().called(cell)
    if options.mode == "eager" or auto_parallel_context().parallel_mode == "stand_alone":
        return call_on_one_device(cell, args, kwargs)
    check_untransformed()
    state = state_of(cell, options)
    if options.mode == "plan":  # an evaluation before training: what it returns is still needed
        state.plan_only(cell, args, kwargs)
        return call_on_one_device(cell, args, kwargs)
    return state.call(cell, args, kwargs)


def call_on_one_device(cell: Cell, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the Cell returns uncaptured, with the same random numbers as under any strategy."""
    materialize(*cell.parameters())
    counted = current_state().outermost_call(training=cell.training)
    with counted as key, inside_engine(), track(cell), random_mode(key):
        return cell.forward(*args, **kwargs)
