"""What code reads by name is part of a call's key, and may not be changed by the call."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distcell.capture import capture_call
from distcell.capture.guard import call_key
from distcell.capture.names import MAX_ITEMS, names_read
from distcell.errors import CaptureError

BETA = 1.0
SETTINGS: dict[str, Any] = {"beta": 1.0, "list": [1]}
UNREAD = 1
CONFIG = SimpleNamespace(beta=1.0, other=1)
MASK = torch.ones(3)
ARRAY = np.ones(3)
LONG = list(range(MAX_ITEMS + 1))
TEACHER = nn.Linear(3, 3)
LOG: list[Any] = []
LAST: Any = None
COUNT = 0
READY = False
LOGGER = logging.getLogger("names")
HELP = ModuleType("settings_of_a_user")
HELP.__file__, HELP.rate, HELP.other = "/home/user/settings.py", 1.0, 1


class Options:
    scale = 1.0

    def __init__(self) -> None:
        self.own = 1.0

    def value(self) -> float:
        return self.own * BETA


OPTIONS = Options()


def deeper(x: Tensor) -> Tensor:
    return x * BETA


def helper(x: Tensor) -> Tensor:
    return deeper(x)


@torch.no_grad()
def decorated(x: Tensor) -> Tensor:
    return x * BETA


@functools.lru_cache
def cached() -> float:
    return BETA


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * BETA


class Base(nn.Module):
    @property
    def factor(self) -> float:
        return BETA

    def method(self, x: Tensor) -> Tensor:
        return x * BETA

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return x * BETA


class Net(Base):
    def __init__(self, does: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        return x if (y := self.does(self, x)) is None else y


def rebinds(name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setitem(globals(), name, value)


beta = rebinds("BETA", 2.0)


class Calls(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.method(x) * self.factor


class Static(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.static(x)


class Inherits(Base):
    def method(self, x: Tensor) -> Tensor:
        return super().method(x) + 1

    def forward(self, x: Tensor) -> Tensor:
        return self.method(x)


class Decorated(Base):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.method(x)


READS: dict[str, tuple[Any, Callable[[pytest.MonkeyPatch], None]]] = {
    "a global": (lambda net, x: x * BETA, beta),
    "in a comprehension": (lambda net, x: sum([x * BETA * i for i in (1, 2)]), beta),
    "in a dict": (lambda net, x: x * SETTINGS["beta"], lambda p: p.setitem(SETTINGS, "beta", 2)),
    "in a list": (lambda net, x: x * SETTINGS["list"], lambda p: p.setitem(SETTINGS, "list", 1)),
    "of a namespace": (lambda net, x: x * CONFIG.beta, lambda p: p.setattr(CONFIG, "beta", 2.0)),
    "of an object": (lambda net, x: x * OPTIONS.own, lambda p: p.setattr(OPTIONS, "own", 2.0)),
    "by a method": (lambda net, x: x * OPTIONS.value(), lambda p: p.setattr(OPTIONS, "own", 2.0)),
    "below a method": (lambda net, x: x * OPTIONS.value(), beta),
    "of a class": (lambda net, x: x * Options.scale, lambda p: p.setattr(Options, "scale", 2.0)),
    "of its class": (lambda net, x: x * OPTIONS.scale, lambda p: p.setattr(Options, "scale", 2.0)),
    "of a module": (lambda net, x: x * HELP.rate, lambda p: p.setattr(HELP, "rate", 2.0)),
    "of all a module": (lambda n, x: x * vars(HELP)["rate"], lambda p: p.setattr(HELP, "rate", 2)),
    "by a function": (helper, beta),
    "below a lambda": (lambda net, x: helper(x), beta),
    "another function": (lambda net, x: helper(x), rebinds("deeper", math.sqrt)),
    "decorated": (lambda net, x: decorated(x), beta),
    "cached": (lambda net, x: x * cached(), beta),
    "an autograd function": (lambda net, x: Function.apply(x), beta),
    "a tensor": (lambda net, x: x * MASK, rebinds("MASK", torch.zeros(3))),
    "a tensor in place": (lambda net, x: x * MASK, lambda p: MASK.add_(1)),
    "an array": (lambda net, x: x * ARRAY[0], lambda p: ARRAY.fill(2)),
    "a network": (lambda net, x: TEACHER(x), lambda p: p.setattr(TEACHER, "bias", None)),
    "its weights": (lambda net, x: TEACHER(x), lambda p: TEACHER.weight.detach().mul_(2)),
    "a name without value": (lambda net, x: x * LATER, rebinds("LATER", 1)),  # noqa: F821
    "methods and properties": (Calls, beta),
    "static methods": (Static, beta),
    "inherited methods": (Inherits, beta),
    "a decorated forward": (Decorated, beta),
}  # fmt: skip


def made(reads: Any) -> nn.Module:
    is_class = isinstance(reads, type)
    return nn.Sequential(reads() if is_class else Net(reads))


@pytest.mark.parametrize("name", READS)
def test_another_value_is_another_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, change = READS[name]
    net, x = made(reads), torch.ones(2, 3)
    before = call_key(net, (x,), {})
    assert call_key(net, (x,), {}) == before
    assert hash(call_key(net, (x,), {})) == hash(before)
    change(monkeypatch)
    assert call_key(net, (x,), {}) != before


def test_closure_variables_count() -> None:
    def network() -> tuple[nn.Module, Callable[[float], None]]:
        beta, held = 1.0, {"beta": 1.0}

        class Closes(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * beta * sum([held["beta"] for _ in range(2)])

        def change(value: float, *, inside: bool) -> None:
            nonlocal beta
            if inside:
                held["beta"] = value
            else:
                beta = value

        return Closes(), change

    net, change = network()
    keys = [call_key(net, (), {})]
    for inside in (True, False):
        change(2.0, inside=inside)
        keys.append(call_key(net, (), {}))
    assert len(set(keys)) == 3
    change(1.0, inside=True)
    change(1.0, inside=False)
    assert call_key(net, (), {}) == keys[0]


def test_hooks_and_functions_in_attributes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked, held = nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())
    hooked[0].register_forward_hook(lambda module, args, output: output * BETA)
    held[0].does = helper
    before = call_key(hooked, (), {}), call_key(held, (), {})
    beta(monkeypatch)
    assert call_key(hooked, (), {}) != before[0] and call_key(held, (), {}) != before[1]


@pytest.mark.parametrize(
    "reads",
    [
        lambda net, x: F.relu(x) * CONFIG.beta + HELP.rate,
        lambda net, x: x if LOGGER.isEnabledFor(10) else x * math.pi,
    ],
)
def test_what_is_not_read_does_not_count(reads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net = made(reads)
    before = call_key(net, (), {})
    monkeypatch.setitem(globals(), "UNREAD", 2)
    monkeypatch.setattr(CONFIG, "other", 2)
    monkeypatch.setattr(HELP, "other", 2)
    monkeypatch.setattr(LOGGER, "level", 30)
    assert call_key(net, (), {}) == before


def test_long_containers_count_by_which_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    net = made(lambda net, x: x * LONG[0])
    before = call_key(net, (), {})
    LONG[0] = 7
    assert call_key(net, (), {}) == before
    monkeypatch.setitem(globals(), "LONG", list(LONG))
    assert call_key(net, (), {}) != before


def test_networks_of_installed_packages_read_nothing() -> None:
    net = nn.TransformerEncoderLayer(8, 2)
    assert not names_read(list(net.modules()))


def counts(net: nn.Module, x: Tensor) -> None:
    global COUNT
    COUNT += 1


def keeps(net: nn.Module, x: Tensor) -> None:
    global LAST
    LAST = x * 2


def gets_ready(net: nn.Module, x: Tensor) -> None:
    global READY
    if not READY:
        READY = True


CHANGED: dict[str, tuple[Any, str]] = {
    "a number": (counts, "changes the variable `COUNT`"),
    "a tensor": (keeps, "keeps a tensor in the variable `LAST`"),
    "a tensor in a list": (lambda net, x: LOG.append(x), "keeps a tensor in the variable `LOG`"),
    "a number in a list": (lambda net, x: LOG.append(1), "changes the variable `LOG`"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_call_that_changes_a_variable_is_refused_and_it_is_put_back(name: str) -> None:
    does, says = CHANGED[name]
    with pytest.raises(CaptureError, match=says):
        capture_call(made(does), (torch.ones(2, 3),), {})
    assert (COUNT, LAST, LOG) == (0, None, [])


def test_a_variable_may_be_set_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "READY", False)
    capture_call(made(gets_ready), (torch.ones(2, 3),), {})
    assert READY
