"""Tensors of a Cell by MegEngine's verbs, which torch's own names take too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from distcell.cell_base import CellBase, check_bool
from distcell.errors import NotFoundError, UserTypeError, UserValueError
from distcell.parameter import global_shape, set_place

Loader = Callable[[str, Tensor], Any]
"""Takes key and tensor of a state, and returns what is loaded there; None for nothing."""


class CellTensors(CellBase):
    """torch's traversal and loading, with the arguments of MegEngine beside torch's.

    Where torch says `recurse`, MegEngine says `recursive`: either may be given. `seen` holds the
    `id`s of tensors that are left out; those that are found are added. With `with_parent` the pairs
    become triples, which the annotations leave out.
    """

    def named_parameters(
        self,
        prefix: str | None = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
        *,
        recursive: bool | None = None,
        with_parent: bool = False,
        seen: set[int] | None = None,
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yields path and parameter.

        Args:
            prefix: put before each path.
            recurse: whether those of children are among them.
            remove_duplicate: whether a tied parameter comes once.
            recursive: MegEngine's name of `recurse`.
            with_parent: MegEngine's: whether each is followed by the module that holds it.
            seen: MegEngine's: what is left out.

        >>> list(CellTensors().named_parameters())
        []
        """
        recurse = recurse if recursive is None else recursive
        found = super().named_parameters(prefix or "", recurse, remove_duplicate)
        yield from self._megengine(found, prefix or "", with_parent, seen)

    def parameters(
        self, recurse: bool = True, *, recursive: bool | None = None, seen: set[int] | None = None
    ) -> Iterator[torch.nn.Parameter]:
        """Yields the parameters, tied ones once.

        Args:
            recurse: whether those of children are among them.
            recursive: MegEngine's name of `recurse`.
            seen: MegEngine's: what is left out.

        >>> list(CellTensors().parameters())
        []
        """
        for _, param in CellTensors.named_parameters(
            self, recurse=recurse, recursive=recursive, seen=seen
        ):
            yield param

    def named_buffers(
        self,
        prefix: str | None = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
        *,
        recursive: bool | None = None,
        with_parent: bool = False,
        seen: set[int] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields path and buffer: tensors that are no parameters.

        Args:
            prefix: put before each path.
            recurse: whether those of children are among them.
            remove_duplicate: whether a buffer that stands twice comes once.
            recursive: MegEngine's name of `recurse`.
            with_parent: MegEngine's: whether each is followed by the module that holds it.
            seen: MegEngine's: what is left out.

        >>> list(CellTensors().named_buffers())
        []
        """
        recurse = recurse if recursive is None else recursive
        found = super().named_buffers(prefix or "", recurse, remove_duplicate)
        yield from self._megengine(found, prefix or "", with_parent, seen)

    def buffers(
        self, recurse: bool = True, *, recursive: bool | None = None, seen: set[int] | None = None
    ) -> Iterator[Tensor]:
        """Yields the buffers, each once.

        Args:
            recurse: whether those of children are among them.
            recursive: MegEngine's name of `recurse`.
            seen: MegEngine's: what is left out.

        >>> list(CellTensors().buffers())
        []
        """
        for _, buffer in CellTensors.named_buffers(
            self, recurse=recurse, recursive=recursive, seen=seen
        ):
            yield buffer

    def named_tensors(
        self,
        prefix: str | None = "",
        recursive: bool = True,
        *,
        with_parent: bool = False,
        seen: set[int] | None = None,
    ) -> Iterator[Any]:
        """Yields path and tensor: parameters, then buffers.

        Args:
            prefix: put before each path.
            recursive: whether those of children are among them.
            with_parent: whether each is followed by the module that holds it.
            seen: what is left out.

        >>> net = CellTensors()
        >>> net.register_buffer("mean", torch.zeros(2))
        >>> list(net.named_tensors("net"))
        [('net.mean', tensor([0., 0.]))]
        """
        given: dict[str, Any] = {"with_parent": with_parent, "seen": seen, "recursive": recursive}
        yield from CellTensors.named_parameters(self, prefix, **given)
        yield from CellTensors.named_buffers(self, prefix, **given)

    def tensors(self, recursive: bool = True, *, seen: set[int] | None = None) -> Iterator[Tensor]:
        """Yields the parameters, then the buffers.

        Args:
            recursive: whether those of children are among them.
            seen: what is left out.

        >>> list(CellTensors().tensors())
        []
        """
        for _, tensor in CellTensors.named_tensors(self, recursive=recursive, seen=seen):
            yield tensor

    def _megengine(
        self,
        found: Iterator[tuple[str, Any]],
        prefix: str,
        with_parent: bool,
        seen: set[int] | None,
    ) -> Iterator[Any]:
        if not with_parent and seen is None:
            yield from found
            return
        start = len(prefix) + 1 if prefix else 0
        for path, tensor in found:
            if seen is not None:
                if id(tensor) in seen:
                    continue
                seen.add(id(tensor))
            if with_parent:
                yield path, tensor, self.get_submodule(path[start:].rpartition(".")[0])
            else:
                yield path, tensor

    def train(self, mode: bool = True, recursive: bool = True) -> Self:
        """Returns this cell in training (or evaluation) mode.

        Args:
            mode: False for evaluation.
            recursive: MegEngine's: whether its children too. torch's `train` always does.

        >>> CellTensors().train(False).training
        False
        """
        if recursive:
            return super().train(mode)
        self.training = check_bool("mode", mode)
        return self

    def replace_param(
        self,
        params: Mapping[int, torch.nn.Parameter] | Sequence[torch.nn.Parameter],
        start_pos: int,
        seen: set[int] | None = None,
    ) -> int:
        """Returns how many parameters the cell has, some of them replaced.

        MegEngine has it for `ParamPack`. Parameters are counted in the order of `parameters()`.

        Args:
            params: the new ones by position.
            start_pos: the position of the cell's first parameter.
            seen: `id`s of parameters that do not count; those that are found are added.

        Raises:
            UserTypeError: a new one is no parameter.
            UserValueError: its shape is not that of the old one. Nothing is replaced then.

        >>> net = CellTensors()
        >>> net.scale = torch.nn.Parameter(torch.zeros(2))
        >>> net.replace_param({5: torch.nn.Parameter(torch.ones(2))}, start_pos=5)
        1
        >>> net.scale.tolist()
        [1.0, 1.0]
        """
        new = params if isinstance(params, Mapping) else dict(enumerate(params))
        named = CellTensors.named_parameters(self, seen=set() if seen is None else seen)
        old = list(named)
        wanted = {
            path: (param, new[place])
            for place, (path, param) in enumerate(old, start=start_pos)
            if place in new
        }
        for path, (param, other) in wanted.items():
            if not isinstance(other, torch.nn.Parameter):
                raise UserTypeError(f"what replaces `{path}` is a {type(other).__name__}")
            if global_shape(other) != global_shape(param):
                shapes = f"{list(global_shape(param))} by {list(global_shape(other))}"
                raise UserValueError(f"`{path}` cannot be replaced: {shapes}")
        replacements = {id(param): other for param, other in wanted.values()}
        for path, module in torch.nn.Module.named_modules(self):
            for attribute, param in module._parameters.items():
                if param is not None and id(param) in replacements:  # tied ones stay tied
                    other = replacements[id(param)]
                    module.register_parameter(attribute, other)
                    set_place(other, f"{path}." if path else "", attribute)
        return len(old)

    def load_state_dict(
        self, state_dict: Mapping[str, Any] | Loader, strict: bool = True, assign: bool = False
    ) -> Any:
        """Returns torch's list of missing and unexpected keys, the state loaded.

        Args:
            state_dict: torch's: a mapping from keys to tensors. MegEngine's: a function of key and
                tensor that returns what is loaded there, or None to leave the tensor as it is or
                as the function has changed it. Arrays of numpy count as tensors; a value of None
                in a mapping is as from a function.
            strict: whether all keys must be there. With a function, or a mapping that has a None,
                a key that is left out is then an error, as in MegEngine.
            assign: torch's: whether the tensors are taken over instead of copied.

        Raises:
            UserTypeError: it is neither, or a value is no array.
            NotFoundError: a key was left out under `strict`. Nothing is loaded then.
            RuntimeError: torch's, for keys and shapes that do not fit.

        >>> net = CellTensors()
        >>> net.scale = torch.nn.Parameter(torch.zeros(2))
        >>> net.load_state_dict(lambda key, tensor: torch.ones(tensor.shape))
        <All keys matched successfully>
        >>> net.scale.tolist()
        [1.0, 1.0]
        """
        if isinstance(state_dict, Mapping):
            if all(isinstance(value, Tensor) for value in state_dict.values()):
                return super().load_state_dict(state_dict, strict, assign)
            given = dict(state_dict)
            # what torch keeps beside tensors (`_extra_state`) is passed on as it is
            state = {
                key: v if "_extra_state" in key else _array(key, v) for key, v in given.items()
            }
        elif callable(state_dict):
            state = _ask(state_dict, self.state_dict())
        else:
            kind = type(state_dict).__name__
            raise UserTypeError(f"`state_dict` is a {kind}", hint="pass a mapping or a function")
        left_out = [key for key, value in state.items() if value is None]
        if left_out and strict:
            raise NotFoundError(
                f"{len(left_out)} of the state's keys were left out",
                where=[", ".join(left_out[:12])],
                hint="pass `strict=False`",
            )
        kept = {key: value for key, value in state.items() if value is not None}
        return super().load_state_dict(kept, strict and not left_out, assign)


def _ask(function: Loader, state: Mapping[str, Any]) -> dict[str, Any]:
    """What a function gives for each tensor. One that it changed in place is loaded too."""
    found: dict[str, Any] = {}
    for key, tensor in state.items():
        if not isinstance(tensor, Tensor):
            continue
        before = tensor._version
        value = function(key, tensor)
        if value is None and tensor._version != before:
            value = tensor
        found[key] = _array(key, value)
    return found


def _array(key: str, value: Any) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        return value
    if hasattr(value, "__array__"):
        return torch.as_tensor(value)
    raise UserTypeError(f"the value of `{key}` is a {type(value).__name__}, not an array")
