"""The parameters of a Cell: traversal, names, insertion.

torch has parameters and buffers, MindSpore has parameters alone: what is not trained is a parameter
with `requires_grad=False`. So the methods with MindSpore's names give buffers too, as such
parameters that share the buffer's memory; BatchNorm's statistics go by MindSpore's names there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import torch

from distcell.cell_base import NAME_PREFIX, CellBase, check_bool, name_start, refresh_names
from distcell.cell_children import check_new_name
from distcell.errors import UserTypeError, UserValueError
from distcell.parameter import Parameter, adopt, global_shape, layout, set_layout, set_place

_MOVING = {"running_mean": "moving_mean", "running_var": "moving_variance"}
_COUNTER = "num_batches_tracked"


class CellParameters(CellBase):
    """Parameters by name, trained or not."""

    def parameters_and_names(
        self, name_prefix: str = "", expand: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yields path and parameter, buffers as parameters that are not trained; tied ones once.

        Args:
            name_prefix: put before each path.
            expand: whether those of children are among them.

        >>> list(CellParameters().parameters_and_names())
        []
        """
        check_bool("expand", expand)
        refresh_names(self)
        here = [("", self)]
        modules = torch.nn.Module.named_modules(self) if expand else here
        seen: set[int] = set()
        for path, module in modules:
            start = ".".join(part for part in (name_prefix, path) if part)
            start = f"{start}." if start else ""
            for attribute, tensor in _tensors_of(module):
                if id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                if isinstance(tensor, torch.nn.Parameter):
                    yield start + attribute, tensor
                else:
                    known = _MOVING.get(attribute, attribute)
                    yield start + known, _as_parameter(tensor, name_start(module, path), known)

    def get_parameters(self, expand: bool = True) -> Iterator[torch.nn.Parameter]:
        """Yields the parameters, buffers as parameters that are not trained; tied ones once.

        Args:
            expand: whether those of children are among them.

        >>> list(CellParameters().get_parameters())
        []
        """
        yield from (param for _, param in CellParameters.parameters_and_names(self, "", expand))

    def trainable_params(self, recurse: bool = True) -> list[torch.nn.Parameter]:
        """Returns the parameters that are trained, in the order of their definition.

        Args:
            recurse: whether those of children are among them.

        >>> CellParameters().trainable_params()
        []
        """
        check_bool("recurse", recurse)
        refresh_names(self)
        return [p for p in torch.nn.Module.parameters(self, recurse) if p.requires_grad]

    def untrainable_params(self, recurse: bool = True) -> list[torch.nn.Parameter]:
        """Returns what no optimizer changes: frozen parameters, and all buffers.

        A buffer comes as a parameter that shares its memory. BatchNorm's `running_mean` and
        `running_var` are `moving_mean` and `moving_variance`; its counter is left out, as
        MindSpore has none. torch's `buffers()` gives torch's.

        Args:
            recurse: whether those of children are among them.

        >>> CellParameters().untrainable_params()
        []
        """
        check_bool("recurse", recurse)
        found = CellParameters.get_parameters(self, recurse)
        return [param for param in found if not param.requires_grad]

    def parameters_dict(self, recurse: bool = True) -> OrderedDict[str, torch.nn.Parameter]:
        """Returns the parameters, buffers among them, by their name.

        Args:
            recurse: whether those of children are among them.

        Raises:
            UserValueError: two parameters have the same name.

        >>> CellParameters().parameters_dict()
        OrderedDict()
        """
        check_bool("recurse", recurse)
        found: OrderedDict[str, torch.nn.Parameter] = OrderedDict()
        for path, param in CellParameters.parameters_and_names(self, "", recurse):
            name = getattr(param, "name", path)
            if name in found:
                raise _same_name([name])
            found[name] = param
        return found

    def parameters_broadcast_dict(
        self, recurse: bool = True
    ) -> OrderedDict[str, torch.nn.Parameter] | None:
        """Returns those of `parameters_dict` that are equal on the ranks of a replica group.

        That is all but those with `layerwise_parallel`. None when there are none.

        Args:
            recurse: whether those of children are among them.

        >>> print(CellParameters().parameters_broadcast_dict())
        None
        """
        found = CellParameters.parameters_dict(self, recurse)
        for name, param in list(found.items()):
            if getattr(param, "layerwise_parallel", False):
                del found[name]
        return found or None

    def check_names(self) -> None:
        """Returns when no two parameters have the same name.

        Raises:
            UserValueError: two have; it lists the names.

        >>> CellParameters().check_names()
        """
        names: set[str] = set()
        double: list[str] = []
        for path, param in CellParameters.parameters_and_names(self):
            name = getattr(param, "name", path)
            if name in names:
                double.append(name)
            names.add(name)
        if double:
            raise _same_name(double)

    def update_parameters_name(self, prefix: str = "", recurse: bool = True) -> None:
        """Puts a prefix before the names of the parameters, for good; paths stay.

        Args:
            prefix: put before each name, no dot added.
            recurse: whether before those of children too.

        Raises:
            UserTypeError: the prefix is no str.

        >>> net = CellParameters()
        >>> net.scale = torch.nn.Parameter(torch.zeros(1))
        >>> net.update_parameters_name("student.")
        >>> net.scale.name
        'student.scale'
        """
        check_bool("recurse", recurse)
        if not isinstance(prefix, str):
            raise UserTypeError(f"`prefix` is {prefix!r}, not a str")
        modules = torch.nn.Module.modules(self) if recurse else iter([self])
        for module in modules:
            for attribute, param in module._parameters.items():
                if param is not None:
                    adopt(param)
                    set_place(param, prefix, getattr(param, "name", "") or attribute)
            module.__dict__[NAME_PREFIX] = prefix + str(module.__dict__.get(NAME_PREFIX, ""))

    def insert_param_to_cell(
        self, param_name: str, param: torch.nn.Parameter, check_name_contain_dot: bool = True
    ) -> None:
        """Adds a parameter.

        Args:
            param_name: the attribute; also its name when it has none.
            param: the parameter, which becomes a `distcell.Parameter` in place.
            check_name_contain_dot: False lets the name have dots.

        Raises:
            UserNameError: the name is empty, has a dot, or is that of another attribute.
            UserTypeError: the name is no str, or the parameter is no parameter.

        >>> from distcell.cell import Cell
        >>> net = Cell()
        >>> net.insert_param_to_cell("scale", Parameter(torch.zeros(1)))
        >>> net.scale.name
        'scale'
        """
        check_bool("check_name_contain_dot", check_name_contain_dot)
        check_new_name(self, "parameter", param_name, dots=not check_name_contain_dot)
        if not isinstance(param, torch.nn.Parameter):
            kind = type(param).__name__
            raise UserTypeError(f"`{param_name}` is a {kind}", hint="pass a `distcell.Parameter`")
        if "." not in param_name:
            self.register_parameter(param_name, param)
            return
        adopt(param)
        set_place(param, "", param_name)
        self._parameters[param_name] = param  # torch's own way in refuses dots

    def init_parameters_data(
        self, auto_parallel_mode: bool = False
    ) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
        """Returns old and new parameters, all of which have values now.

        The values of parameters made under `dc.lazy_init()` are made in place, so that old and new
        are the same objects.

        Args:
            auto_parallel_mode: True leaves lazy parameters to the first call, which makes each
                when it is split: a rank then never holds the whole network.

        >>> CellParameters().init_parameters_data()
        {}
        """
        from distcell.lazy import materialize

        check_bool("auto_parallel_mode", auto_parallel_mode)
        params = list(torch.nn.Module.parameters(self))
        if not auto_parallel_mode:
            materialize(*params)
        return {param: param for param in params}


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, p) for name, p in module._parameters.items() if p is not None)
    counts = "running_mean" in module._buffers
    for name, buffer in module._buffers.items():
        if buffer is not None and not (counts and name == _COUNTER):
            yield name, buffer


def _as_parameter(buffer: torch.Tensor, start: str, name: str) -> Parameter:
    made = Parameter(buffer, requires_grad=False)
    set_place(made, start, name)
    if tuple(global_shape(buffer)) != tuple(buffer.shape):
        set_layout(made, layout(buffer))
    return made


def _same_name(names: list[str]) -> UserValueError:
    return UserValueError(
        f"two parameters have the name `{names[0]}`",
        where=[f"all names that stand twice: {', '.join(dict.fromkeys(names))}"],
        hint="name one of them, or give the cell that holds them `auto_prefix=True`",
    )
