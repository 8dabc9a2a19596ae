"""What tests of torch.distributed's backend `mpi4py` share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def mpi4py_backend() -> Iterator[None]:
    """The default process group over MPI, for one module."""
    from torch import distributed as dist

    import distcell.runtime.mpi  # noqa: F401 (registers the backend)

    dist.init_process_group("mpi4py")
    yield
    dist.destroy_process_group()
