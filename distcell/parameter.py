"""Parameters: torch's own, with a name, a layout and the settings of MindSpore's Parameter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Generic, Self, TypeVar, overload

import torch

from distcell.compat import as_subclass, asked_by_parameter, without_overrides
from distcell.errors import UserTypeError, UserValueError
from distcell.layout import Layout, Part

_LAYOUT = "_distcell_layout"
_NAME = "_distcell_name"
_OWN_NAME = "_distcell_own_name"
_FIXED = "_distcell_fixed_name"

_T = TypeVar("_T")


class _Setting(Generic[_T]):
    """An attribute that is kept with the parameter, checked when it is set."""

    def __init__(self, default: _T, meaning: str, *, least: int | None = None) -> None:
        self.default, self.__doc__, self.least = default, meaning, least

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, parameter: None, owner: type) -> Self: ...
    @overload
    def __get__(self, parameter: torch.nn.Parameter, owner: type) -> _T: ...
    def __get__(self, parameter: torch.nn.Parameter | None, owner: type) -> Self | _T:
        if parameter is None:
            return self
        value: _T = parameter.__dict__.get(f"_distcell_{self.name}", self.default)
        return value

    def __set__(self, parameter: torch.nn.Parameter, value: _T) -> None:
        wanted = type(self.default)
        if type(value) is not wanted:
            kind = type(value).__name__
            raise UserTypeError(f"`{self.name}` is {value!r}, a {kind}, not a {wanted.__name__}")
        if self.least is not None and isinstance(value, int) and value < self.least:
            raise UserValueError(f"`{self.name}` is {value}; it is at least {self.least}")
        parameter.__dict__[f"_distcell_{self.name}"] = value


class Parameter(torch.nn.Parameter):
    """A trainable tensor that knows its name in the network.

    Every parameter of a Cell is one: a `torch.nn.Parameter` that is assigned to a Cell becomes
    a `Parameter` in place, so that optimizers which already hold it stay valid. It prints as
    MindSpore's do, with its layout when it is split.

    Args:
        data: the value.
        requires_grad: whether it is trained.
        name: its own name, in place of the attribute's. The paths of the Cells come before it.

    >>> Parameter(torch.zeros(2), name="scale")
    Parameter (name=scale, shape=(2,), dtype=Float32, requires_grad=True)
    """

    layerwise_parallel = _Setting(False, "Whether its ranks differ: it is not broadcast.")
    parallel_optimizer = _Setting(True, "Whether its optimizer state may be split.")
    comm_fusion = _Setting(
        1, "Which gradients are reduced together: those of one number; 0: by itself.", least=0
    )
    parallel_optimizer_comm_recompute = _Setting(
        False, "Whether it is gathered again in backward when the optimizer splits it."
    )
    is_param_ps = _Setting(False, "Whether a parameter server updates it.")
    init_in_server = _Setting(False, "Whether it is initialised on the parameter server.")
    push_weight_to_server = _Setting(False, "Federated: whether clients send it.")
    pull_weight_from_server = _Setting(False, "Federated: whether clients take it.")
    requires_aggr = _Setting(True, "Federated: whether the server aggregates it.")

    def __new__(
        cls, data: torch.Tensor | None = None, requires_grad: bool = True, *, name: str = ""
    ) -> Parameter:
        """Returns the parameter, which shares the memory of `data`."""
        parameter: Parameter
        if type(data) is torch.Tensor:
            parameter = as_subclass(cls, data, requires_grad)
        else:
            with without_overrides():
                plain = None if data is None else data.detach()
            parameter = super().__new__(cls, plain, requires_grad)
        if name:
            parameter.__dict__.update({_NAME: name, _OWN_NAME: name})
        return parameter

    @property
    def name(self) -> str:
        """Its name: the path in the outermost Cell that holds it, unless it was given one.

        Assigning gives it a name that stays, whatever Cell holds it.
        """
        return str(self.__dict__.get(_NAME, ""))

    @name.setter
    def name(self, name: str) -> None:
        if not isinstance(name, str):
            raise UserTypeError(f"the name of a parameter is {name!r}, not a str")
        self.__dict__.update({_NAME: name, _FIXED: True})

    @property
    def sliced(self) -> bool:
        """Whether it is split: this rank may hold a piece of it alone."""
        return bool(layout(self).axes)

    @property
    def pipeline_stages(self) -> tuple[int, ...]:
        """The stages that use it, as `add_pipeline_stage` was told."""
        return tuple(self.__dict__.get("_distcell_stages", ()))

    def add_pipeline_stage(self, stage: int) -> None:
        """Notes a stage of the pipeline that uses the parameter.

        Args:
            stage: counted from 0.

        Raises:
            UserTypeError: it is no int, or negative (a TypeError, as in MindSpore).

        >>> weight = Parameter(torch.zeros(1))
        >>> weight.add_pipeline_stage(1)
        >>> weight.pipeline_stages
        (1,)
        """
        if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
            raise UserTypeError(f"stage {stage!r} is no number from 0", hint="like 0 or 1")
        if stage not in self.pipeline_stages:
            self.__dict__["_distcell_stages"] = (*self.pipeline_stages, stage)

    def set_param_ps(self, init_in_server: bool = False) -> None:
        """Lets a parameter server update the parameter.

        Args:
            init_in_server: whether its first value is made there.

        >>> weight = Parameter(torch.zeros(1))
        >>> weight.set_param_ps(init_in_server=True)
        >>> weight.is_param_ps, weight.init_in_server
        (True, True)
        """
        self.init_in_server = init_in_server
        self.is_param_ps = True

    def __repr__(self) -> str:  # type: ignore[override]
        where = f", layout={layout(self)}" if self.sliced else ""
        return (
            f"Parameter (name={self.name or 'Parameter'}, shape={tuple(global_shape(self))}, "
            f"dtype={_dtype_name(self.dtype)}, requires_grad={self.requires_grad}{where})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        if id(self) not in memo:
            # torch's own copy would lose the layout: a slice would pass for the whole.
            with without_overrides():
                data = self.detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = _rebuild(type(self), data, self.requires_grad, dict(self.__dict__))
        copied: Parameter = memo[id(self)]
        return copied

    def detach(self) -> torch.Tensor:
        """Returns a plain tensor that shares the memory and needs no gradient.

        >>> type(Parameter(torch.zeros(1)).detach()).__name__
        'Tensor'
        """
        plain = super().detach()
        if torch.compiler.is_compiling():  # which cannot look at frames
            return plain
        if asked_by_parameter(sys._getframe(1)):  # `torch.nn.Parameter(weight)` wants its own kind
            return Parameter(plain, requires_grad=False)
        return plain

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        with without_overrides():
            data = self.detach()
        return _rebuild, (type(self), data, self.requires_grad, dict(self.__dict__))


def _rebuild(
    kind: type[Parameter], data: torch.Tensor, requires_grad: bool, state: dict[str, Any]
) -> Parameter:
    parameter = kind(data, requires_grad)
    parameter.__dict__.update(state)
    return parameter


# What `torch.load` makes without `weights_only=False`: they hold tensors, names and numbers.
torch.serialization.add_safe_globals([Parameter, _rebuild, Layout, Part])


def adopt(parameter: torch.nn.Parameter) -> None:
    """Makes a torch parameter a `Parameter`, in place; other kinds of parameters stay as they are.

    Args:
        parameter: it stays the same object with the same memory.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> adopt(weight)
    >>> type(weight).__name__, weight.name
    ('Parameter', '')
    """
    if type(parameter) is torch.nn.Parameter:
        parameter.__class__ = Parameter


def set_place(parameter: torch.nn.Parameter, prefix: str, attribute: str) -> None:
    """Gives a parameter the name of its place, unless a name that stays was assigned to it.

    Args:
        parameter: kinds that are not ours have no name.
        prefix: what comes before, its dot included.
        attribute: used when the parameter has no own name.

    >>> weight = Parameter(torch.zeros(2))
    >>> set_place(weight, "mlp.up.", "weight")
    >>> weight.name
    'mlp.up.weight'
    """
    if isinstance(parameter, Parameter):
        kept = parameter.__dict__
        if _FIXED not in kept:
            kept[_NAME] = prefix + kept.get(_OWN_NAME, attribute)


def take_name(parameter: torch.nn.Parameter, attribute: str) -> None:
    """Adopts a parameter, which is named like its attribute when it has no name.

    Args:
        parameter: kinds that are not ours have no name.
        attribute: the name.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> take_name(weight, "weight")
    >>> weight.name
    'weight'
    """
    # torch answers isinstance of parameters slowly, and every parameter comes by here
    if type(parameter) is torch.nn.Parameter:
        parameter.__class__ = Parameter
    if type(parameter) is Parameter or isinstance(parameter, Parameter):
        kept = parameter.__dict__
        if not kept.get(_NAME):
            kept[_NAME] = kept.get(_OWN_NAME, attribute)


def set_places(
    parameters: Mapping[str, torch.nn.Parameter | None], prefix: str, seen: set[int]
) -> None:
    """Adopts the parameters of one module, and gives them the names of their places.

    Args:
        parameters: by attribute.
        prefix: what comes before, its dot included.
        seen: `id`s of those that keep their names, as they stand elsewhere too; the others are
            added.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> set_places({"weight": weight}, "mlp.up.", set())
    >>> weight.name
    'mlp.up.weight'
    """
    for attribute, parameter in parameters.items():
        if parameter is None or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        # torch answers isinstance of parameters slowly, and every parameter comes by here
        if type(parameter) is Parameter:
            kept = parameter.__dict__
            if _FIXED not in kept:
                kept[_NAME] = prefix + kept.get(_OWN_NAME, attribute)
        else:
            adopt(parameter)
            set_place(parameter, prefix, attribute)


def layout(tensor: torch.Tensor) -> Layout:
    """Returns where a parameter or buffer lives: the layout of which this rank holds its piece.

    Args:
        tensor: a parameter or buffer of a Cell. One that nothing has split is whole on every rank.

    >>> print(layout(torch.zeros(4, 2)))
    [4, 2]
    """
    found: Layout | None = getattr(tensor, _LAYOUT, None)
    return Layout.of(tuple(tensor.shape)) if found is None else found


def is_placed(tensor: torch.Tensor) -> bool:
    """Returns whether a plan has given the tensor a layout.

    Args:
        tensor: a parameter or buffer of a Cell.

    >>> is_placed(torch.zeros(2))
    False
    """
    return getattr(tensor, _LAYOUT, None) is not None


def global_shape(tensor: torch.Tensor) -> torch.Size:
    """Returns the shape of the whole parameter, of which this rank may hold a piece.

    Args:
        tensor: a parameter or buffer of a Cell.

    >>> global_shape(torch.zeros(4, 2))
    torch.Size([4, 2])
    """
    return torch.Size(layout(tensor).shape)


def set_layout(tensor: torch.Tensor, new: Layout) -> None:
    """Notes the layout whose piece a tensor now holds: for the engine, which also cuts the data.

    Args:
        tensor: a parameter or buffer.
        new: its layout.

    >>> weight = torch.zeros(2, 2)
    >>> set_layout(weight, Layout.parse("[4@tp, 2]"))
    >>> global_shape(weight)
    torch.Size([4, 2])
    """
    setattr(tensor, _LAYOUT, new)


def _dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    starts = {"bfloat": "BFloat", "uint": "UInt"}
    start = next((long for short, long in starts.items() if name.startswith(short)), None)
    return name.capitalize() if start is None else start + name[len(start) :]
