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


def value_error(what: str, cell: str, source: str) -> CaptureError:
    """The error for something that needs a tensor's value."""
    name = f"cell `{cell}`" if cell else "the network"
    return CaptureError(
        f"{name} needs the value of a tensor, which is not known before the step runs",
        where=[f"{source or 'unknown line'}  calls {what}"],
        hint="the captured step must do the same for every input: use torch.where or a mask,\n"
        "or compute the number outside of the call and pass it as an argument",
    )
