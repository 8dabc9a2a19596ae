"""Runs the user's script in this process, as often as a command needs, from the same start."""

from __future__ import annotations

import io
import os
import random
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

import distcell.random
from distcell.context import LaunchOptions, launch, reset_auto_parallel_context, set_launch
from distcell.engine.observe import Observer, Stop, observing
from distcell.errors import DistcellError, LaunchError, did_you_mean

_ENVIRONMENT = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
"""What a launcher would tell a single rank."""


class ScriptError(Exception):
    """The script failed by itself.

    Args:
        text: Its traceback, without our own frames; empty when it left by `sys.exit`.
        exit_code: What the command exits with.
    """

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.text, self.exit_code = text, exit_code


@dataclass(frozen=True)
class Script:
    """A script and how it is run.

    Args:
        path: Its path.
        arguments: Its own arguments.
        seed: What torch, random and numpy are seeded with before it.
        verbose: Whether what it prints is shown.

    Raises:
        LaunchError: There is no such file.
    """

    path: str
    arguments: tuple[str, ...] = ()
    seed: int = 0
    verbose: bool = False

    def __post_init__(self) -> None:
        if not Path(self.path).is_file():
            near = [str(found) for found in sorted(Path(self.path).parent.glob("*.py"))]
            hint = did_you_mean(self.path, near) or "give the path of a Python file"
            raise LaunchError(f"there is no script `{self.path}`", hint=hint)

    def run(self, options: LaunchOptions, observer: Observer) -> None:
        """Runs the script until it ends or the observer stops it.

        Args:
            options: How the engine takes the calls of Cells.
            observer: Who looks on.

        Raises:
            ScriptError: The script raised an error of its own, or left with an exit code.
            DistcellError: It raised one of ours.
        """
        path = str(Path(self.path).resolve())
        with self._fresh_start(path), observing(observer), self._quiet():
            before = launch()
            set_launch(options)
            try:
                runpy.run_path(path, run_name="__main__")
            except (Stop, DistcellError) as error:
                if not isinstance(error, Stop):
                    raise
            except SystemExit as exit_:
                if exit_.code not in (None, 0):
                    text = "" if isinstance(exit_.code, int) else str(exit_.code)
                    code = exit_.code if isinstance(exit_.code, int) else 1
                    raise ScriptError(text, code) from exit_
            except Exception as error:
                found = error.with_traceback(_from(path, error))
                raise ScriptError("".join(traceback.format_exception(found)).rstrip(), 1) from error
            finally:
                set_launch(before)

    def _quiet(self) -> AbstractContextManager[object]:
        return nullcontext() if self.verbose else redirect_stdout(_Nowhere())

    @contextmanager
    def _fresh_start(self, path: str) -> Iterator[None]:
        """A context in which the process looks to the script as if it had just begun."""
        argv, modules, folders = sys.argv, set(sys.modules), list(sys.path)
        environment, default = dict(os.environ), torch.get_default_dtype()
        sys.argv = [self.path, *self.arguments]
        sys.path.insert(0, str(Path(path).parent))
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        reset_auto_parallel_context()
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed)
        distcell.random.seed(None)
        try:
            yield
        finally:
            torch.set_default_dtype(default)
            torch.set_grad_enabled(True)
            os.environ.clear()
            os.environ.update(environment)
            sys.argv, sys.path[:] = argv, folders
            _forget(set(sys.modules) - modules, Path(path).parent)


class _Nowhere(io.StringIO):
    """Takes text and keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)


def _forget(names: set[str], folder: Path) -> None:
    """Removes the script's own modules, which a second run must import anew: they hold state."""
    for name in names:
        file = getattr(sys.modules[name], "__file__", None)
        if file is None:
            continue
        path = Path(file).resolve()
        if path.is_relative_to(folder) and "site-packages" not in path.parts:
            del sys.modules[name]


def _from(path: str, error: BaseException) -> TracebackType | None:
    """The traceback from the script's own first frame on."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename != path:
        found = found.tb_next
    return found or error.__traceback__
