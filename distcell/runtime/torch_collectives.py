"""The transport over torch.distributed: gloo in main memory, NCCL between CUDA devices.

The groups are made beside torch's own default group, which the script may use for itself.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

from distcell.compat import PrefixStore, Store, gloo_backend, nccl_backend
from distcell.runtime.gloo_pair import GlooPair
from distcell.runtime.groups import Members
from distcell.runtime.torch_group import TorchGroup

_TIMEOUT = timedelta(days=1)  # the launcher's watchdog speaks long before, and says more


class TorchGroups:
    """The groups of a job, each made once, by its members alone.

    Args:
        kind: `gloo` or `nccl`.
        store: The key-value store that all ranks of the job reach.
        rank: The world rank.
        one_host: Whether all ranks are on one host: gloo then stays on the loopback.
    """

    def __init__(
        self, kind: Literal["gloo", "nccl"], store: Store, rank: int, *, one_host: bool
    ) -> None:
        self._kind = kind
        self._store = store
        self._rank = rank
        self._one_host = one_host
        self._made: dict[Members, TorchGroup] = {}

    def group_of(self, members: Members) -> TorchGroup:
        """Returns the group of these world ranks, in this order."""
        found = self._made.get(members)
        if found is None:
            index = members.index(self._rank)
            name = f"{self._kind}/{'-'.join(map(str, members))}"
            store = PrefixStore(name, self._store)
            backend = self._backend(store, index, len(members))
            is_pair = self._kind == "gloo" and len(members) == 2
            kind = GlooPair if is_pair else TorchGroup
            found = self._made[members] = kind(backend, members, index)
        return found

    def _backend(self, store: Store, index: int, size: int) -> Any:
        if self._kind == "nccl":
            return nccl_backend(store, index, size, timeout=_TIMEOUT)
        return gloo_backend(store, index, size, timeout=_TIMEOUT, loopback=self._one_host)
