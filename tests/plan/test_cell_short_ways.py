"""Cell's own short ways through construction and call do what torch's long ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.modules import module as shared

import distcell as dc
from distcell import nn


class Layer(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.weight = dc.Parameter(torch.ones(2))

    def construct(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x * self.weight * scale


def test_a_new_cell_has_the_fields_of_a_new_module() -> None:
    expected = vars(torch.nn.Module())
    one, other = vars(type("Empty", (nn.Cell,), {})()), vars(Layer())
    assert one == expected
    for name, value in expected.items():
        assert type(one[name]) is type(value)
        if hasattr(value, "clear"):
            assert one[name] is not other[name] and one[name] is not value


def test_a_class_between_cell_and_module_is_initialised() -> None:
    class Between(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = True

    class Net(nn.Cell, Between):
        pass

    assert Net().seen


def test_a_replaced_init_of_module_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.nn.Module] = []
    own = torch.nn.Module.__init__

    def init(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(torch.nn.Module, "__init__", init)
    assert Layer() in made


def test_a_replaced_register_parameter_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.nn.Module.register_parameter

    def register(self: torch.nn.Module, name: str, param: Any) -> None:
        own(self, name, torch.nn.Parameter(param.detach().to("meta")))

    monkeypatch.setattr(torch.nn.Module, "register_parameter", register)
    assert Layer().weight.is_meta


def test_a_register_parameter_of_the_class_is_called() -> None:
    class Net(Layer):
        def register_parameter(self, name: str, param: Any) -> None:
            super().register_parameter(f"{name}_", param)

    assert [name for name, _ in Net().named_parameters()] == ["weight_"]


def test_a_hook_on_the_registration_of_parameters_is_called() -> None:
    found: list[str] = []
    hook = shared.register_module_parameter_registration_hook(
        lambda _, name, __: found.append(name)
    )
    try:
        Layer()
    finally:
        hook.remove()
    assert found == ["weight"]


@pytest.mark.parametrize("value", [1, None, "text", torch.nn.Parameter(torch.zeros(2))])
def test_what_a_name_holds_is_replaced_as_by_torch(value: Any) -> None:
    def outcome(net: torch.nn.Module, kind: str) -> Any:
        held = {
            "parameter": torch.nn.Parameter(torch.ones(1)),
            "child": torch.nn.ReLU(),
            "buffer": None,
            "plain": 2,
        }[kind]
        if kind == "buffer":
            net.register_buffer("a", torch.ones(1))
        else:
            net.a = held
        try:
            net.a = value
        except (TypeError, KeyError) as error:
            return type(error), str(error)
        return [("a" in net.__dict__[place]) for place in ("_parameters", "_modules", "_buffers")]

    for kind in ("parameter", "child", "buffer", "plain"):
        assert outcome(nn.Cell(), kind) == outcome(torch.nn.Module(), kind)


def test_a_property_of_the_class_is_set_through_it() -> None:
    class Net(nn.Cell):
        @property
        def size(self) -> int:
            return self._size + 1

        @size.setter
        def size(self, value: int) -> None:
            self._size = value

    net = Net()
    net.size = 3
    assert net.size == 4 and "size" not in vars(net)


def test_a_parameter_over_a_method_is_refused_as_by_torch() -> None:
    with pytest.raises(KeyError, match="already exists"):
        nn.Cell().half = torch.nn.Parameter(torch.zeros(1))


def test_a_construct_that_is_replaced_later_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = Layer(), torch.ones(2)
    net.construct = lambda x: x + 5  # type: ignore[method-assign, assignment]
    assert net(x).tolist() == [6.0, 6.0]
    monkeypatch.setattr(Layer, "construct", lambda self, x: x + 7)
    assert Layer()(x).tolist() == [8.0, 8.0]
    monkeypatch.setattr(Layer, "forward", lambda self, x: x + 9)
    assert Layer()(x).tolist() == [10.0, 10.0]


def test_a_later_class_decides_by_construct_or_by_forward() -> None:
    class ByForward(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -x

    class ByConstruct(ByForward):
        def construct(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return 3 * x

    x = torch.ones(1)
    assert ByForward()(x).item() == -1
    assert ByConstruct()(x).item() == 3


@pytest.mark.parametrize("register", ["", "global"])
def test_hooks_of_every_kind_run_around_the_call(register: str) -> None:
    net, seen = Layer(), list[str]()
    own = register == ""
    add: dict[str, Any] = {
        "pre": net.register_forward_pre_hook if own else shared.register_module_forward_pre_hook,
        "after": net.register_forward_hook if own else shared.register_module_forward_hook,
        "backward": (
            net.register_full_backward_hook if own else shared.register_module_full_backward_hook
        ),
        "backward-pre": (
            net.register_full_backward_pre_hook
            if own
            else shared.register_module_full_backward_pre_hook
        ),
    }
    for name, function in add.items():
        handle = function(lambda *_, name=name: seen.append(name))
        try:
            net(torch.ones(2, requires_grad=True)).sum().backward()
        finally:
            handle.remove()
    assert seen == list(add)


def test_jit_and_export_see_the_call() -> None:
    net, x = Layer(), torch.ones(2)
    traced = torch.jit.trace(nn.SequentialCell(net), x)
    assert "Layer" in str(traced.original_name) + str(list(traced.named_modules()))
    assert torch.equal(torch.export.export(net, (x,)).module()(x), net(x))


def test_keyword_arguments_reach_construct() -> None:
    assert Layer()(torch.ones(2), scale=2.0).tolist() == [2.0, 2.0]
