"""Which rank this process is, from what its launcher left in the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distcell.errors import LaunchError


@dataclass(frozen=True)
class RankEnvironment:
    """What a launcher says about this process.

    Args:
        launcher: `Open MPI`, `MPICH` (Intel MPI and MVAPICH too), `Slurm`, or `torchrun` for
            anything that sets RANK and WORLD_SIZE.
        rank: The number of this process.
        size: How many there are.
        local_rank: Its number on this host, where the launcher says it.
        local_size: How many are on this host, where the launcher says it.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None

    @property
    def by_mpi(self) -> bool:
        """Whether the launcher starts MPI processes."""
        return self.launcher != "torchrun"


@dataclass(frozen=True)
class _Names:
    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str


_OPEN_MPI = _Names(
    "Open MPI",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_MPICH = _Names("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_TORCHRUN = _Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# SLURM_NTASKS stands in batch scripts too, where there is one process: only a step is a rank.
_SLURM = _Names("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")


def find_ranks(environ: Mapping[str, str]) -> RankEnvironment | None:
    """Returns what the launcher says, or None when there is none.

    torchrun wins where it runs inside a Slurm or MPI job: it was started last.

    Args:
        environ: The environment of the process.

    Raises:
        LaunchError: A variable is not a number, or the rank is not below the size.

    Example:
        >>> find_ranks({"PMI_RANK": "1", "PMI_SIZE": "4"})
        RankEnvironment(launcher='MPICH', rank=1, size=4, local_rank=None, local_size=None)
        >>> find_ranks({}) is None
        True
    """
    order = [_OPEN_MPI, _MPICH, _TORCHRUN, _SLURM]
    if "TORCHELASTIC_RUN_ID" in environ or "TORCHELASTIC_USE_AGENT_STORE" in environ:
        order = [_TORCHRUN, *order]
    for names in order:
        if names.rank in environ and names.size in environ:
            return _read(environ, names)
    return None


def _read(environ: Mapping[str, str], names: _Names) -> RankEnvironment:
    found = RankEnvironment(
        names.launcher,
        _number(environ, names.rank) or 0,
        _number(environ, names.size) or 0,
        _number(environ, names.local_rank),
        _number(environ, names.local_size),
    )
    if not 0 <= found.rank < found.size:
        raise LaunchError(
            f"{names.rank}={found.rank} is not below {names.size}={found.size}",
            hint="unset both, or let one launcher set them",
        )
    return found


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not text.isdigit():
        raise LaunchError(
            f"{name}={text!r} in the environment is not a number",
            hint=f"unset {name}, or let the launcher set it",
        )
    return int(text)
