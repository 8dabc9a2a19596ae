"""What a captured call depends on besides the values of its tensors: the key of a cache.

A trace has no guards: it does again what the call did when it was traced. A call may use it when
its key is the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distcell.capture.arguments import call_spec_key
from distcell.capture.facts import FUNCTIONS, SCALARS, Facts, own_numbers
from distcell.capture.names import MAX_ITEMS, names_key
from distcell.capture.tree import flatten

_SCALARS = frozenset(SCALARS) - {float}
_FUNCTIONS = frozenset(FUNCTIONS)
OWN_FIELDS = frozenset(nn.Module().__dict__) - {"training"}
"""What torch itself keeps in every module, and is read apart."""


def call_key(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    extra: Hashable = None,
    *,
    own_hooks: bool = False,
    functions: Sequence[Any] = (),
) -> Hashable:
    """A value that differs whenever `capture_call` could give another graph.

    It holds shapes and dtypes of all tensors, the other arguments, `training` and the attributes
    of every submodule (numbers, containers, functions, configurations to a depth of three
    objects), what code of the user's reads by name (globals, closure variables: see `names_read`),
    what requires gradients, grad mode and autocast.

    Args:
        module: The module that is called.
        args: Positional arguments.
        kwargs: Keyword arguments.
        extra: What else the graph is for: mesh, strategy, seed.
        own_hooks: Whether the module's own forward hooks are captured too, and not run around it.
        functions: What else is called: a loss.

    Raises:
        CaptureError: An argument is an object that is no tensor, value or container of these.

    Example:
        >>> net = nn.Dropout(0.5)
        >>> first, x = call_key(net, (torch.ones(2),), {}), torch.zeros(2)
        >>> first == call_key(net, (x,), {}), first == call_key(net.eval(), (x,), {})
        (True, False)
    """
    spec, leaves = flatten((tuple(args), dict(kwargs)))
    # whether a tensor is contiguous decides what is right for code that reads its strides
    tensors = tuple([(*_tensor_key(t), t.is_contiguous()) for t in leaves.values()])
    arguments = call_spec_key(module, args, kwargs, spec)
    own = module_key(module, own_hooks=own_hooks, functions=functions)
    return (extra, modes_key(), own, arguments, tensors)


def modes_key() -> Hashable:
    """The modes of torch that decide what a call does."""
    autocast = tuple(
        [
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            for device in ("cpu", "cuda")
        ]
    )
    return (torch.is_grad_enabled(), torch.get_default_dtype(), autocast)


def module_key(
    module: nn.Module, *, own_hooks: bool = False, functions: Sequence[Any] = ()
) -> Hashable:
    """What the module, its submodules and functions would do, as far as Python's values tell."""
    found: list[Any] = []
    called = list(functions)
    parts = _parts(module)
    own = own_numbers(parts)
    facts = Facts(own)
    found += [facts.of(function) for function in functions]
    for part in parts:
        found.append(type(part))
        for name, item in part.__dict__.items():
            if name not in OWN_FIELDS:
                kind = type(item)
                # 1 == 1.0 == True, and they differ
                if kind in _SCALARS:
                    found.append((name, kind, item))
                    continue
                found.append((name, facts.of(item)))
                if kind in _FUNCTIONS:
                    called.append(item)
        for name, parameter in part._parameters.items():
            if parameter is not None:  # which modules share one is told by its id
                found.append((name, id(parameter), *_tensor_key(parameter)))
        for name, buffer in part._buffers.items():
            if buffer is not None:
                found.append((name, *_tensor_key(buffer)))
        if part._modules:
            found.append(tuple([(name, own.get(id(m))) for name, m in part._modules.items()]))
        if _has_hooks(part) and (part is not module or own_hooks):
            hooks = hooks_of(part)
            found += [(*key, facts.of(hook)) for key, hook in hooks]
            called += [hook for _, hook in hooks]
    found.append(names_key(parts, called, Facts(own, most=MAX_ITEMS)))
    return tuple(found)


def functions_of(parts: Sequence[nn.Module]) -> list[Any]:
    """The functions that modules hold in attributes and hooks."""
    held = [item for part in parts for item in part.__dict__.values() if type(item) in _FUNCTIONS]
    return held + [hook for part in parts for _, hook in hooks_of(part)]


def hooks_of(part: nn.Module) -> list[tuple[tuple[str, int], Any]]:
    """The hooks of a module: of which kind, their number, and what is called."""
    return [
        ((kind, number), hook)
        for kind in ("forward_pre", "forward", "backward_pre", "backward")
        for number, hook in getattr(part, f"_{kind}_hooks").items()
    ]


def _has_hooks(part: nn.Module) -> bool:
    return bool(
        part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
    )


def _parts(module: nn.Module) -> list[nn.Module]:
    """The module and all below it, each once; faster than `modules()`."""
    parts, seen = [module], {id(module)}
    for part in parts:  # grows as it goes
        for child in part._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                parts.append(child)
    return parts


def _tensor_key(tensor: Tensor) -> tuple[Hashable, ...]:
    return (tensor.shape, tensor.dtype, tensor.requires_grad)
