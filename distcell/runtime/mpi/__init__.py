"""The torch.distributed backend `mpi4py`: importing this module registers it.

Under `mpirun` no address and no store are needed::

    import distcell.runtime.mpi
    import torch.distributed as dist

    dist.init_process_group("mpi4py")

Importing this module initialises MPI.
"""

from __future__ import annotations

from distcell import compat
from distcell.errors import BackendError
from distcell.runtime.mpi_installation import INSTALL
from distcell.runtime.world import mpi_missing

_reason = mpi_missing()  # lets ranks that wait yield, before MPI starts
if _reason is not None:
    raise BackendError(
        "no MPI library found",
        where=[_reason],
        hint=INSTALL,
    )

from distcell.runtime.mpi import ranks as _ranks  # noqa: E402 (they initialise MPI)
from distcell.runtime.mpi.process_group import ProcessGroupMpi  # noqa: E402
from distcell.runtime.mpi.rank_group import NAME  # noqa: E402

__all__ = ["ProcessGroupMpi"]


def _create(group: compat.GroupRequest) -> ProcessGroupMpi:
    members = _ranks.members_of(group.ranks, group.rank, group.size)
    return ProcessGroupMpi(_ranks.ranks(), members, group.store, group.timeout)


compat.register_backend(NAME, _create)
compat.register_rendezvous("mpi", _ranks.rendezvous)
compat.replace_env_rendezvous(_ranks.env_or_mpi)
