"""How this process was started, and the settings that MindSpore calls the auto-parallel context.

Both are process-wide. The launcher sets the first before the script runs; the script may set the
second. The engine reads them, nothing else does.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import get_args, get_type_hints

from distcell.errors import LaunchError, StrategyError, UserTypeError, did_you_mean

MODES = ("eager", "ranks", "simulate", "plan", "check")
BACKENDS = ("auto", "gloo", "nccl", "mpi")
PARALLEL_MODES = ("stand_alone", "data_parallel", "semi_auto_parallel")


@dataclass(frozen=True)
class LaunchOptions:
    """How the job was started.

    Args:
        mode: `eager`: one device, as the script stands. `ranks`: this process is one of several.
            `simulate`: this process plays all ranks. `plan`: nothing runs after the plan is made.
            `check`: as `simulate`, compared with one device.
        ranks: how many ranks there are, real or simulated.
        strategy: name or path of the strategy file; the `data` strategy when left out.
        backend: what carries the collectives: `auto`, `gloo`, `nccl` or `mpi`.
        seed: what all ranks are seeded with before the script runs.
        stall_after: the seconds after which a collective that does not finish is an error.

    Raises:
        LaunchError: a mode or backend is not known, or a number is out of range.

    >>> LaunchOptions(mode="simulate", ranks=8).ranks
    8
    """

    mode: str = "eager"
    ranks: int = 1
    strategy: str | None = None
    backend: str = "auto"
    seed: int = 0
    stall_after: float = 300.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise LaunchError(f"no mode `{self.mode}`", hint=did_you_mean(self.mode, MODES))
        if self.backend not in BACKENDS:
            raise LaunchError(
                f"no backend `{self.backend}`", hint=did_you_mean(self.backend, BACKENDS)
            )
        if self.ranks < 1:
            raise LaunchError(f"{self.ranks} ranks cannot run", hint="a job has at least 1 rank")
        if self.stall_after <= 0:
            raise LaunchError(f"a stall cannot be seen after {self.stall_after} seconds")


@dataclass(frozen=True)
class AutoParallelContext:
    """The settings of `set_auto_parallel_context`.

    Args:
        parallel_mode: `semi_auto_parallel`: the strategy file and the cells' own `shard` calls
            decide. `data_parallel`: the `data` strategy, whatever the launcher says.
            `stand_alone`: every rank runs the whole model, uncaptured.
        gradients_mean: True: gradients are those of one device. False multiplies them by the number
            of replicas, as MindSpore's sum does.
        strategy: name or path of the strategy file; the launcher's `--strategy` when left out.
        full_batch: True: every rank passes the same global batch. False: each passes its part.
    """

    parallel_mode: str = "semi_auto_parallel"
    gradients_mean: bool = True
    strategy: str | None = None
    full_batch: bool = True


_MINDSPORE_KEYS = {
    "device_num": "the number of ranks is the launcher's: `-n 8`",
    "global_rank": "the launcher gives every rank its number",
    "search_mode": "name a strategy instead: `strategy=`",
    "dataset_strategy": "use `full_batch=True` or `full_batch=False`, or `inputs:` of a strategy",
    "parameter_broadcast": "leave it out: ranks start with equal parameters, which is checked",
    "strategy_ckpt_load_file": "use `strategy=` with the path of a strategy file",
    "strategy_ckpt_config": "use `strategy=` with the path of a strategy file",
    "loss_repeated_mean": "leave it out: gradients are those of one device",
}

_launch = LaunchOptions()
_context = AutoParallelContext()


def set_launch(options: LaunchOptions) -> None:
    """Stores how the job was started: for launchers and tests.

    >>> set_launch(LaunchOptions())
    """
    global _launch  # noqa: PLW0603 (one process is started once; every part of it may ask how)
    _launch = options


def launch() -> LaunchOptions:
    """Returns how the job was started; one device as the script stands when nobody said.

    >>> launch().mode
    'eager'
    """
    return _launch


def set_auto_parallel_context(**settings: object) -> None:
    """Changes settings of the auto-parallel context; the others stay as they are.

    Args:
        settings: fields of `AutoParallelContext`: `parallel_mode`, `gradients_mean`, `strategy`,
            `full_batch`.

    Raises:
        StrategyError: a key or a value is not known. Nothing is changed then.
        UserTypeError: a value has the wrong type. Nothing is changed then.

    >>> set_auto_parallel_context(parallel_mode="data_parallel")
    >>> get_auto_parallel_context("parallel_mode")
    'data_parallel'
    >>> reset_auto_parallel_context()
    """
    global _context  # noqa: PLW0603 (process-wide, as in MindSpore)
    known = get_type_hints(AutoParallelContext)
    for key, value in settings.items():
        _check_key(key)
        expected = get_args(known[key]) or (known[key],)
        if type(value) not in expected:
            names = " or ".join("None" if t is type(None) else t.__name__ for t in expected)
            raise UserTypeError(f"`{key}` is {value!r}, a {type(value).__name__}; it takes {names}")
    mode = settings.get("parallel_mode")
    if isinstance(mode, str) and mode not in PARALLEL_MODES:
        raise StrategyError(f"no parallel mode `{mode}`", hint=did_you_mean(mode, PARALLEL_MODES))
    _context = replace(_context, **settings)  # type: ignore[arg-type]  # checked just above


def get_auto_parallel_context(key: str) -> object:
    """Returns one setting of the auto-parallel context.

    Args:
        key: a field of `AutoParallelContext`.

    Raises:
        StrategyError: the key is not known.

    >>> get_auto_parallel_context("gradients_mean")
    True
    """
    _check_key(key)
    value: object = getattr(_context, key)
    return value


def auto_parallel_context() -> AutoParallelContext:
    """Returns all settings at once.

    >>> auto_parallel_context().full_batch
    True
    """
    return _context


def reset_auto_parallel_context() -> None:
    """Gives every setting its default again.

    >>> reset_auto_parallel_context()
    """
    global _context  # noqa: PLW0603 (process-wide, as in MindSpore)
    _context = AutoParallelContext()


def _check_key(key: str) -> None:
    known = [field.name for field in fields(AutoParallelContext)]
    if key not in known:
        hint = _MINDSPORE_KEYS.get(key) or did_you_mean(key, known)
        raise StrategyError(f"the auto-parallel context has no key `{key}`", hint=hint)
