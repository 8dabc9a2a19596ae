"""What must not be around a parallel network, or on it: other ways to split or to transform it."""

from __future__ import annotations

from distcell import compat
from distcell.cell import Cell
from distcell.errors import CaptureError, UserTypeError


def check_unwrapped(cell: Cell) -> None:
    """Checks that nothing else splits, wraps or compiles the network: for a call that is new.

    Raises:
        UserTypeError: Something does.
    """
    if compat.inside_ddp():
        raise UserTypeError(
            "a parallel network is called by DistributedDataParallel",
            where=["it would reduce gradients that are reduced already, and pieces that differ"],
            hint="leave DistributedDataParallel out, and call the network itself",
        )
    split = [path for path, part in cell.named_modules() if compat.is_split_by_torch(part)]
    if split:
        raise UserTypeError(
            f"{_name(split[0])} is split by torch already",
            hint="leave `fully_shard` and `parallelize_module` out: the strategy is what splits",
        )
    compiled = [path for path, part in cell.named_modules() if compat.is_compiled(part)]
    if compiled:
        raise UserTypeError(
            f"{_name(compiled[0])} is compiled by torch, which cannot be captured",
            hint="leave `torch.compile` out: a captured step runs as code of its own",
        )


def _name(path: str) -> str:
    return f"cell `{path}`" if path else "the network"


def check_untransformed() -> None:
    """Checks that no transform of `torch.func` goes on around the call.

    Raises:
        CaptureError: One does.
    """
    if compat.inside_transform():
        raise CaptureError(
            "a parallel network is called inside of a transform of `torch.func`",
            where=["vmap, grad, jvp and the like see one tensor, the network runs on many ranks"],
            hint="call the transform inside of the network's `construct` or `forward`",
        )
