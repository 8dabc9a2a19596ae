"""How this process was started: the launcher says it before the script runs."""

from __future__ import annotations

import os
from dataclasses import dataclass

from distcell.errors import LaunchError, did_you_mean

MODES = ("eager", "ranks", "simulate", "plan", "check")
BACKENDS = ("auto", "gloo", "nccl", "mpi")


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


_launch = LaunchOptions()


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


def rank_of_process() -> tuple[int, int]:
    """Returns the number of this rank, and how many there are.

    A process that plays all ranks, or none, is rank 0.

    >>> rank_of_process()
    (0, 1)
    """
    options = launch()
    rank = int(os.environ["RANK"]) if options.mode == "ranks" else 0  # the launcher exports it
    return rank, options.ranks
