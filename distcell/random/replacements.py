"""What stands for each of torch's random operations: arithmetic on uniform numbers and masks.

The arithmetic is element-wise and of functions whose last bits do not depend on where in a tensor
an element stands (of torch's, `log`, `sqrt`, `cos` and `tan` are such; `sigmoid` is not).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from distcell.errors import DistcellError

aten = torch.ops.aten


class Draw(Protocol):
    """Who gives the numbers (`distcell.random.mode.RandomMode`)."""

    def uniform(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device | None
    ) -> Tensor: ...

    def keep_mask(self, p: float, shape: torch.Size, device: torch.device) -> Tensor: ...

    def refuse(self, message: str) -> DistcellError: ...


@dataclass(frozen=True)
class Wanted:
    """What numbers are to be made, where there is no tensor yet that says so."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


Values = Callable[..., Tensor]
"""Makes new values for a tensor: `(draw, tensor, *parameters)`."""


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which numbers for a type are computed: at least float32."""
    return dtype if dtype.itemsize >= 4 or not dtype.is_floating_point else torch.float32


def _like(draw: Draw, tensor: Tensor | Wanted, dtype: torch.dtype | None = None) -> Tensor:
    return draw.uniform(tensor.shape, dtype or _wide(tensor.dtype), tensor.device)


def _bernoulli(draw: Draw, tensor: Tensor | Wanted, p: float | Tensor = 0.5) -> Tensor:
    if isinstance(p, Tensor):
        numbers = draw.uniform(tensor.shape, _wide(p.dtype), tensor.device)
        return (numbers < p).to(tensor.dtype)
    return draw.keep_mask(p, tensor.shape, tensor.device).to(tensor.dtype)


def _bernoulli_of(draw: Draw, p: Tensor) -> Tensor:
    return _bernoulli(draw, p, p)


def _uniform(draw: Draw, tensor: Tensor | Wanted, low: float = 0.0, high: float = 1.0) -> Tensor:
    numbers = _like(draw, tensor, tensor.dtype)
    return numbers if (low, high) == (0, 1) else numbers * (high - low) + low


def _normal(
    draw: Draw, tensor: Tensor | Wanted, mean: float | Tensor = 0.0, std: float | Tensor = 1.0
) -> Tensor:
    # Box and Muller; the first is in (0, 1].
    radius = (-2 * torch.log(1 - _like(draw, tensor))).sqrt()
    numbers = radius * torch.cos(_like(draw, tensor) * (2 * math.pi))
    if isinstance(std, Tensor) or std != 1:
        numbers = numbers * std
    if isinstance(mean, Tensor) or mean != 0:
        numbers = numbers + mean
    return numbers.to(tensor.dtype)


def _exponential(draw: Draw, tensor: Tensor | Wanted, rate: float = 1.0) -> Tensor:
    # Never 0: Gumbel's trick takes the logarithm, and races divide.
    numbers = -torch.log1p(-_like(draw, tensor))
    return (numbers.clamp_min(2.0**-32) / rate).to(tensor.dtype)


def _geometric(draw: Draw, tensor: Tensor | Wanted, p: float) -> Tensor:
    numbers = torch.log(1 - _like(draw, tensor, torch.float64)) / math.log1p(-p)
    return numbers.ceil().clamp_min(1).to(tensor.dtype)


def _cauchy(draw: Draw, tensor: Tensor | Wanted, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    angles = (_like(draw, tensor) - 0.5) * math.pi
    return (torch.tan(angles) * sigma + median).to(tensor.dtype)


def _log_normal(draw: Draw, tensor: Tensor | Wanted, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return torch.exp(_normal(draw, tensor, mean, std))


def _integers(draw: Draw, tensor: Tensor | Wanted, low: int, high: int | None) -> Tensor:
    """Integers in [low, high), of the tensor's type."""
    if high is None or not 0 < high - low <= 1 << 53:
        raise draw.refuse(f"random integers from {low} to {high} have no replacement")
    numbers = _like(draw, tensor, torch.float64) * (high - low)
    return (numbers.floor().clamp_max(high - low - 1).to(torch.int64) + low).to(tensor.dtype)


def _integers_to(draw: Draw, tensor: Tensor | Wanted, high: int) -> Tensor:
    return _integers(draw, tensor, 0, high)


def _in_place(values: Values, draw: Draw, tensor: Tensor, *args: Any) -> Tensor:
    return tensor.copy_(values(draw, tensor, *args))


def _new(values: Values, draw: Draw, *args: Any, **options: Any) -> Tensor:
    """A new tensor: the arguments are the values' parameters, then the shape."""
    *parameters, shape = args
    return values(draw, _wanted(shape, torch.get_default_dtype(), options), *parameters)


def _new_integers(values: Values, draw: Draw, *args: Any, **options: Any) -> Tensor:
    *parameters, shape = args
    return values(draw, _wanted(shape, torch.int64, options), *parameters)


def _new_like(values: Values, draw: Draw, tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    options = {"device": tensor.device, **options}
    return values(draw, _wanted(tensor.shape, tensor.dtype, options), *args)


def _wanted(shape: Sequence[int], dtype: torch.dtype, options: dict[str, Any]) -> Wanted:
    dtype, device = options.get("dtype") or dtype, options.get("device") or torch.device("cpu")
    return Wanted(torch.Size(shape), dtype, device)


def _normal_of_tensors(draw: Draw, mean: float | Tensor, std: float | Tensor = 1.0) -> Tensor:
    tensors = [item for item in (mean, std) if isinstance(item, Tensor)]
    shape = torch.broadcast_shapes(*[tensor.shape for tensor in tensors])
    return _normal(draw, Wanted(shape, tensors[0].dtype, tensors[0].device), mean, std)


def _permutation(draw: Draw, count: int, **options: Any) -> Tensor:
    numbers = draw.uniform(torch.Size([count]), torch.float64, options.get("device"))
    return numbers.argsort(stable=True).to(options.get("dtype") or torch.int64)


def _native_dropout(
    draw: Draw, tensor: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    if train is False:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    mask = draw.keep_mask(1 - p, tensor.shape, tensor.device)
    return tensor * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    aten.native_dropout.default: _native_dropout,
    aten.bernoulli.default: _bernoulli_of,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli,
    aten.bernoulli_.float: partial(_in_place, _bernoulli),
    aten.bernoulli_.Tensor: partial(_in_place, _bernoulli),
    aten.uniform.default: _uniform,
    aten.uniform_.default: partial(_in_place, _uniform),
    aten.normal_functional.default: _normal,
    aten.normal_.default: partial(_in_place, _normal),
    aten.normal.float_float: partial(_new, _normal),
    aten.normal.Tensor_float: _normal_of_tensors,
    aten.normal.float_Tensor: _normal_of_tensors,
    aten.normal.Tensor_Tensor: _normal_of_tensors,
    aten.exponential.default: _exponential,
    aten.exponential_.default: partial(_in_place, _exponential),
    aten.geometric_.default: partial(_in_place, _geometric),
    aten.cauchy_.default: partial(_in_place, _cauchy),
    aten.log_normal_.default: partial(_in_place, _log_normal),
    getattr(aten.random_, "from"): partial(_in_place, _integers),
    aten.random_.to: partial(_in_place, _integers_to),
    aten.rand.default: partial(_new, _uniform),
    aten.rand.generator: partial(_new, _uniform),
    aten.rand_like.default: partial(_new_like, _uniform),
    aten.randn.default: partial(_new, _normal),
    aten.randn.generator: partial(_new, _normal),
    aten.randn_like.default: partial(_new_like, _normal),
    aten.randint.default: partial(_new_integers, _integers_to),
    aten.randint.generator: partial(_new_integers, _integers_to),
    aten.randint.low: partial(_new_integers, _integers),
    aten.randint.low_generator: partial(_new_integers, _integers),
    aten.randint_like.default: partial(_new_like, _integers_to),
    aten.randint_like.low_dtype: partial(_new_like, _integers),
    aten.randperm.default: _permutation,
    aten.randperm.generator: _permutation,
}
"""For each random operation of ATen what is called instead, with a `Draw` before its arguments."""
