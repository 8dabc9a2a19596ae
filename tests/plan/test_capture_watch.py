"""What a call leaves behind in attributes, hooks and results is an error, and is put back."""

from __future__ import annotations

import copy
import random
from collections import UserDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distcell.capture import capture_call
from distcell.errors import CaptureError


class Log:
    """A plain object of a user."""

    def __init__(self) -> None:
        self.items: dict[str, Any] = {"count": 0}


class Keeps(nn.Module):
    def __init__(self, held: Any, does: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.held, self.does = nn.Linear(3, 3), held, does

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return result if (result := self.does(self.held, y)) is not None else y


def capture(held: Any, does: Callable[[Any, Tensor], Any]) -> Any:
    net = nn.Sequential(Keeps(held, does))
    return capture_call(net, (torch.ones(2, 3),), {})


LEAVES: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any]]] = {
    "dict": (lambda: {"aux": 1}, lambda d, y: d.update(aux=y.mean())),
    "new key": (dict, lambda d, y: d.update(aux=y.mean())),
    "list": (list, lambda d, y: d.append(y)),
    "list of lists": (lambda: [[1], [2]], lambda d, y: d[1].append(y.mean())),
    "object": (Log, lambda d, y: setattr(d, "last", y)),
    "in an object": (Log, lambda d, y: d.items.update(last=y)),
    "namespace": (lambda: SimpleNamespace(x=None), lambda d, y: setattr(d, "x", [y])),
    "own dict": (UserDict, lambda d, y: d.update(aux=y)),
    "deque": (lambda: deque([1], maxlen=3), lambda d, y: d.append(y)),
    "set": (set, lambda d, y: d.add(y)),
}
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any]]] = {
    "number in an object": (Log, lambda d, y: d.items.update(count=d.items["count"] + 1)),
    "other ops the next time": (Log, lambda d, y: y * 2 if d.items.pop("count", None) == 0 else y),
    "number in a dict": (lambda: {"n": 1}, lambda d, y: d.update(n=2)),
    "list of lists": (lambda: [[1], [2]], lambda d, y: d[1].append(3)),
    "array": (lambda: np.zeros(2), lambda d, y: d.__setitem__(0, 1)),
    "removed": (lambda: {"n": 1}, lambda d, y: d.clear()),
    "random numbers": (lambda: random.Random(0), lambda d, y: y * d.random()),
}


def text(item: Any) -> str:
    """What a value says, all of it."""
    items = [vars(item)] if isinstance(item, (Log, SimpleNamespace)) else [item]
    return repr(items)


@pytest.mark.parametrize(("make", "does"), LEAVES.values(), ids=list(LEAVES))
def test_a_tensor_left_in_what_was_there_before_is_named_and_taken_out(
    make: Callable[[], Any], does: Callable[[Any, Tensor], Any]
) -> None:
    held = make()
    before = text(held)
    with pytest.raises(CaptureError, match=r"keeps a tensor in the attribute `0\.held`"):
        capture(held, does)
    assert text(held) == before == text(make())


@pytest.mark.parametrize(("make", "does"), CHANGES.values(), ids=list(CHANGES))
def test_a_change_in_what_was_there_before_is_named_and_undone(
    make: Callable[[], Any], does: Callable[[Any, Tensor], Any]
) -> None:
    held = make()
    before = copy.deepcopy(held)
    with pytest.raises(CaptureError, match=r"changes the attribute `0\.held`"):
        capture(held, does)
    if not isinstance(held, random.Random):
        assert text(held) == text(before)


def test_reading_what_attributes_hold_is_no_change() -> None:
    held = {"a": [1], "log": Log(), "array": np.ones(2)}
    graph = capture(held, lambda d, y: y * d["a"][0] * float(d["array"][0])).graph
    assert graph.ops


def test_what_an_inner_hook_keeps_is_an_error_and_what_it_computes_is_captured() -> None:
    net, seen = nn.Sequential(nn.Linear(3, 3)), dict[str, Tensor]()
    plain = capture_call(net, (torch.ones(2, 3),), {}).graph
    handle = net[0].register_forward_hook(lambda _m, _a, out: seen.update(out=out))
    with pytest.raises(CaptureError, match="forward hook of cell `0` keeps a tensor"):
        capture_call(net, (torch.ones(2, 3),), {})
    assert not seen
    handle.remove()
    net[0].register_forward_hook(lambda _m, _a, out: out * 2)
    assert len(capture_call(net, (torch.ones(2, 3),), {}).graph.ops) > len(plain.ops)


class Result:
    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (Result, "its result"),
        (lambda y: (y, {"r": Result(y)}), "`1.r` of its result"),
        (lambda y: {y}, "its result"),
        (lambda y: (y, lambda: y), "`1` of its result"),
        (lambda y: (part for part in (y,)), "its result"),
    ],
    ids=["object", "object within", "set", "function", "generator"],
)
def test_a_result_that_cannot_be_built_again_is_an_error(
    make: Callable[[Tensor], Any], place: str
) -> None:
    with pytest.raises(CaptureError, match=f"the call returns {place} as an object") as caught:
        capture(None, lambda _, y: make(y))
    assert "tuple, dict or dataclass" in str(caught.value)


def test_values_beside_the_tensors_are_returned_as_they_are() -> None:
    result = (torch.float32, 3, None, slice(1, 2), np.float32(2), "a")
    captured = capture(None, lambda _, y: (y, *result))
    assert captured.result(["y"]) == ("y", *result)


def test_a_configuration_that_the_first_call_fills_in_stays_filled_in() -> None:
    def fill(config: Log, y: Tensor) -> Tensor:
        config.items.setdefault("kind", "single")
        return y * len(config.items)

    held = Log()
    graph = capture(held, fill).graph
    assert held.items == {"count": 0, "kind": "single"}
    assert capture(held, fill).graph.digest == graph.digest


def replaces(net: nn.Module, y: Tensor) -> Tensor:
    net.linear.weight = nn.Parameter(net.linear.weight * 2)
    return net.linear(y)


def makes_a_child(net: nn.Module, y: Tensor) -> Tensor:
    net.late = nn.Linear(3, 2)
    return net.late(y)


PARTS: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "a new parameter": (lambda net, y: setattr(net, "w", nn.Parameter(y)), "parameter `0.w`"),
    "a new buffer": (lambda net, y: net.register_buffer("b", y.mean()), "attribute `0.b`"),
    "another parameter": (replaces, "parameter `0.linear.weight`"),
    "a removed parameter": (lambda net, y: delattr(net.linear, "bias"), "`0.linear.bias`"),
    "a new child": (makes_a_child, "cell `0.late`"),
    "a removed child": (lambda net, y: delattr(net, "linear"), "`0.linear"),
    "another buffer, and a failure": (
        lambda net, y: (net.register_buffer("b", y), y @ torch.ones(5, 5))[0],
        "cannot|same",
    ),
}


@pytest.mark.parametrize("does", PARTS)
def test_parameters_and_children_that_a_call_makes_are_refused_and_taken_back(does: str) -> None:
    act, named = PARTS[does]

    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            y = self.linear(x)
            return result if isinstance(result := act(self, y), Tensor) else y

    net = nn.Sequential(Changes())
    before = {path: id(item) for path, item in (*net.named_parameters(), *net.named_modules())}
    with pytest.raises(RuntimeError, match=named):
        capture_call(net, (torch.ones(2, 3),), {})
    after = {path: id(item) for path, item in (*net.named_parameters(), *net.named_modules())}
    assert after == before and not list(net.named_buffers())


def test_a_failed_call_raises_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    net, logger = nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2)), "torch._subclasses.fake_tensor"
    with caplog.at_level("ERROR", logger=logger), pytest.raises(RuntimeError, match="same"):
        capture_call(net, (torch.ones(2, 3),), {})
    assert not [record for record in caplog.records if record.name == logger]
