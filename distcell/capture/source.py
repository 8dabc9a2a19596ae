"""Which of the user's lines runs, and which cell and line an error came from."""

from __future__ import annotations

import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from traceback import walk_tb
from types import FrameType

import torch
from torch import nn

from distcell.errors import CaptureError

_OWN = str(Path(__file__).parents[1]) + "/"
_STDLIB = sysconfig.get_path("stdlib") + "/"
_TORCH = str(Path(torch.__file__).parent) + "/"
_OPTIM = _TORCH + "optim/"
_CALLERS = tuple(str(Path(__file__).parent / name) for name in ("cell.py", "update.py"))
_LACKING = ("FakeTensor", "fake tensor", "data pointer", "tensor subclasses", "ProxyTensor")


def user_line() -> str:
    """The line that runs now in the innermost frame outside of torch and distcell.

    Frames outside of the captured call do not count: who captures is no part of the graph.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename not in _CALLERS:
        name = _shown(frame.f_code.co_filename)
        if name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@lru_cache(maxsize=4096)
def _shown(filename: str) -> str:
    """A file as it is printed, `""` for one that is not the user's."""
    if filename.startswith((_OWN, _TORCH, "<")):
        return ""
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in filename:
            return filename.split(folder, 1)[1]
    if filename.startswith(_STDLIB):
        return ""
    return filename.removeprefix(str(Path.cwd()) + "/")


def failed_at(error: BaseException, module: nn.Module) -> tuple[str, str]:
    """The innermost cell and the innermost line of the user that an error went through."""
    paths = {part: path for path, part in module.named_modules()}
    cell = source = ""
    for frame, line in walk_tb(error.__traceback__):
        running = frame.f_locals.get("self")
        if isinstance(running, nn.Module):
            cell = paths.get(running, cell)
        name = _shown(frame.f_code.co_filename)
        source = f"{name}:{line}" if name else source
    return cell, source


def averages_forever(error: BaseException, module: nn.Module) -> str:
    """The cell that an error came from, when it is a normalisation without a momentum.

    It divides by the value of its counter, for an average over all batches.
    """
    paths = {part: path for path, part in module.named_modules()}
    failed = None
    for frame, _ in walk_tb(error.__traceback__):
        running = frame.f_locals.get("self")
        failed = running if isinstance(running, nn.Module) else failed
    counts = failed is not None and getattr(failed, "num_batches_tracked", None) is not None
    if failed is None or not counts or getattr(failed, "momentum", 0.1) is not None:
        return ""
    return paths.get(failed) or type(failed).__name__


def optimizer_line(error: BaseException) -> str:
    """The innermost line of torch's optimizers or of the user that an error went through."""
    source = ""
    for frame, line in walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        name = "torch/" + file.removeprefix(_TORCH) if file.startswith(_OPTIM) else _shown(file)
        source = f"{name}:{line}" if name else source
    return source


def lacks_values(error: Exception) -> bool:
    """Whether an error comes from tensors that have no values while they are traced."""
    known = isinstance(error, CaptureError)
    return not known and any(words in str(error) for words in _LACKING)


def value_error(what: str, cell: str, source: str, caller: str = "") -> CaptureError:
    """The error for something that needs a tensor's value.

    Args:
        what: The op that does.
        cell: The path of the cell.
        source: The user's line.
        caller: The function of torch that the line called, if any.
    """
    called = f"{caller}, which calls {what}" if caller else what
    return CaptureError(
        f"{_who(cell)} needs the value of a tensor, which is not known before the step runs",
        where=[f"{source or 'unknown line'}  calls {called}"],
        hint=_way_out(what, caller),
    )


def _who(cell: str) -> str:
    return f"cell `{cell}`" if cell else "the network"


def _way_out(what: str, caller: str) -> str:
    """What to do instead of the functions that are met most."""
    name = caller.rpartition(".")[2]
    op = what.split(".")[1] if what.startswith("aten.") else ""
    if caller.startswith("torch.distributions."):
        return "the distribution checks its arguments: make it with `validate_args=False`"
    return _INSTEAD.get(name) or _INSTEAD.get(op) or _ANYTHING


_ANYTHING = (
    "the captured step must do the same for every input: use torch.where or a mask,\n"
    "or compute the number outside of the call and pass it as an argument"
)
_MASK = (
    "how many elements there are must not depend on values: `torch.where(mask, x, 0)` keeps the\n"
    "shape, and a mean is its sum divided by `mask.sum()`; or select outside of the call"
)
_OUTSIDE = "return what it takes from the network, and call it outside"
_INSTEAD = {
    "gaussian_nll_loss": "it checks that no variance is negative: write out its formula,\n"
    "`0.5 * (var.log() + (x - target) ** 2 / var).mean()`, or call it outside of the network",
    "bincount": "count by comparing: `(x.unsqueeze(-1) == torch.arange(length)).sum(0)`",
    "repeat_interleave": "give it `output_size`, or repeat outside of the call",
    **dict.fromkeys(["ctc_loss", "_ctc_loss", "unique", "_unique2", "unique_dim"], _OUTSIDE),
    **dict.fromkeys(["index", "masked_select", "nonzero", "index_put_", "index_put"], _MASK),
}
"""By the name of a function of torch, or of an op."""


def sparse_error(cell: str, source: str) -> CaptureError:
    """The error for an op that makes a sparse tensor, as embeddings do of their gradient."""
    return CaptureError(
        f"{_who(cell)} makes a sparse tensor, and a captured step has dense ones alone",
        where=[source or "unknown line"],
        hint="for an embedding: use `sparse=False`, and an optimizer for dense gradients",
    )


_PUBLIC = ("nn/functional.py", "nn/modules/", "distributions/", "functional.py", "_tensor.py")
_MODULE = _TORCH + "nn/modules/module.py"


def torch_caller() -> str:
    """The function of torch that the user's line called, where that is one in Python.

    Example:
        >>> torch_caller()
        ''
    """
    found = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename not in _CALLERS:
        file = frame.f_code.co_filename
        if _shown(file):
            break
        if file.startswith(_TORCH) and file != _MODULE:
            path = file.removeprefix(_TORCH)
            if path.startswith(_PUBLIC):
                module = path.removesuffix(".py").replace("/", ".")
                found = f"torch.{module}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return found.replace("torch.functional.", "torch.").replace("torch._tensor.", "torch.")
