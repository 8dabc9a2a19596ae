"""Gradients of functions and networks, as MindSpore asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distcell.errors import UserTypeError


class GradOperation:
    """Makes of a network a function that returns gradients.

    Called with a network (and parameters with `get_by_list`), it returns a function of the
    network's inputs, and of `sens` after them with `sens_param`.

    Args:
        get_all: whether it returns a tuple of the gradients of all inputs of floating point, not of
            the first alone.
        get_by_list: whether it returns the gradients of parameters; with `get_all`, both: those of
            the inputs, then those of the parameters.
        sens_param: whether the last argument is the gradient of the output; ones when not.

    >>> GradOperation()(lambda x: x * x)(torch.tensor([3.0]))
    tensor([6.])
    """

    def __init__(
        self, get_all: bool = False, get_by_list: bool = False, sens_param: bool = False
    ) -> None:
        for name, value in (
            ("get_all", get_all),
            ("get_by_list", get_by_list),
            ("sens_param", sens_param),
        ):
            if not isinstance(value, bool):
                raise UserTypeError(f"`{name}` is {value!r}, not a bool")
        self.get_all, self.get_by_list, self.sens_param = get_all, get_by_list, sens_param

    def __call__(
        self,
        network: Callable[..., Any],
        weights: Sequence[torch.Tensor] | None = None,
    ) -> Callable[..., Any]:
        """Returns the function.

        Args:
            network: a Cell, a module or a function.
            weights: the parameters; those of a module that are trained when left out.

        Raises:
            UserTypeError: it is no function, or the parameters of a function were left out.

        >>> GradOperation(get_all=True)(torch.mul)(torch.tensor([3.0]), torch.tensor([2.0]))
        (tensor([2.]), tensor([3.]))
        """
        if not callable(network):
            raise UserTypeError(f"a {type(network).__name__} has no gradients")
        params: list[torch.Tensor] = []
        if self.get_by_list:
            if weights is None and not isinstance(network, torch.nn.Module):
                raise UserTypeError("`get_by_list` needs parameters", hint="pass them after it")
            own = network.parameters() if isinstance(network, torch.nn.Module) else ()
            params = [p for p in own if p.requires_grad] if weights is None else list(weights)

        def gradients(*args: Any) -> Any:
            sens = args[-1] if self.sens_param else None
            inputs = [_leaf(item) for item in (args[:-1] if self.sens_param else args)]
            with torch.enable_grad():
                output = network(*inputs)
            return self._of(output, inputs, params, sens)

        return gradients

    def _of(self, output: Any, inputs: list[Any], params: list[torch.Tensor], sens: Any) -> Any:
        outputs = output if isinstance(output, tuple) else (output,)
        given = sens if isinstance(sens, tuple) else (sens,) * len(outputs)
        grads = [
            torch.ones_like(o) if g is None else g for o, g in zip(outputs, given, strict=True)
        ]
        wanted = [item for item in inputs if isinstance(item, torch.Tensor) and item.requires_grad]
        if not wanted and not (self.get_all or self.get_by_list):
            raise UserTypeError("no input has a gradient", hint="pass tensors of floating point")
        of: list[torch.Tensor] = [*wanted, *params]
        found = torch.autograd.grad(outputs, of, grads, materialize_grads=True) if of else ()
        of_inputs, of_params = found[: len(wanted)], found[len(wanted) :]
        if self.get_by_list:
            return (of_inputs, of_params) if self.get_all else of_params
        if self.get_all:
            return of_inputs
        return of_inputs[0]


def _leaf(item: Any) -> Any:
    if isinstance(item, torch.Tensor) and item.is_floating_point():
        return item.detach().requires_grad_()
    return item
