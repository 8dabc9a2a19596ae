"""Cells and their parameters under what torch offers for modules: each beside a plain module."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import utils
from torch.nn.utils import parametrizations, parametrize, prune

import distcell as dc
from distcell import nn

Change = Callable[[torch.nn.Module], object]


class Absolute(torch.nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.abs()


class AbsoluteCell(nn.Cell):
    def construct(self, weight: Tensor) -> Tensor:
        return weight.abs()


def removed(net: torch.nn.Module) -> None:
    parametrizations.weight_norm(net)
    parametrize.remove_parametrizations(net, "weight")


def pruned(net: torch.nn.Module) -> None:
    prune.l1_unstructured(net, "weight", amount=0.3)
    prune.remove(net, "weight")


def pruned_globally(net: torch.nn.Module) -> None:
    prune.global_unstructured([(net, "weight"), (net, "bias")], prune.L1Unstructured, amount=3)


def doubled(net: torch.nn.Module) -> None:
    vector = utils.parameters_to_vector(net.parameters())
    utils.vector_to_parameters(2 * vector, net.parameters())


CHANGES: dict[str, Change] = {
    "weight_norm": utils.weight_norm,
    "weight_norm removed": lambda net: utils.remove_weight_norm(utils.weight_norm(net)),
    "spectral_norm": utils.spectral_norm,
    "spectral_norm removed": lambda net: utils.remove_spectral_norm(utils.spectral_norm(net)),
    "parametrizations.weight_norm": parametrizations.weight_norm,
    "parametrizations.weight_norm removed": removed,
    "parametrizations.spectral_norm": parametrizations.spectral_norm,
    "parametrizations.orthogonal": parametrizations.orthogonal,
    "own parametrization": lambda net: parametrize.register_parametrization(
        net, "weight", Absolute()
    ),
    "own parametrization, a Cell": lambda net: parametrize.register_parametrization(
        net, "weight", AbsoluteCell() if isinstance(net, nn.Cell) else Absolute()
    ),
    "prune": lambda net: prune.l1_unstructured(net, "weight", amount=0.3),
    "prune rows": lambda net: prune.random_structured(net, "weight", amount=1, dim=0),
    "prune globally": pruned_globally,
    "prune removed": pruned,
    "vector": doubled,
}


def twins() -> tuple[nn.Dense, torch.nn.Linear]:
    """A Cell and a module with the same values."""
    torch.manual_seed(0)
    ours, theirs = nn.Dense(3, 4), torch.nn.Linear(3, 4)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def trained(net: torch.nn.Module, clip: Change = lambda net: None) -> Tensor:
    """What the net gives after two steps."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    for _ in range(2):
        net(x).pow(2).sum().backward()
        clip(net)
        optimizer.step()
        optimizer.zero_grad()
    result: Tensor = net(x)
    return result.detach()


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("what", CHANGES)
def test_what_torch_does_to_the_weights_of_a_module_it_does_to_those_of_a_cell(what: str) -> None:
    nets = twins()
    for net in nets:
        torch.manual_seed(1)
        CHANGES[what](net)
    ours, theirs = (trained(net) for net in nets)
    assert torch.equal(ours, theirs)
    assert list(nets[0].state_dict()) == list(nets[1].state_dict())
    names = {param.name for param in nets[0].trainable_params()}  # type: ignore[attr-defined]
    assert names == {name for name, _ in nets[1].named_parameters()}


@pytest.mark.parametrize(
    "clip",
    [
        lambda net: utils.clip_grad_norm_(net.parameters(), 0.1),
        lambda net: utils.clip_grad_value_(net.parameters(), 0.05),
    ],
    ids=["norm", "value"],
)
def test_gradients_are_clipped(clip: Change) -> None:
    ours, theirs = twins()
    assert torch.equal(trained(ours, clip), trained(theirs, clip))


def test_a_parameter_can_be_made_of_a_parameter() -> None:
    weight = nn.Dense(3, 4).weight
    made = torch.nn.Parameter(weight, requires_grad=False)
    assert made.data_ptr() == weight.data_ptr()
    assert made.is_leaf and not made.requires_grad and isinstance(made, torch.nn.Parameter)
    assert type(weight.detach()) is Tensor


# - Copies and files


class Mixed(nn.Cell):
    """Torch modules in a Cell, and a Cell in a torch module."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Dense(3, 4)
        self.rest = torch.nn.Sequential(torch.nn.Linear(4, 4), nn.Dense(4, 2))
        self.norm = torch.nn.BatchNorm1d(2)
        self.scale = dc.Parameter(torch.ones(1), name="own")

    def construct(self, x: Tensor) -> Tensor:
        return self.norm(self.rest(self.up(x))) * self.scale


class MixedModule(torch.nn.Module):
    """The same of torch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(3, 4)
        self.rest = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        self.norm = torch.nn.BatchNorm1d(2)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.rest(self.up(x))) * self.scale
        return result


def saved(item: Any, **options: Any) -> Any:
    """What `torch.load` gives back of what `torch.save` has written."""
    file = io.BytesIO()
    torch.save(item, file)
    file.seek(0)
    return torch.load(file, **options)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda item: pickle.loads(pickle.dumps(item)),
    "torch.save": lambda item: saved(item, weights_only=False),
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copied_cell_computes_the_same_and_shares_nothing(way: str) -> None:
    net = Mixed()
    twin = COPIES[way](net)
    assert [p.name for p in twin.parameters()] == [p.name for p in net.parameters()]
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    expected = trained(copy.deepcopy(net))
    assert torch.equal(trained(twin), expected)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("way", [*COPIES, "torch.save, weights only"])
def test_a_copied_parameter_keeps_name_settings_and_value(way: str) -> None:
    net = Mixed()
    net.set_comm_fusion(3)
    make = COPIES.get(way, saved)
    for param in (net.scale, net.up.weight):
        twin = make(param)
        assert type(twin) is dc.Parameter and repr(twin) == repr(param)
        assert twin.comm_fusion == 3 and torch.equal(twin, param)
        assert twin.data_ptr() != param.data_ptr()


def test_a_shared_parameter_is_copied_once() -> None:
    first, second = nn.Dense(2, 2), nn.Dense(2, 2)
    second.weight = first.weight
    twin = copy.deepcopy(nn.SequentialCell(first, second))
    assert twin[0].weight is twin[1].weight is not first.weight


def test_state_dicts_go_both_ways() -> None:
    cell, module = Mixed(), MixedModule()
    assert list(cell.state_dict()) == list(module.state_dict())
    module.load_state_dict(saved(cell.state_dict()))
    assert torch.equal(trained(cell), trained(module))
    again = Mixed()
    again.load_state_dict(saved(module.state_dict()))
    assert torch.equal(trained(again), trained(module))


def test_a_cell_in_a_torch_module_is_trained() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(nn.Dense(3, 4), torch.nn.Sequential(Absolute(), nn.Dense(4, 2)))
    plain = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Sequential(Absolute(), torch.nn.Linear(4, 2))
    )
    plain.load_state_dict(net.state_dict())
    assert torch.equal(trained(net), trained(plain))


# - Compilers


class Detached(Mixed):
    def construct(self, x: Tensor) -> Tensor:
        return super().construct(x) + (x @ self.up.weight.detach().T).sum()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Mixed, Detached])
def test_torch_compiles_a_cell_whole(kind: type[nn.Cell]) -> None:
    net, x = kind(), torch.ones(2, 3)
    twin = copy.deepcopy(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    for each in (compiled, twin):
        each(x).sum().backward()
    assert torch.allclose(compiled(x), twin(x))
    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
