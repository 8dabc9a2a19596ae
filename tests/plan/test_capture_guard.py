"""The key of a call differs whenever its graph could, and tells the current cell."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from distcell.capture import call_key
from distcell.scope import current_cell, track


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))


def set_plain(net: nn.Sequential) -> None:
    net[0].plain = torch.ones(1)  # type: ignore[assignment]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "training": lambda net: net.eval(),
    "training of one": lambda net: net[2].eval(),
    "scalar": lambda net: setattr(net[2], "p", 0.2),
    "type of a scalar": lambda net: setattr(net[1], "eps", 1),
    "tuple": lambda net: setattr(net[0], "sizes", (1, 2)),
    "list": lambda net: setattr(net[0], "sizes", [1, 2]),
    "requires_grad": lambda net: net[0].weight.requires_grad_(False),
    "dtype": lambda net: net.double(),
    "submodule": lambda net: net.append(nn.ReLU()),
    "other submodule": lambda net: net.__setitem__(2, nn.ReLU()),
    "no bias": lambda net: setattr(net[0], "bias", None),
    "hook": lambda net: net[0].register_forward_hook(lambda *_: None),
    "plain tensor": set_plain,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_change_of_the_module_changes_the_key(change: Callable[[Any], Any]) -> None:
    net, x = network(), torch.ones(5, 3)
    before = call_key(net, (x,), {})
    assert before == call_key(net, (torch.zeros(5, 3),), {})
    assert hash(before) == hash(call_key(net, (x,), {}))
    change(net)
    assert call_key(net, (x,), {}) != before


def test_a_plain_tensor_counts_until_it_is_written() -> None:
    net = network()
    set_plain(net)
    before = call_key(net, (), {})
    assert call_key(net, (), {}) == before
    net[0].plain.add_(1)
    assert call_key(net, (), {}) != before


def test_tied_weights_change_the_key() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = call_key(net, (), {})
    net[1].weight = net[0].weight
    assert call_key(net, (), {}) != before


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.ones(6, 3), 1), {}),
        ((torch.ones(5, 3).double(), 1), {}),
        ((torch.ones(5, 3, requires_grad=True), 1), {}),
        ((torch.ones(5, 3), 2), {}),
        ((torch.ones(5, 3), 1.0), {}),
        ((torch.ones(5, 3), True), {}),
        ((torch.ones(5, 3), 1), {"mask": None}),
        ((torch.ones(5, 3), [1]), {}),
        (([torch.ones(5, 3)], 1), {}),
        ((1, torch.ones(5, 3)), {}),
    ],
)
def test_other_arguments_change_the_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    net = network()
    assert call_key(net, args, kwargs) != call_key(net, (torch.ones(5, 3), 1), {})


def test_modes_of_torch_and_what_the_caller_adds_change_the_key() -> None:
    net, x = network(), torch.ones(5, 3)
    keys = [call_key(net, (x,), {}), call_key(net, (x,), {}, extra="mesh")]
    with torch.no_grad():
        keys.append(call_key(net, (x,), {}))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            keys.append(call_key(net, (x,), {}))
    assert len(set(keys)) == len(keys)


def test_the_key_costs_few_calls_for_each_module() -> None:
    # it is made at every call of a network: counted, as times are those of the machine
    net = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(14)))
    x = torch.ones(2, 8)
    call_key(net, (x,), {})  # what is looked up once and kept
    count = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        call_key(net, (x,), {})
    finally:
        sys.setprofile(None)
    modules = len(list(net.modules()))
    assert modules > 139
    assert modules < count < 60 * modules


class Probe(nn.Module):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails

    def forward(self, x: Any = None) -> str:
        if self.fails:
            raise ValueError("on purpose")
        return current_cell()


def test_the_current_cell_is_the_innermost_of_the_tracked_network() -> None:
    foreign = Probe()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Identity(), Probe())

        def forward(self, x: Any = None) -> Any:
            return current_cell(), self.inner(None), foreign(x=1), self.inner[1](x=2)

    net = nn.ModuleDict({"a": Outer()})
    with track(net):
        assert net["a"]() == ("a", "a.inner.1", "a", "a.inner.1")
        assert current_cell() == ""
    assert net["a"]() == ("",) * 4


def test_a_failed_call_leaves_its_cell() -> None:
    net = nn.Sequential(Probe(fails=True), Probe())
    with track(net):
        with pytest.raises(ValueError, match="on purpose"):
            net[0](x=1)
        assert current_cell() == ""
        assert net[1]() == "1"


def test_tracking_nests_and_leaves_no_hook() -> None:
    inner = nn.Sequential(Probe())
    outer = nn.ModuleDict({"net": inner})
    with track(outer):
        with track(inner):
            assert inner(None) == "0"
        assert inner(None) == "net.0"
    hooks = nn.modules.module
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks
    assert not hooks._global_forward_hooks_with_kwargs


def test_a_change_inside_of_a_dict_attribute_changes_the_key() -> None:
    net = torch.nn.Linear(2, 2)
    net.settings = {"scale": 2, "inner": {"names": ["a"]}}
    before = call_key(net, (), {})
    assert call_key(net, (), {}) == before
    net.settings["inner"]["names"][0] = "b"
    assert call_key(net, (), {}) != before
