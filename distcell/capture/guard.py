"""What a captured call depends on besides the values of its tensors: the key of a cache.

A trace has no guards: it does again what the call did when it was traced. A call may use it when
its key is the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from distcell.capture.tree import Node, Slot, Spec, flatten
from distcell.capture.watch import SCALARS

_SCALARS = frozenset(SCALARS)
_OWN = frozenset(nn.Module().__dict__) - {"training"}
_CONTAINERS = (tuple, list, dict)
_FUNCTIONS = frozenset((FunctionType, BuiltinFunctionType, MethodType))


def call_key(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], extra: Hashable = None
) -> Hashable:
    """A value that differs whenever `capture_call` could give another graph.

    It holds shapes and dtypes of all tensors, the other arguments, `training` and those attributes
    of every submodule that are scalars or functions, what requires gradients, grad mode and
    autocast.

    Args:
        module: The module that is called.
        args: Positional arguments.
        kwargs: Keyword arguments.
        extra: What else the graph is for: mesh, strategy, seed.

    Example:
        >>> net = nn.Dropout(0.5)
        >>> first, x = call_key(net, (torch.ones(2),), {}), torch.zeros(2)
        >>> first == call_key(net, (x,), {}), first == call_key(net.eval(), (x,), {})
        (True, False)
    """
    spec, leaves = flatten((tuple(args), dict(kwargs)))
    tensors = tuple([_tensor_key(tensor) for tensor in leaves.values()])
    return (extra, modes_key(), module_key(module), _spec_key(spec), tensors)


def modes_key() -> Hashable:
    """The modes of torch that decide what a call does."""
    autocast = tuple(
        [
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            for device in ("cpu", "cuda")
        ]
    )
    return (torch.is_grad_enabled(), torch.get_default_dtype(), autocast)


def module_key(module: nn.Module) -> Hashable:
    """What the module and all its submodules would do, as far as attributes tell."""
    found: list[Any] = []
    waiting, seen = [module], {id(module)}
    while waiting:
        part = waiting.pop()
        found.append(type(part))
        for name, item in part.__dict__.items():
            if name not in _OWN:
                kind = type(item)
                if kind in _SCALARS:
                    found.append((name, kind, item))  # 1 == 1.0 == True, and they differ
                elif kind in _FUNCTIONS:
                    # an activation, say; weakly, for it may hold the module that keeps the key
                    found.append((name, ref(item)))
                elif kind in _CONTAINERS or isinstance(item, Tensor):
                    found.append((name, _attribute_key(item)))
        for name, parameter in part._parameters.items():
            if parameter is not None:  # which modules share one is told by its id
                found.append((name, id(parameter), *_tensor_key(parameter)))
        for name, buffer in part._buffers.items():
            if buffer is not None:
                found.append((name, *_tensor_key(buffer)))
        if part._forward_hooks or part._forward_pre_hooks:
            found.append((*part._forward_hooks, *part._forward_pre_hooks))
        for child in part._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return tuple(found)


def _attribute_key(item: Any) -> Hashable:
    """The key of an attribute: a tensor until it is written, lists and dicts by their scalars."""
    if isinstance(item, Tensor):
        return (id(item), item._version)
    parts = item.items() if isinstance(item, dict) else enumerate(item)
    return tuple(
        [
            (name, type(part), part if type(part) in _SCALARS else _attribute_key(part))
            for name, part in parts
            if type(part) in _SCALARS or type(part) in _CONTAINERS
        ]
    )


def _tensor_key(tensor: Tensor) -> tuple[Hashable, ...]:
    return (tensor.shape, tensor.dtype, tensor.requires_grad)


def _spec_key(spec: Spec) -> Hashable:
    """The structure of the arguments, with literals by type and value."""
    if isinstance(spec, Slot):
        return spec
    if isinstance(spec, Node):
        return (spec.kind, spec.keys, tuple([_spec_key(item) for item in spec.items]))
    return (type(spec), spec if _hashable(spec) else id(spec))


def _hashable(item: Any) -> bool:
    try:
        hash(item)
    except TypeError:
        return False
    return True
