"""The Cell: construct and forward, names, modes, and the one way to the engine."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distcell
from distcell.cell import Cell, call_signature, inside_engine
from distcell.errors import UserTypeError
from distcell.parameter import Parameter


class Net(Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 4), nn.Linear(4, 2)

    def construct(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.down(self.up(x).relu()) * scale


class ByForward(Cell):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


@pytest.fixture
def engine_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What reaches the engine, in whose place stands one that runs the cell plainly."""
    calls: list[tuple[Any, ...]] = []

    def call(cell: Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls.append((cell, args, kwargs))
        with inside_engine():
            return cell.forward(*args, **kwargs)

    engine = ModuleType("distcell.engine")
    engine.call = call  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "distcell.engine", engine)
    monkeypatch.setattr(distcell, "engine", engine, raising=False)
    return calls


def test_construct_and_forward_are_one_whichever_the_class_defines() -> None:
    x = torch.ones(1)
    assert torch.equal(ByForward().construct(x), ByForward().forward(x))
    net, x = Net(), torch.ones(1, 2)
    assert torch.equal(net.construct(x), net.forward(x))
    assert torch.equal(net(x), net.down(net.up(x).relu()))


def test_a_class_with_neither_construct_nor_forward_is_an_error() -> None:
    with pytest.raises(UserTypeError, match=r"`Cell` defines neither `construct` nor `forward`"):
        Cell()(torch.ones(1))


def test_the_signature_is_that_of_what_the_author_wrote() -> None:
    assert list(call_signature(Net()).parameters) == ["x", "scale"]
    assert list(call_signature(ByForward()).parameters) == ["x"]
    assert call_signature(nn.Linear(1, 1)) == inspect.signature(nn.Linear(1, 1).forward)


def test_a_cell_that_is_not_parallel_does_not_reach_the_engine(
    engine_calls: list[tuple[Any, ...]],
) -> None:
    Net()(torch.ones(1, 2))
    assert engine_calls == []


def test_the_outermost_call_of_a_parallel_cell_reaches_the_engine_once(
    engine_calls: list[tuple[Any, ...]],
) -> None:
    class Outer(Cell):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net().set_auto_parallel()

        def construct(self, x: Tensor) -> Tensor:
            return self.inner(x, scale=2.0)

    net, x = Outer().set_auto_parallel(), torch.ones(1, 2)
    assert torch.equal(net(x), net.inner.forward(x, 2.0))
    assert engine_calls == [(net, (x,), {})]
    assert net.set_auto_parallel(False).is_auto_parallel is False
    net(x)
    assert [call[0] for call in engine_calls] == [net, net.inner]


def test_hooks_of_the_outermost_cell_run_around_the_engine_at_every_call(
    engine_calls: list[tuple[Any, ...]],
) -> None:
    net, seen = Net().set_auto_parallel(), []
    net.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    net.register_forward_hook(lambda module, args, out: seen.append(module) or 2 * out)
    gradients: list[Tensor] = []
    net.register_full_backward_hook(lambda module, into, out: gradients.append(out[0]))
    x = torch.ones(1, 2, requires_grad=True)
    for _ in range(2):
        out = net(x)
    out.sum().backward()
    assert torch.equal(out, 2 * net.forward(x + 1))
    assert seen == [net, net]
    assert len(engine_calls) == 2
    assert torch.equal(engine_calls[1][1][0], x + 1)
    assert [g.tolist() for g in gradients] == [[[1.0, 1.0]]]
    assert "forward" not in vars(net)


def test_a_hook_that_raises_leaves_the_cell_as_it_was(engine_calls: list[tuple[Any, ...]]) -> None:
    def fail(module: nn.Module, args: tuple[Any, ...]) -> None:
        raise RuntimeError("no")

    net = Net().set_auto_parallel()
    handle = net.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        net(torch.ones(1, 2))
    handle.remove()
    assert engine_calls == []
    assert "forward" not in vars(net)
    net(torch.ones(1, 2))
    assert len(engine_calls) == 1


def test_a_forward_that_was_put_on_the_instance_is_the_one_that_runs(
    engine_calls: list[tuple[Any, ...]],
) -> None:
    net = Net().set_auto_parallel()
    net.register_forward_hook(lambda module, args, out: out + 1)
    net.forward = lambda x: 0 * x  # type: ignore[method-assign]
    assert net(torch.ones(2)).tolist() == [1.0, 1.0]
    assert net.forward(torch.ones(1)).tolist() == [0.0]


def test_names_of_parameters_are_their_paths() -> None:
    net = Net()
    assert net.up.weight.name == "up.weight"
    outer = Cell()
    outer.blocks = nn.ModuleList([Net(), Net()])
    assert outer.blocks[1].down.bias.name == "blocks.1.down.bias"
    assert outer.blocks[1].cell_path == "blocks.1"
    assert outer.cell_path == ""
    assert [p.name for p in outer.trainable_params()] == [n for n, _ in outer.named_parameters()]


def test_names_are_put_right_when_a_list_grew_after_its_assignment() -> None:
    net = Cell()
    net.layers = nn.ModuleList()
    net.layers.append(Net())
    assert next(p.name for p in net.trainable_params()) == "layers.0.up.weight"


def test_a_tied_parameter_has_the_name_under_which_it_comes_first() -> None:
    net = Cell()
    net.embed, net.head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
    net.head.weight = net.embed.weight
    assert [p.name for p in net.trainable_params()] == ["embed.weight"]


def test_a_wrapper_without_prefix_leaves_names_as_they_are() -> None:
    wrapper = Cell(auto_prefix=False)
    wrapper.net = Net()
    outer = Cell(auto_prefix=False)
    outer.wrapper = wrapper
    assert next(p.name for p in outer.trainable_params()) == "up.weight"


def test_a_torch_parameter_becomes_ours_in_place() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    net = Cell()
    net.scale = weight
    assert net.scale is weight
    assert isinstance(weight, Parameter)
    assert weight.name == "scale"
    weight.sum().backward()
    optimizer.step()
    assert net.scale.tolist() == [0.5, 0.5]


def test_a_frozen_parameter_is_not_among_the_trainable_ones() -> None:
    net = Net()
    net.up.weight.requires_grad_(False)
    assert [p.name for p in net.trainable_params()] == ["up.bias", "down.weight", "down.bias"]
    assert net.trainable_params(recurse=False) == []


def test_set_train_reaches_all_children() -> None:
    net = Net()
    assert net.set_train(False) is net
    assert [m.training for _, m in net.cells_and_names()] == [False] * 3
    assert net.set_train().up.training


def test_iterators_give_paths() -> None:
    net = Net()
    assert [name for name, _ in net.cells_and_names()] == ["", "up", "down"]
    assert next(name for name, _ in net.parameters_and_names("net")) == "net.up.weight"
    assert list(net.parameters_and_names(expand=False)) == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_of_a_cell_keeps_names_annotations_and_mode(copied: Any) -> None:
    net = Net().set_auto_parallel()
    net.shard(((2, 1),))
    twin = copied(net)
    assert twin.is_auto_parallel
    assert twin.sharding == net.sharding
    assert twin.up.weight.name == "up.weight"
    assert twin.up.weight is not net.up.weight
    assert torch.equal(twin.up.weight, net.up.weight)


def test_state_dict_holds_plain_tensors_under_torch_names() -> None:
    state = Net().state_dict()
    assert list(state) == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert {type(value) for value in state.values()} == {Tensor}
