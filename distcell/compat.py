"""All use of torch's private interface, in one place.

Each function says which part of torch it needs; `python -m distcell doctor` and the tests call
`self_test` to find out whether the installed torch still has it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.nn.modules import module as modules
from torch.optim.optimizer import _foreach_supported_types
from torch.utils.hooks import RemovableHandle

__all__ = [
    "PrefixStore",
    "Store",
    "TCPStore",
    "allow_foreach",
    "gloo_backend",
    "has_hooks",
    "nccl_backend",
    "remove_global_hook",
]


def gloo_backend(store: Store, index: int, size: int, *, timeout: timedelta, loopback: bool) -> Any:
    """Returns a gloo backend that is no part of torch's default group.

    Needs `ProcessGroupGloo._Options` and its `_devices`.

    Args:
        store: A store that the members of this group alone use.
        index: The place of this rank among the members.
        size: The number of members.
        timeout: How long a collective may take.
        loopback: Whether all members are on this host.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    device = dist.ProcessGroupGloo.create_device
    options._devices = [
        device(hostname="127.0.0.1") if loopback else dist.ProcessGroupGloo.create_default_device()
    ]
    return dist.ProcessGroupGloo(store, index, size, options)


def nccl_backend(store: Store, index: int, size: int, *, timeout: timedelta) -> Any:
    """Returns an NCCL backend that is no part of torch's default group.

    Needs `ProcessGroupNCCL.Options` and its `_timeout`.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, index, size, options)


def remove_global_hook(handle: RemovableHandle) -> None:
    """Removes a hook on the calls of all modules, with all that torch keeps of it.

    Needs `torch.nn.modules.module._global_forward_hooks_with_kwargs`: `handle.remove` forgets it.
    """
    handle.remove()
    modules._global_forward_hooks_with_kwargs.pop(handle.id, None)


def has_hooks(module: torch.nn.Module) -> bool:
    """Returns whether calling the module runs hooks around its forward, its own or global ones.

    Needs the dicts of hooks of `torch.nn.Module` and of `torch.nn.modules.module`.

    Args:
        module: Its children's hooks do not count.
    """
    own = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
    shared = torch.nn.modules.module
    return any(getattr(module, name) for name in own) or any(
        getattr(shared, f"_global{name}") for name in own
    )


def allow_foreach(kind: type[torch.nn.Parameter]) -> None:
    """Lets torch's optimizers use their fused loops for a subclass of Parameter.

    Needs `torch.optim.optimizer._foreach_supported_types`, which is compared with `type(p) in`.

    Args:
        kind: A subclass that adds no behaviour to arithmetic.
    """
    if kind not in _foreach_supported_types:
        _foreach_supported_types.append(kind)
