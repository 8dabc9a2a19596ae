"""State dicts of networks whose parameters are split: whole values out, pieces in.

Note: live or not. What torch's `state_dict()` holds is live: to write into it is to write into the
network. Values that were gathered from pieces cannot be. So all that a network gives which the
engine has run, split or not, on real ranks or simulated, are copies as of the call; and as a copy
that is written into would be lost in silence, it refuses that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from distcell.cell import Cell
from distcell.compat import without_overrides
from distcell.engine.backend import cut
from distcell.engine.whole import backend_of, is_cut, value_of
from distcell.errors import LayoutError
from distcell.parameter import global_shape, layout
from distcell.piece import plain


class Copy(Tensor):
    """A value in a state dict: a tensor that cannot be written into; saved and copied it is plain.

    Example:
        >>> value = copy_of(torch.ones(2))
        >>> value * 2
        tensor([2., 2.])
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        written = args[0] if _writes(func) else (kwargs or {}).get("out")
        several = written if isinstance(written, (list, tuple)) else (written,)
        if any(type(item) is Copy for item in several):
            raise LayoutError(
                f"`{func.__name__}` writes into a copy: the network would stay as it is",
                where=["`state_dict()` of a network that is split holds whole values, not its own"],
                hint="write into the parameters under `torch.no_grad()`; or into a "
                "`copy.deepcopy` of the state dict, which `load_state_dict` takes",
            )
        with without_overrides():
            return func(*args, **(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(plain(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = plain(self).clone()
        found: Tensor = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)


_IN_PLACE = frozenset(
    """
    __setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__
    __ior__ __ixor__ __ilshift__ __irshift__
    """.split()
)
_HARMLESS = frozenset({"requires_grad_", "share_memory_"})


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__set__":
        return getattr(func.__self__, "__name__", "") == "data"
    in_place = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
    return in_place or name in _IN_PLACE


def copy_of(tensor: Tensor) -> Tensor:
    """A copy that says so when it is written into."""
    made = plain(tensor).clone()
    made.__class__ = Copy
    return made


def local_state_dict(cell: torch.nn.Module) -> dict[str, Tensor]:
    """The pieces that this rank holds of parameters and buffers, by path; nothing is exchanged.

    They are plain tensors, and live: to write into one is to write into the network. Where ranks
    are simulated parameters stay whole, and so are these.

    Args:
        cell: A network, or a part of one.

    Example:
        >>> list(local_state_dict(torch.nn.Linear(2, 1)))
        ['weight', 'bias']
    """
    named = (*cell.named_parameters(remove_duplicate=False), *cell.named_buffers())
    return {path: plain(tensor) for path, tensor in named}


def install_state_dict_hooks(cell: Cell) -> None:
    """Makes `state_dict()` give global values and `load_state_dict` take them.

    Each module does so for its own parameters, so that a part of the network can be saved alone.
    """
    for module in cell.modules():
        if _gather_state in module._state_dict_hooks.values():
            continue
        module.register_state_dict_post_hook(_gather_state)
        module.register_load_state_dict_pre_hook(_cut_state)


def _gather_state(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        path = prefix + name
        if tensor is None or path not in state:
            continue
        keeps_vars = state[path] is tensor
        if is_cut(tensor):
            if keeps_vars:
                raise LayoutError(
                    f"`state_dict(keep_vars=True)` of `{path}`, of which this rank holds a piece",
                    where=[f"global  {layout(tensor)}     here  {list(tensor.shape)}"],
                    hint="leave `keep_vars` out, or take `net.named_parameters()`",
                )
            whole = value_of(tensor)
            whole.__class__ = Copy
            state[path] = whole
        elif not keeps_vars:
            state[path] = copy_of(tensor)


def _cut_state(
    module: Any, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *rest: Any
) -> None:
    for path, parameter in module._parameters.items():
        given = state.get(prefix + path)
        backend = None if parameter is None else backend_of(parameter)
        if given is None or backend is None:
            continue
        where = [f"global  {layout(parameter)}     here  {list(parameter.shape)}"]
        if metadata.get("assign_to_params_buffers"):
            raise LayoutError(
                f"`load_state_dict(assign=True)` in place of `{prefix + path}`, which is split",
                where=where,
                hint="leave `assign` out: values are copied into the pieces",
            )
        if tuple(given.shape) == tuple(global_shape(parameter)):
            rank = backend.collectives.rank
            state[prefix + path] = cut(layout(parameter), plain(given), backend.mesh, rank)
        elif tuple(given.shape) != tuple(parameter.shape):
            raise LayoutError(
                f"the state has `{prefix + path}` as {list(given.shape)}",
                where=where,
                hint="load the global value, or this rank's piece",
            )
