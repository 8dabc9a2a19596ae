"""What Python code can read besides tensors is part of the key; what nobody can read is refused."""

from __future__ import annotations

import functools
import logging
import random
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import distcell as dc
from distcell.capture import call_key, capture_call
from distcell.capture.facts import Facts
from distcell.context import LaunchOptions, set_launch
from distcell.errors import CaptureError

SIMULATED = LaunchOptions(mode="simulate", ranks=2, strategy="data")


class Scale(nn.Module):
    """Multiplies by what a function says of the arguments and of the module."""

    def __init__(self, factor: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(3, 4), factor
        for name, item in attributes.items():
            setattr(self, name, item)

    def forward(self, x: Tensor, arg: Any = None) -> Tensor:
        return self.linear(x) * self.factor(self, arg)


@pytest.fixture
def on_ranks() -> Any:
    torch.set_num_threads(1)
    set_launch(SIMULATED)
    yield
    set_launch(LaunchOptions())


def outcomes(net: nn.Module, changes: list[Callable[[Any], Any]], plain: bool) -> list[Tensor]:
    """What the network gives after each change; the change gives the second argument."""
    x = torch.arange(12.0).reshape(4, 3)
    found = []
    for change in changes:
        arg = change(net)
        found.append((net.forward if plain else net)(x, arg).detach().clone())
    return found


def check(make: Callable[[], nn.Module], changes: list[Callable[[Any], Any]]) -> None:
    torch.manual_seed(0)
    expected = outcomes(make(), changes, plain=True)
    torch.manual_seed(0)
    got = outcomes(dc.parallelize(make()), changes, plain=False)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not torch.equal(expected[0], expected[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "arguments"),
    [
        (lambda _, a: float(a.mean()), [np.full(4, i) for i in range(5)]),
        (lambda _, a: float(a["n"][0][0]), [{"n": [np.full(4, i)]} for i in range(3)]),
        (lambda _, a: float(a), [np.float32(1), np.float32(2)]),
        (lambda _, a: float(sum(a)), [{1, 2}, {1, 3}]),
        (lambda _, a: float(a.stop), [slice(0, 2), slice(0, 3)]),
        (lambda _, a: 1.0 if str(a) == "0.0" else 2.0, [0.0, -0.0]),
        (lambda _, a: a(1.0), [functools.partial(pow, exp=1), lambda v: v + 1, lambda v: v + 2]),
    ],
    ids=["array", "array in containers", "number of numpy", "set", "slice", "zero", "function"],
)
def test_another_argument_gives_what_it_gives_on_one_device(
    on_ranks: None, factor: Callable[..., Any], arguments: list[Any]
) -> None:
    check(lambda: Scale(factor), [lambda _, a=a: a for a in arguments])


@pytest.mark.slow
def test_a_changed_configuration_gives_what_it_gives_on_one_device(on_ranks: None) -> None:
    def set_scale(scale: float) -> Callable[[Any], None]:
        def change(net: Any) -> None:
            net.settings.part.scale = scale

        return change

    check(
        lambda: Scale(
            lambda net, _: net.settings.part.scale,
            settings=SimpleNamespace(part=SimpleNamespace(scale=1.0)),
        ),
        [set_scale(2.0), set_scale(7.0), set_scale(2.0), set_scale(3.0)],
    )


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Slots:
    __slots__ = ("__scale",)

    def __init__(self) -> None:
        self.__scale = 1

    def grow(self) -> None:
        self.__scale += 1


class Mode(Enum):
    A = 1
    B = 2


@dataclass
class Part:
    scale: Any = 1


@pytest.mark.parametrize(
    "argument",
    [
        Holder(torch.ones(2)),
        [{"deep": Holder(torch.ones(2))}],
        {torch.ones(2)},
        {Holder: 1, Holder(torch.ones(1)): 2},
        SimpleNamespace(x=1),
        np.array([Holder(torch.ones(2))], dtype=object),
        iter([1, 2]),
        nn.ReLU(),
        torch.Generator(),
    ],
    ids=lambda item: type(item).__name__,
)
def test_an_argument_of_which_nobody_can_tell_when_it_changes_is_named(argument: Any) -> None:
    net = Scale(lambda *_: 1)
    for call in (call_key, capture_call):
        with pytest.raises(CaptureError, match=r"the argument `arg.*is an object of class") as one:
            call(net, (torch.ones(2, 3), argument), {})
        with pytest.raises(CaptureError, match=r"the argument `arg") as other:
            call(net, (torch.ones(2, 3),), {"arg": argument})
        assert str(one.value) == str(other.value)
    assert "take the object apart" in str(one.value)


def attribute(item: Any) -> Any:
    net = Scale(lambda *_: 1)
    net.attribute = item
    return net


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def call(self) -> int:
        return self.calls


def closing_over(cell: list[int]) -> Callable[[], int]:
    return lambda: cell[0]


CHANGES: dict[str, Callable[[], tuple[Any, Callable[[Any], Any]]]] = {
    "object": lambda: (Counter(), lambda c: setattr(c, "calls", 1)),
    "object in a list": lambda: ([Counter()], lambda c: setattr(c[0], "calls", 1)),
    "object in an object": lambda: (Part(Part(Part())), lambda p: setattr(p.scale.scale, "x", 1)),
    "slots": lambda: (Slots(), lambda s: s.grow()),
    "dataclass": lambda: (Part(), lambda p: setattr(p, "scale", 2)),
    "bound method": lambda: (Counter().call, lambda m: setattr(m.__self__, "calls", 5)),
    "closure": lambda: (closing_over([1]), lambda f: f.__closure__[0].cell_contents.append(2)),
    "defaults": lambda: (lambda a=[1]: a, lambda f: f.__defaults__[0].append(2)),
    "partial": lambda: (functools.partial(pow, 2, mod=[3]), lambda p: p.keywords["mod"].append(1)),
    "function in a dict": lambda: ({"f": max}, lambda d: d.update(f=min)),
    "enum": lambda: ({"mode": Mode.A}, lambda d: d.update(mode=Mode.B)),
    "set": lambda: ({1, 2}, lambda s: s.add(3)),
    "frozenset": lambda: ([frozenset({1})], lambda s: s.append(frozenset())),
    "size": lambda: ([torch.Size([1])], lambda s: s.__setitem__(0, torch.Size([2]))),
    "ordered dict": lambda: (OrderedDict(a=1, b=2), lambda d: d.move_to_end("a")),
    "default dict": lambda: (defaultdict(int), lambda d: d[0]),
    "deque": lambda: (deque([1]), lambda d: d.append(1)),
    "key": lambda: ({1: 0}, lambda d: (d.clear(), d.update({True: 0}))),
    "number of numpy": lambda: ([np.float32(1)], lambda n: n.__setitem__(0, np.float64(1))),
    "array": lambda: (np.ones(3), lambda a: a.__setitem__(1, 0)),
    "array of objects": lambda: (np.array([Part()], object), lambda a: setattr(a[0], "scale", 3)),
    "tensor in a list": lambda: ([torch.ones(1)], lambda t: t[0].add_(1)),
    "tensor in an object": lambda: (Holder(torch.ones(1)), lambda h: h.tensor.add_(1)),
    "random numbers": lambda: (random.Random(0), lambda r: r.random()),
    "random numbers of numpy": lambda: (np.random.default_rng(0), lambda r: r.random()),
    "module in a list": lambda: ([nn.Dropout(0.1)], lambda m: m[0].eval()),
    "module in an object": lambda: (Part(nn.Dropout(0.1)), lambda p: setattr(p.scale, "p", 0.2)),
    "weak reference": lambda: ([weakref.ref(Part)], lambda r: r.__setitem__(0, weakref.ref(Mode))),
}


@pytest.mark.parametrize("make", CHANGES.values(), ids=list(CHANGES))
def test_a_change_in_what_an_attribute_holds_changes_the_key(make: Callable[[], Any]) -> None:
    item, change = make()
    net = attribute(item)
    before = call_key(net, (), {})
    assert call_key(net, (), {}) == before and hash(call_key(net, (), {})) == hash(before)
    change(item)
    assert call_key(net, (), {}) != before


def test_functions_made_anew_have_one_key_when_they_are_the_same_code() -> None:
    assert Facts().of(closing_over([1])) == Facts().of(closing_over([1]))
    assert Facts().of(closing_over([1])) != Facts().of(closing_over([2]))


def test_circles_and_values_met_twice_are_read_once() -> None:
    item: Any = SimpleNamespace(scale=1)
    item.me, item.items = item, [item]
    item.items.append(item.items)
    before = Facts().of(item)
    assert Facts().of(item) == before
    item.scale = 2
    assert Facts().of(item) != before


def test_machinery_counts_by_which_object_it_is() -> None:
    for make in (lambda: torch.optim.SGD([torch.ones(1)], 0.1), threading.Lock):
        item = make()
        assert Facts().of(item) == Facts().of(item) != Facts().of(make())
    log = logging.getLogger("distcell.test")
    before = Facts().of(log)
    log.isEnabledFor(logging.DEBUG)
    assert Facts().of(log) == before


def test_an_object_that_is_gone_is_never_the_same_as_a_later_one() -> None:
    net = attribute(torch.zeros(2))
    keys = [call_key(net, (), {})]
    for _ in range(20):
        net.attribute = None
        net.attribute = torch.zeros(2)
        keys.append(call_key(net, (), {}))
    assert len(set(keys)) == len(keys)


def test_parameters_in_a_list_do_not_count_as_they_are_trained() -> None:
    net = attribute([])
    net.attribute += [net.linear.weight, net.linear]
    before = call_key(net, (), {})
    with torch.no_grad():
        net.linear.weight.add_(1)
    assert call_key(net, (), {}) == before


def test_names_of_submodules_and_what_hooks_hold_are_part_of_the_key() -> None:
    net = nn.ModuleDict({"a": nn.Dropout(0.1), "b": nn.Dropout(0.1)})
    before = call_key(net, (), {})
    net["c"] = net["b"]
    assert (shared := call_key(net, (), {})) != before
    scale = [1]
    net["a"].register_forward_hook(lambda _m, _a, out: out * scale[0])
    assert (hooked := call_key(net, (), {})) != shared
    scale[0] = 2
    assert call_key(net, (), {}) != hooked
